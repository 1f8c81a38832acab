// The room Data: a folder's images page by page, their captions, and changes that can be undone.
import { count, progressOf, say } from "../i18n/sentences.js";
import { addressOf, note, register } from "../server/addresses.js";
import { all, find, finder, hit, isBox, isField, make, makeButton, setValue, showMessage } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { badges, captionField, facts, frame, tellWhy, turns } from "./images_cards.js";
import * as drops from "./images_drops.js";
import * as history from "./images_history.js";
import * as masks from "./images_masks.js";
import { renderOverview } from "./images_overview.js";
import * as panels from "./images_panels.js";
import * as sources from "./images_sources.js";

/** @typedef {import("./images_cards.js").Row} Row */
/** @typedef {import("./images_overview.js").Overview} Overview */
/**
 * @typedef {object} Tab what the tab's other modules use of this one
 * @property {() => Overview | null} overview
 * @property {() => Row[]} rows
 * @property {(more?: Record<string, unknown>) => Record<string, unknown>} query
 * @property {(name: string, question: Record<string, unknown>, tell: (found: any) => string) => Promise<boolean>}
 *   change
 * @property {<T>(what: () => Promise<T>) => Promise<T | null>} attempt
 * @property {(kind: "good" | "bad" | "plain", text: string) => void} notify
 * @property {(keep?: boolean) => Promise<boolean>} open
 * @property {(row: Row) => HTMLTextAreaElement} captionOf
 * @property {() => Promise<void>} page show the current images again
 * @property {() => string} described
 * @property {Record<string, () => unknown>} actions by data-do of the buttons
 */

const PAGE = 48;
const KEY = "images-tab";

/** @type {HTMLElement} */
let root;
/** @type {Overview | null} */
let now = null;
/** @type {Row[]} */
let rows = [];
/** @type {{ start: number, show: string, place: string | null, words: string }} */
const view = { start: 0, show: "all", place: null, words: "" };
/** @type {Set<string>} */
const chosen = new Set();
let named = ""; // the folder or file whose images are shown, as its field has it
let pages = 0,
  messages = 0,
  opened = 0,
  changed = 0,
  working = "", // the job that is being waited for
  isRecalled = false; // whether the folder was open before a reload

const part = finder(() => root);
const folder = () => part("#images-folder", HTMLInputElement);
const trigger = () => part("#images-trigger", HTMLInputElement);
const described = () => part("[data-setting=dataset_config]", HTMLInputElement).value.trim();
const nameNow = () => described() || folder().value.trim();

/** @param {Record<string, unknown>} [more] */
const query = (more = {}) => ({
  folder: now?.folder,
  collection: now?.collection,
  trigger: trigger().value,
  show: view.show,
  place: view.place,
  words: view.words,
  ...more,
});

/**
 * Messages stay in view while the user scrolls; good ones disappear by themselves.
 * @param {"good" | "bad" | "plain"} kind
 * @param {string} text
 */
function notify(kind, text) {
  const messageNumber = ++messages, where = part(":scope > .said-of");
  showMessage(where, kind, text);
  if (kind === "good" && text) setTimeout(() => messageNumber === messages && showMessage(where, kind, ""), 9000);
}

const settingFields = () => all(root, "[data-setting]").filter(isField);
const settings = () =>
  Object.fromEntries(
    settingFields().map((field) => [field.dataset.setting, isBox(field) ? field.checked : field.value.trim()]));

/**
 * Start a job and wait for its end, showing its progress and a button that stops it.
 * @param {string} name
 * @param {Record<string, unknown>} question
 */
async function work(name, question) {
  const bar = part(".working");
  let answer = await ask(name, question);
  try {
    while (answer.work) {
      working = answer.work;
      bar.hidden = false;
      find(bar, "span").textContent = answer.total
        ? progressOf(answer.phase, answer.done.toLocaleString("en"), answer.total.toLocaleString("en"))
        : "Looking";
      find(bar, "i").style.width = `${answer.total ? (100 * answer.done) / answer.total : 0}%`;
      answer = await ask("images_work", { work: answer.work });
    }
  } finally {
    working = "";
    bar.hidden = true;
  }
  return answer;
}

/**
 * Run a function; show its error, and return null then.
 * @template T
 * @param {() => Promise<T>} what
 * @returns {Promise<T | null>}
 */
async function attempt(what) {
  try {
    return await what();
  } catch (error) {
    notify("bad", messageOf(error));
    return null;
  }
}

/**
 * Open the folder that is named. Returns false if an error is shown instead.
 * @param {boolean} [keep] whether to keep showing the same images
 */
