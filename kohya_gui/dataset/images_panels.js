// The panels of the room Data: tags, automatic captions, folder preparation; and the large view of an image.
import { count, say } from "../i18n/sentences.js";
import { all, finder, make, makeButton } from "../server/elements.js";
import { ask } from "../server/http.js";
import { countRequests, noteSubject } from "../server/late.js";
import * as commands from "../tools/commands.js";
import { badges, facts, frame, thumb } from "./images_cards.js";
import * as history from "./images_history.js";
import * as masks from "./images_masks.js";

/** @typedef {import("./images_cards.js").Row} Row */
/** @typedef {import("./images.js").Tab} Tab */
/** @typedef {{ name: string, before: string, after: string }} Sample a caption that an edit of tags would change */

/** @type {HTMLElement} */
let root;
/** @type {Tab} */
let tab;
let ready = ""; // the edit that was previewed, and may be applied
const beginTags = countRequests();

const part = finder(() => root);
const input = (/** @type {string} */ selector) => part(selector, HTMLInputElement);
const action = () => part("#tags-action", HTMLSelectElement).value;

// ---- tags

/** Show how often each tag occurs in the current captions. */
export async function showTags() {
  if (!tab?.overview() || !part("[data-panel=tags]", HTMLDetailsElement).open) return;
  const isNewest = beginTags();
  const answer = await tab.attempt(() => ask("images_tags", tab.query({ prefix: input("#tags-filter").value })));
  if (!answer || !isNewest()) return;
  /** @type {[string, number][]} */
  const tags = answer.tags;
  part(".frequencies").replaceChildren(...tags.map(([tag, n]) => {
    const chip = makeButton("", () => {
      const field = input(action() === "add" ? "#tags-put" : "#tags-find");
      field.value = tag;
      forget();
      field.focus();
    }, { title: "Use as the search text" });
    chip.append(make("code", {}, tag), make("b", {}, n.toLocaleString("en")));
    return chip;
  }), answer.more ? make("span", {}, `+ ${answer.more.toLocaleString("en")}`) : "");
}

const edit = () => ({
  action: action(),
  find: input("#tags-find").value,
  put: input("#tags-put").value,
  at_end: input("#tags-end").checked,
  match_case: input("#tags-case").checked,
});

/** Only the edit that was previewed can be applied. */
function forget() {
  part(".change .find").hidden = action() === "add";
  part(".change .put").hidden = action() === "remove";
  part(".change .end").hidden = action() !== "add";
  part(".change .put label").textContent = action() === "add" ? "Tags to add" : "Replace with";
  ready = "";
  part("[data-do=edit]", HTMLButtonElement).disabled = true;
  part(".preview").replaceChildren();
}

async function preview() {
  const question = () => JSON.stringify(tab.query(edit())), isSame = noteSubject(question);
  const answer = await tab.attempt(() => ask("images_edit", tab.query({ ...edit(), apply: false })));
  if (!answer || !isSame()) return;
  tab.notify("good", "");
  ready = answer.changes ? question() : "";
  part("[data-do=edit]", HTMLButtonElement).disabled = !answer.changes;
  const [changes, shown] = [count(answer.changes, "caption"), count(answer.of, "shown image")];
  /** @type {Sample[]} */
  const samples = answer.samples;
  part(".preview").replaceChildren(
    make("p", {},
      say(answer.changes ? "{changes} of {shown} would change:" : "None of {shown} would change.", { changes, shown })),
    make("ul", {},
      samples.map(({ name, before, after }) =>
        make("li", {},
          make("small", {}, name),
          make("del", {}, make("code", {}, before)),
          make("ins", {}, make("code", {}, after))))));
}

async function applyEdit() {
  if (ready !== JSON.stringify(tab.query(edit()))) return preview();
  const done = await tab.change("images_edit", { ...edit(), apply: true }, (answer) =>
    say("{captions} changed. Undo brings the old ones back.", { captions: count(answer.done, "caption") }));
  if (done) forget();
}

// ---- folders

const preparation = () => part("#prepare-how", HTMLSelectElement);

function showPreparations() {
  const places = tab.overview()?.places ?? [];
  const direct = places.find((place) => place.folder === "");
  const entries = places
    .filter((place) => place.folder)
    .map(({ folder }) => [`rename/${folder}`, say("Rename {folder}", { folder })]);
  if (direct && !direct.words)
    entries.unshift([
      "gather",
      say("Move the {images} that are directly in this folder into a folder of their own",
        { images: count(direct.images, "image") }),
    ]);
  entries.push(["bring", "Copy images from another folder"]);
  const before = preparation().value;
  preparation().replaceChildren(
    ...entries.map(([value, text]) => make("option", { value, selected: value === before }, text)));
  showPreparation();
}

