// The room Data: opens a folder of images, and changes it; the changes can be undone.
import { count, progressOf, say } from "../i18n/sentences.js";
import { addressOf, note, register } from "../server/addresses.js";
import { all, find, finder, hit, isBox, isField, setValue, showMessage } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { countRequests, noteSubject } from "../server/late.js";
import * as drops from "./images_drops.js";
import * as history from "./images_history.js";
import * as masks from "./images_masks.js";
import { renderOverview } from "./images_overview.js";
import * as page from "./images_page.js";
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
 * @property {(overview: Overview) => void} show
 * @property {() => Promise<void>} page show the current images again
 * @property {() => string} described
 * @property {Record<string, () => unknown>} actions by data-do of the buttons
 */

const KEY = "images-tab";

/** @type {HTMLElement} */
let root;
/** @type {Overview | null} */
let now = null;
let named = ""; // the folder or file whose images are shown, as its field has it
let messages = 0, changed = 0;
let working = ""; // the job whose result is pending
let isRecalled = false; // whether to reopen the folder after a reload
const beginOpening = countRequests();

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
  ...page.filter(),
  ...more,
});

/**
 * Messages stay in view while the user scrolls; good ones disappear by themselves.
 * @param {"good" | "bad" | "plain"} kind
 * @param {string} text
 */
function notify(kind, text) {
  messages++;
  const isLast = noteSubject(() => messages), where = part(":scope > .said-of");
  showMessage(where, kind, text);
  if (kind === "good" && text) setTimeout(() => isLast() && showMessage(where, kind, ""), 9000);
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
 * Open the folder in the field. Returns false if an error is shown instead.
 * @param {boolean} [keep] whether to keep showing the same images
 */
async function open(keep = false) {
  const isNewest = beginOpening(), hasNoMessage = noteSubject(() => messages), asked = folder().value;
  isRecalled = false;
  sources.follow();
  let isUnchanged, overview;
  do { // repeat if the folder may have changed meanwhile
    isUnchanged = noteSubject(() => changed);
    overview = await attempt(() =>
      work("images_open", {
        folder: folder().value, settings: settings(), trigger: trigger().value, ...sources.question(),
      }));
  } while (overview && isNewest() && !isUnchanged());
  if (!isNewest()) return true; // another one was opened meanwhile
  if (!overview) {
    if (!keep || nameNow() !== named) close();
    return false;
  }
  if (!keep) page.reset();
  if (hasNoMessage()) notify("good", "");
  showOverview(overview);
  await page.show();
  panels.refresh();
  remember();
  const files = ["dataset_config", "in_json"].map((name) => part(`[data-setting=${name}]`, HTMLInputElement).value);
  const looked = [asked, overview.folder].map((name) => [name, ...files]);
  document.dispatchEvent(new CustomEvent("kohya:looked", { detail: looked }));
  if (!described() && root.checkVisibility()) note(addressOf("data", overview.folder));
  return true;
}

/** Hide the images shown so far: beside an error they would look like those of the requested folder. */
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

/** Count again when the tab is opened, if the form behind the count has changed. */
function watchOpening() {
  new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    const isNew = sources.follow();
    if (now ? isNew : isRecalled) open(Boolean(now));
  }).observe(root);
}

/**
 * Send a request that changes the folder, and show the result. Returns whether that worked, and the
 * folder is still open.
 * @param {string} name
 * @param {Record<string, unknown>} question
 * @param {(found: any) => string} tell
 */
async function change(name, question, tell) {
  const isSame = noteSubject(() => now?.folder), answer = await attempt(() => work(name, query(question)));
  changed += 1;
  if (!answer) return false;
  notify("good", tell(answer));
  if (!isSame()) return false;
  showOverview(answer);
  await page.show();
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
  renderOverview(root, overview, page.filter(), page.narrow);
  part("[data-do=compare]").textContent = overview.compared ? "Find duplicates again" : "Find duplicates";
  history.showHistory(overview.past);
}

// ---- what the buttons do

async function compare() {
  const done = await change("images_compare", {}, ({ kinds }) =>
    kinds.double
      ? say("{images} are duplicates of others, or similar to them.", { images: count(kinds.double, "image") })
      : "No duplicates and no similar images were found.");
  if (done && now?.kinds.double) page.narrow({ show: "double" });
}

async function remove() {
  const done = await change("images_remove", { names: page.chosen() }, (answer) =>
    say("{images} moved to the trash. Undo brings back what was moved.", { images: count(answer.done, "image") }));
  if (done) page.choose();
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
  overview: () => now, query, change, attempt, notify, open, described, show: showOverview,
  rows: page.rowsNow, page: page.show, captionOf: page.captionOf,
  actions: {
    open: () => {
      sources.adopt();
      open();
    },
    halt: () => working && ask("images_stop", { work: working }).catch(() => {}),
    none: page.choose,
    read_captions: () => now && sources.change("caption_extension", now.unread_ending),
    compare, remove, undo,
  },
};

/** @type {(value?: unknown) => void} */
let isMounted;
const mounted = new Promise((done) => (isMounted = done));

// The address of a folder; false if it cannot be opened, which is reported before.
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
  page.mount(root, tab);
  drops.mount(root, tab);
  history.mount(root, tab);
  masks.mount(root, tab);
  recall();
  watchOpening();
  panels.mount(root, tab);
  isMounted();
}