async function open(keep = false) {
  const openNumber = ++opened, messagesBefore = messages, asked = folder().value;
  sources.follow();
  let changesBefore, overview;
  do { // repeat if the folder may have changed meanwhile
    changesBefore = changed;
    overview = await attempt(() =>
      work("images_open", {
        folder: folder().value, settings: settings(), trigger: trigger().value, ...sources.question(),
      }));
  } while (overview && openNumber === opened && changesBefore !== changed);
  if (openNumber !== opened) return true; // another one was opened meanwhile
  if (!overview) {
    if (!keep || nameNow() !== named) close();
    return false;
  }
  if (!keep) {
    Object.assign(view, { start: 0, show: "all", place: null, words: "" });
    chosen.clear();
    part(".sieve .words", HTMLInputElement).value = "";
  }
  if (messagesBefore === messages) notify("good", "");
  showOverview(overview);
  await showPage();
  panels.refresh();
  remember();
  const files = ["dataset_config", "in_json"].map((name) => part(`[data-setting=${name}]`, HTMLInputElement).value);
  const looked = [asked, overview.folder].map((name) => [name, ...files]);
  document.dispatchEvent(new CustomEvent("kohya:looked", { detail: looked }));
  if (!described() && root.checkVisibility()) note(addressOf("data", overview.folder));
  return true;
}

/** Hide the images shown so far: beside an error they would look like those of the folder that was named. */
function close() {
  now = null;
  part(".collection").hidden = true;
}

/** Keep the folder for a reload of the page. */
function remember() {
  try {
    sessionStorage.setItem(
      KEY,
      JSON.stringify({
        folder: folder().value, trigger: trigger().value, settings: settings(), taken: sources.state(),
      }));
  } catch {} // without storage the browser only forgets
}

function recall() {
  let before = null;
  try {
    before = JSON.parse(sessionStorage.getItem(KEY) ?? "null");
  } catch {}
  if (!before) return;
  folder().value = before.folder;
  trigger().value = before.trigger;
  for (const field of settingFields()) setValue(field, before.settings[field.dataset.setting ?? ""]);
  sources.restore(before.taken);
  isRecalled = true;
}

/** Count anew when the tab is opened, if the form has changed that is counted with. */
function watchOpening() {
  new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    const isNew = sources.follow();
    if (now ? isNew : isRecalled && !opened) open(Boolean(now));
  }).observe(root);
}

/**
 * Send a request that changes the folder, and show the folder as it is then. Returns whether that worked.
 * @param {string} name
 * @param {Record<string, unknown>} question
 * @param {(found: any) => string} tell
 */
async function change(name, question, tell) {
  const answer = await attempt(() => work(name, query(question)));
  changed += 1;
  if (!answer) return false;
  showOverview(answer);
  notify("good", tell(answer));
  await showPage();
  panels.refresh();
  return true;
}

/** @param {Overview} overview */
function showOverview(overview) {
  now = overview;
  if (!described()) folder().value = overview.folder;
  named = nameNow();
  part("[data-do=give]").hidden = Boolean(overview.fixed);
  sources.show(overview);
  renderOverview(root, overview, view, narrow);
  part("[data-do=compare]").textContent = overview.compared ? "Find duplicates again" : "Find duplicates";
  history.showHistory(overview.past);
}

/**
 * Filter the images: by kind, folder or words.
 * @param {Partial<typeof view>} changes
 */
function narrow(changes) {
  Object.assign(view, { start: 0 }, changes);
  part(".sieve .show", HTMLSelectElement).value = view.show;
  for (const chip of all(root, ".findings [data-kind]"))
    chip.setAttribute("aria-pressed", String(chip.dataset.kind === view.show));
  showPage();
  panels.showTags();
}

// ---- the cards

async function showPage() {
  const pageNumber = ++pages;
  const answer = await attempt(() => ask("images_page", query({ start: view.start, count: PAGE })));
  if (!answer || pageNumber !== pages) return;
  view.start = answer.start;
  rows = answer.rows;
  part(".cards").replaceChildren(...rows.map(card));
  if (!rows.length && now?.kinds.all) part(".cards").append(make("p", { className: "quiet" }, "No image matches."));
  for (const pager of all(root, ".pager"))
    pager.replaceChildren(...(answer.total ? turns(answer.start, answer.total, PAGE, turnTo) : []));
  showChosen();
}

/** @param {number} start of the page to show */
function turnTo(start) {
  view.start = start;
  showPage().then(() => part(".sieve").scrollIntoView({ block: "start" }));
}