function showPreparation() {
  const how = preparation().value;
  part(".prepare .source").hidden = how !== "bring";
  const place = tab.overview()?.places.find(({ folder }) => `rename/${folder}` === how);
  if (!place) return;
  input("#prepare-repeats").value = String(place.repeats);
  input("#prepare-words").value = place.words || place.folder;
}

function prepare() {
  const [how, ...folderParts] = preparation().value.split("/");
  const repeats = Number(input("#prepare-repeats").value);
  if (!Number.isInteger(repeats) || repeats < 1) return tab.notify("bad", "Repeats: write a whole number from 1.");
  const question = {
    how, place: folderParts.join("/"), repeats, words: input("#prepare-words").value,
    source: input("#prepare-source").value,
  };
  return tab.change("images_prepare", question, (answer) =>
    say("The folder is called {name} now.", { name: answer.made }));
}

// ---- the large view

/** @type {HTMLDialogElement | undefined} */
let dialog;
let at = -1; // index of the row that is shown

/** @param {Row} row */
export function showLarge(row) {
  dialog ??= buildDialog();
  dialog.showModal();
  show(dialog, tab.rows().indexOf(row));
}

function buildDialog() {
  const built = make("dialog", { className: "closer" });
  built.addEventListener("keydown", ({ target, key }) => {
    if (target instanceof HTMLTextAreaElement) return;
    if (key === "ArrowLeft") show(built, at - 1);
    if (key === "ArrowRight") show(built, at + 1);
  });
  built.addEventListener("click", ({ target }) => target === built && built.close());
  root.append(built);
  return built;
}

/**
 * @param {HTMLDialogElement} where
 * @param {number} to
 */
function show(where, to) {
  const rows = tab.rows();
  at = Math.max(0, Math.min(rows.length - 1, to));
  const row = rows[at];
  where.replaceChildren(
    make("div", { className: "head" },
      make("b", {}, row.name),
      make("span", { className: "acts" },
        !row.fixed &&
          !row.broken &&
          row.size[0] > 0 &&
          makeButton("Edit mask", () => {
            where.close();
            masks.edit(row, thumb(row, 1280));
          }),
        makeButton("Previous", () => show(where, at - 1), { disabled: at === 0 }),
        makeButton("Next", () => show(where, at + 1), { disabled: at === rows.length - 1 }),
        makeButton("Close", () => where.close()))),
    make("div", { className: "large" }, masks.overlay(frame(row, 1280), row, 1280)),
    make("small", { className: "quiet" }, facts(row), row.cut > 0.001 ? ". The shaded part is cropped." : ""),
    make("div", { className: "badges" }, badges(row)), tab.captionOf(row));
  where.setAttribute("aria-label", row.name);
}

/** Show the generated captions beside the previous ones. */
async function showWritten() {
  const before = tab.overview()?.past[0]?.id;
  await tab.open(true);
  const last = tab.overview()?.past[0];
  if (last && last.id !== before && last.title.startsWith("Caption")) history.compare(last.id);
}

export function refresh() {
  showTags();
  showPreparations();
  masks.refresh();
}

/**
 * @param {HTMLElement} element
 * @param {Tab} parentTab
 */
export function mount(element, parentTab) {
  [root, tab, dialog] = [element, parentTab, undefined];
  Object.assign(tab.actions, { preview, edit: applyEdit, prepare });
  for (const panel of all(root, ".panel")) panel.addEventListener("toggle", () => tab.overview() && refresh());
  for (const id of ["tags-action", "tags-find", "tags-put", "tags-end", "tags-case"])
    part(`#${id}`).addEventListener("input", forget);
  for (const id of ["tags-find", "tags-put"])
    input(`#${id}`).addEventListener("keydown", ({ key }) => key === "Enter" && preview());
  let pause = 0;
  input("#tags-filter").oninput = () => {
    clearTimeout(pause);
    pause = setTimeout(showTags, 200);
  };
  preparation().onchange = showPreparation;
  const extension = input("[data-setting=caption_extension]");
  commands.mount(
    part("[data-panel=caption]"),
    () => ({ folder: tab.overview()?.folder ?? "", extension: extension.value }),
    showWritten);
  forget();
}
