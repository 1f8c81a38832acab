// The images of the folder page by page: a filter, and a card for each image, with its caption.
import { count, say } from "../i18n/sentences.js";
import { all, finder, make, makeButton } from "../server/elements.js";
import { ask } from "../server/http.js";
import { countRequests, noteSubject } from "../server/late.js";
import { badges, captionField, facts, frame, tellWhy, turns } from "./images_cards.js";
import * as masks from "./images_masks.js";
import * as panels from "./images_panels.js";

/** @typedef {import("./images_cards.js").Row} Row */
/** @typedef {import("./images.js").Tab} Tab */

const PAGE = 48;

/** @type {HTMLElement} */
let root;
/** @type {Tab} */
let tab;
/** @type {Row[]} */
let rows = [];
/** @type {{ start: number, show: string, place: string | null, words: string }} */
const view = { start: 0, show: "all", place: null, words: "" };
/** @type {Set<string>} */
const names = new Set(); // names of the chosen images
const begin = countRequests();
const part = finder(() => root);

export const rowsNow = () => rows;
export const chosen = () => [...names];
export const filter = () => ({ show: view.show, place: view.place, words: view.words });

/** Show all images of another folder, from the first. */
export function reset() {
  Object.assign(view, { start: 0, show: "all", place: null, words: "" });
  names.clear();
  part(".sieve .words", HTMLInputElement).value = "";
}

/**
 * Filter the images: by kind, folder or words.
 * @param {Partial<typeof view>} changes
 */
export function narrow(changes) {
  Object.assign(view, { start: 0 }, changes);
  part(".sieve .show", HTMLSelectElement).value = view.show;
  for (const chip of all(root, ".findings [data-kind]"))
    chip.setAttribute("aria-pressed", String(chip.dataset.kind === view.show));
  void show();
  panels.showTags();
}

/** Show the images of the folder that pass the filter. */
export async function show() {
  const isNewest = begin();
  const answer = await tab.attempt(() => ask("images_page", tab.query({ start: view.start, count: PAGE })));
  if (!answer || !isNewest()) return;
  view.start = answer.start;
  rows = answer.rows;
  part(".cards").replaceChildren(...rows.map(card));
  if (!rows.length && tab.overview()?.kinds.all)
    part(".cards").append(make("p", { className: "quiet" }, "No image matches."));
  for (const pager of all(root, ".pager"))
    pager.replaceChildren(...(answer.total ? turns(answer.start, answer.total, PAGE, turnTo) : []));
  showChosen();
}

/** @param {number} start of the page to show */
function turnTo(start) {
  view.start = start;
  show().then(() => part(".sieve").scrollIntoView({ block: "start" }));
}

/** @param {Row} row */
function card(row) {
  const box = make("input", {
    type: "checkbox", hidden: Boolean(row.fixed), checked: names.has(row.name),
    "aria-label": say("Choose {name}", { name: row.name }),
  });
  box.onchange = () => {
    if (box.checked) names.add(row.name);
    else names.delete(row.name);
    showChosen();
  };
  const picture = makeButton("", () => panels.showLarge(row), { className: "look", title: "Enlarge" });
  picture.append(masks.overlay(frame(row, 320), row, 320));
  return make("article", { "data-name": row.name },
    picture,
    make("div", { className: "about" },
      make("label", { className: "name", title: row.name }, box, make("span", {}, row.name)),
      captionOf(row),
      make("small", { className: "quiet" }, facts(row)),
      make("div", { className: "badges" }, badges(row))));
}

/**
 * @param {Row} row
 * @param {HTMLTextAreaElement} text
 */
async function storeCaption(row, text) {
  if (!tab.overview() || text.value === (row.caption ?? "")) return;
  const isSame = noteSubject(() => tab.overview()?.folder);
  text.dataset.state = "storing";
  const answer = await tab.attempt(() =>
    ask("images_caption", tab.query({ name: row.name, text: text.value, expected: row.caption })));
  text.dataset.state = answer && !answer.said ? "stored" : "failed";
  if (!answer) return;
  const isNew = row.caption !== answer.row.caption;
  Object.assign(row, answer.row);
  tellWhy(text, answer.said ?? "");
  if (!answer.said) {
    if (isSame()) tab.show(answer); // unless another one was opened meanwhile
  } else if (isNew) text.value = row.caption ?? "";
  const about = root.querySelector(`.cards [data-name="${CSS.escape(row.name)}"] .about`);
  about?.querySelector(".badges")?.replaceChildren(...badges(row));
  const other = about?.querySelector("textarea");
  if (other && other !== text) other.value = row.caption ?? "";
  panels.showTags();
}

/** @param {Row} row */
export const captionOf = (row) => captionField(row, storeCaption);

/** Choose none. */
export function choose() {
  names.clear();
  for (const box of all(root, ".cards .name input", HTMLInputElement)) box.checked = false;
  showChosen();
}

function showChosen() {
  part(".chosen").hidden = !names.size;
  part(".chosen span").textContent = say("{images} chosen", { images: count(names.size, "image") });
}

/**
 * @param {HTMLElement} element
 * @param {Tab} parentTab
 */
export function mount(element, parentTab) {
  [root, tab] = [element, parentTab];
  const kind = part(".sieve .show", HTMLSelectElement), place = part(".sieve .place", HTMLSelectElement);
  kind.onchange = () => narrow({ show: kind.value });
  place.onchange = () => narrow({ place: place.value ? place.value.slice(1) : null });
  const words = part(".sieve .words", HTMLInputElement);
  let pause = 0;
  words.oninput = () => {
    clearTimeout(pause);
    pause = setTimeout(() => narrow({ words: words.value }), 200);
  };
}