/** @param {Row} row */
function card(row) {
  const box = make("input", {
    type: "checkbox", hidden: Boolean(row.fixed), checked: chosen.has(row.name),
    "aria-label": say("Choose {name}", { name: row.name }),
  });
  box.onchange = () => {
    if (box.checked) chosen.add(row.name);
    else chosen.delete(row.name);
    showChosen();
  };
  const picture = makeButton("", () => panels.showLarge(row), { className: "look", title: "Enlarge" });
  picture.append(masks.overlay(frame(row, 320), row, 320));
  return make("article", { "data-name": row.name },
    picture,
    make("div", { className: "about" },
      make("label", { className: "name", title: row.name }, box, make("span", {}, row.name)),
      captionField(row, storeCaption),
      make("small", { className: "quiet" }, facts(row)),
      make("div", { className: "badges" }, badges(row))));
}

/**
 * @param {Row} row
 * @param {HTMLTextAreaElement} text
 */
async function storeCaption(row, text) {
  if (!now || text.value === (row.caption ?? "")) return;
  const { folder, collection } = now;
  text.dataset.state = "storing";
  const answer = await attempt(() =>
    ask("images_caption", {
      folder, collection, name: row.name, text: text.value, expected: row.caption, trigger: trigger().value,
    }));
  text.dataset.state = answer && !answer.said ? "stored" : "failed";
  if (!answer) return;
  const isNew = row.caption !== answer.row.caption;
  Object.assign(row, answer.row);
  tellWhy(text, answer.said ?? "");
  if (!answer.said) {
    if (now?.folder === folder) showOverview(answer); // unless another one was opened meanwhile
  } else if (isNew) text.value = row.caption ?? "";
  const about = root.querySelector(`.cards [data-name="${CSS.escape(row.name)}"] .about`);
  about?.querySelector(".badges")?.replaceChildren(...badges(row));
  const other = about?.querySelector("textarea");
  if (other && other !== text) other.value = row.caption ?? "";
  panels.showTags();
}

function showChosen() {
  part(".chosen").hidden = !chosen.size;
  part(".chosen span").textContent = say("{images} chosen", { images: count(chosen.size, "image") });
}

// ---- what the buttons do

async function compare() {
  const done = await change("images_compare", {}, ({ kinds }) =>
    kinds.double
      ? say("{images} are duplicates of others, or similar to them.", { images: count(kinds.double, "image") })
      : "No duplicates and no similar images were found.");
  if (done && now?.kinds.double) narrow({ show: "double" });
}

async function remove() {
  const done = await change("images_remove", { names: [...chosen] }, (answer) =>
    say("{images} moved to the trash. Undo brings back what was moved.", { images: count(answer.done, "image") }));
  if (!done) return;
  chosen.clear();
  showChosen();
}

const undo = () =>
  change("images_undo", {}, (answer) => {
    const left = say("{files} had been changed since and were left: {names}", {
      files: count(answer.lefts, "file"), names: answer.left.join(", "),
    });
    return `${say("Undone: {change}.", { change: answer.undone })}${answer.lefts ? `\n${left}` : ""}`;
  });

/** @type {Tab} */
const tab = {
  overview: () => now, rows: () => rows, query, change, attempt, notify, open, described, page: showPage,
  captionOf: (row) => captionField(row, storeCaption),
  actions: {
    open: () => {
      sources.adopt();
      open();
    },
    halt: () => working && ask("images_stop", { work: working }).catch(() => {}),
    none: () => {
      chosen.clear();
      showPage();
    },
    compare, remove, undo,
  },
};

/** @type {(value?: unknown) => void} */
let isMounted;
const mounted = new Promise((done) => (isMounted = done));

// The address of a folder; false if it cannot be opened, which has been said by then.
register("data", async (named) => {
  await mounted;
  if (!named || now?.folder === named) return true;
  folder().value = named;
  await open();
  return now?.folder === folder().value;
});

/** @param {Element} element */
export function mount(element) {
  root = find(element, ".images");
  now = null;
  root.addEventListener("click", (event) => tab.actions[hit(event, "[data-do]")?.dataset.do ?? ""]?.());
  folder().addEventListener("keydown", ({ key }) => key === "Enter" && tab.actions.open());
  sources.mount(root, tab); // its listener first, which keeps a setting changed here from being followed away
  part(".how").addEventListener("change", () => now && open(true));
  const show = part(".sieve .show", HTMLSelectElement), place = part(".sieve .place", HTMLSelectElement);
  show.onchange = () => narrow({ show: show.value });
  place.onchange = () => narrow({ place: place.value ? place.value.slice(1) : null });
  const words = part(".sieve .words", HTMLInputElement);
  let pause = 0;
  words.oninput = () => {
    clearTimeout(pause);
    pause = setTimeout(() => narrow({ words: words.value }), 200);
  };
  drops.mount(root, tab);
  history.mount(root, tab);
  masks.mount(root, tab);
  recall();
  watchOpening();
  panels.mount(root, tab);
  isMounted();
}
