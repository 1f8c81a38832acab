// A training tab: its contents are loaded when it is opened, and its buttons send requests.
import { say } from "../i18n/sentences.js";
import { go, openRoom, openTab, register } from "../server/addresses.js";
import { markAllowed } from "../server/allowed_folders.js";
import { all, around, find, hit, make, saveFile, showMessage } from "../server/elements.js";
import { address, addressOfApi, ask, UNANSWERED, wait } from "../server/http.js";
import { reveal } from "../panel/monitor.js";
import { read, sentOf, settleUnqueued, showBusy, tell, tellError, tellUnqueued } from "./messages.js";
import { fill, formOf, mount, turnOf } from "./page.js";
import { base, configFile, source } from "./storage.js";

/**
 * @typedef {{ message?: string, fill?: string, path?: string, opened?: string, run?: string, file?: { name: string,
 *   text: string } }} Answer a missing part stays unchanged
 */

const STARTS = ["train", "later"];
const CHECKS = [...STARTS, "check"]; // take seconds; problems in the form itself are shown first
const BUILD_DELAY = 1500; // milliseconds after the first tab until the others are built
const MAX_CONFIG_BYTES = 1_000_000; // bytes of an uploaded config

/** @type {Record<string, Promise<string>>} the contents of each tab, once requested */
const contents = {};

/**
 * The contents of a tab, as HTML.
 * @param {string} tab
 * @param {string} mark of the server's version
 */
function contentOf(tab, mark) {
  contents[tab] ??= fetch(address("form", { tab, of: mark })).then((answer) => {
    if (!answer.ok) throw new Error(answer.statusText);
    return answer.text();
  });
  contents[tab].catch(() => delete contents[tab]);
  return contents[tab];
}

/** @type {Record<string, HTMLElement>} tabs built before they are opened */
const ready = {};

/**
 * Set up a training tab that was added to the page, with its form's values from before a reload.
 * @param {Element} element
 */
export async function mountTraining(element) {
  const place = find(element, ".training"), { tab = "", mark = "" } = place.dataset;
  const content = ready[tab] ? "" : await contentOf(tab, mark).catch(() => "");
  if (ready[tab]) { // perhaps meanwhile
    place.replaceWith(ready[tab]);
    document.dispatchEvent(new CustomEvent("kohya:opened", { detail: formOf(tab) }));
    return;
  }
  if (!content) {
    document.addEventListener("kohya:back", () => mountTraining(element), { once: true });
    return showMessage(place, "bad", UNANSWERED);
  }
  ready[tab] = place;
  place.innerHTML = content;
  mountForm(place);
}

/** @param {HTMLElement} training */
const pathField = (training) => find(training, ".begin .path", HTMLInputElement);

/**
 * Set up the form of a tab, and name the config that it holds since before a reload.
 * @param {HTMLElement} training
 */
function mountForm(training) {
  mount(training);
  const { path, opened } = configFile(training.dataset.tab ?? "");
  pathField(training).value = path;
  if (opened) training.dataset.opened = opened; // otherwise Save would take it for another one's
}

window.addEventListener("pagehide", () => {
  for (const [tab, training] of Object.entries(ready))
    configFile(tab, { path: pathField(training).value, opened: training.dataset.opened ?? "" });
});

/** Build the tabs ahead, so that each opens at once: while the browser is idle, or now where other rooms read them. */
export function buildAhead() {
  const { mark = "", kinds = "" } = find(document, "#top header").dataset;
  const [pause, delay] = openRoom() === "train" ? [idle, BUILD_DELAY] : [async () => {}, 0];
  setTimeout(() => makeOthers(kinds.split(" "), mark, pause), delay);
}

/**
 * Build the tabs that are not open.
 * @param {string[]} tabs
 * @param {string} mark of the server's version
 * @param {() => Promise<unknown>} pause before each step
 */
async function makeOthers(tabs, mark, pause) {
  const place = make("div", { hidden: true });
  document.body.append(place);
  for (const tab of tabs) {
    await pause();
    const content = await contentOf(tab, mark).catch(() => "");
    await pause();
    if (!content || ready[tab]) continue;
    ready[tab] = make("div", { className: "training", "data-tab": tab, innerHTML: content });
    place.append(ready[tab]);
    mountForm(ready[tab]);
  }
}

/**
 * Register a callback for each time a built training tab is opened.
 * @param {(where: HTMLFormElement) => void} listener
 */
export const onOpened = (listener) =>
  document.addEventListener("kohya:opened", (event) => listener(/** @type {CustomEvent} */ (event).detail));

/** Wait until the browser is idle; Safari has no event for that. */
const idle = () =>
  new Promise((done) => ("requestIdleCallback" in window ? requestIdleCallback(done) : setTimeout(done, 200)));

/** @type {{ act: string, path: string, more: Record<string, unknown> }} the last config requested */
let loaded = { act: "load", path: "", more: {} };

/**
 * Pending requests, with the form's values when the button was last pressed: pressing it again sends no second request
 * unless something has changed meanwhile.
 * @type {Map<string, string>}
 */
const pending = new Map();

/**
 * Handle a button that is pressed again before its answer: the check of a form that has changed since is out of date.
 * @param {HTMLElement} training
 * @param {string} doing
 * @param {string} now the form's values, and the config's path
 */
function pressAgain(training, doing, now) {
  if (pending.get(doing) === now) return false;
  pending.set(doing, now);
  find(training, ".bar > .said").replaceChildren();
  return false;
}

// A reload would lose the forms whose check has not ended: the browser asks first.
addEventListener("beforeunload", (event) => {
  const starts = [...pending.keys()].some((doing) => STARTS.some((act) => doing.split(" ")[1] === act));
  if (starts) event.preventDefault();
});

/** The number of configs requested: only the last one is put into its form. */
let loads = 0;

/** The forms that are being added to the queue, one after the other in the order in which the button was pressed. */
let queueing = Promise.resolve();

/**
 * Whether a training was started or queued, which is shown even if the form has changed since.
 * @param {string} act
 * @param {Answer} answer
 */
const hasBegun = (act, { message = "" }) => STARTS.includes(act) && message.startsWith('<div class="message good"');

/**
 * Perform a button's action. Returns whether the form was filled in.
 * @param {HTMLElement} training
 * @param {string} act
 * @param {Record<string, unknown>} [more] to send in addition
 */
async function press(training, act, more = {}) {
  const { tab = "" } = training.dataset, isCheck = CHECKS.includes(act), isLoad = act === "load" || act === "upload";
  const path = pathField(training).value, now = `${sentOf(tab)}\n${path}`;
  // Every queued form is trained: a later one does not replace another whose check takes long.
  const which = isLoad ? `load ${++loads}` : act === "later" ? `later ${now}` : act;
  const doing = `${tab} ${which}`, loadNumber = loads;
  if (pending.has(doing)) return pressAgain(training, doing, now);
  const sent = read(tab, isCheck ? "Checking the settings" : ""), turn = turnOf(tab), since = performance.now();
  pending.set(doing, now);
  const { opened = "" } = training.dataset;
  const question = { tab, act, sent, path, opened, base: base(tab), source: source(tab), ...more };
  if (isLoad) loaded = { act, path, more };
  let isOutdated = false, begun = false, said = "", filled = false;
  const take = (/** @type {Answer} */ answer) => {
    begun = hasBegun(act, answer);
    said = answer.message ?? "";
    isOutdated = (isCheck && !begun && sentOf(tab) !== sent) || (isLoad && loadNumber !== loads);
    if (!isOutdated) show(training, answer, path);
    filled = !isOutdated && Boolean(answer.fill);
    if (begun) settleUnqueued(tab, sent);
    if (answer.run && sentOf(tab) === sent) reveal(); // otherwise the user is typing
  };
  const asking = async () => {
    if (isCheck) take(await ask("press", { ...question, act: "first", then: act }));
    if (said && !isOutdated) showBusy(tab, "Looking for more problems"); // the first are shown
    take(await ask("press", question));
  };
  try {
    await (act === "later" ? (queueing = queueing.catch(() => {}).then(asking)) : asking());
  } catch (error) {
    tellError(tab, error);
  }
  const isNewer = pending.get(doing) !== now && !begun;
  pending.delete(doing);
  if (isCheck && !isChecking(tab)) showBusy(tab);
  if (isNewer || markAllowed(find(training, ".bar > .said"), since)) void press(training, act, more);
  else if (isCheck && isOutdated) sayOutdated(training, act, turn === turnOf(tab) ? "" : sent, said);
  return filled;
}

/**
 * Load a config. Returns whether the form holds it.
 * @param {HTMLElement} training
 * @param {string} path
 */
export function loadConfig(training, path) {
  pathField(training).value = path;
  return press(training, "load");
}

/**
 * Whether a check is pending.
 * @param {string} tab
 */
const isChecking = (tab) =>
  [...pending.keys()].some((doing) => CHECKS.some((act) => doing.startsWith(`${tab} ${act}`)));

/**
 * Handle the problems of a form that was changed during its check.
 * @param {HTMLElement} training
 * @param {string} act
 * @param {string} replaced the form that was sent, where a button was pressed for another one since
 * @param {string} said the answer's message
 */
function sayOutdated(training, act, replaced, said) {
  if (!replaced) checkAnew(training, act);
  else if (act === "later" && said) tellUnqueued(training.dataset.tab ?? "", replaced, said);
}

/**
 * Check a form again that was changed during its check. The user starts the training after seeing the result.
 * @param {HTMLElement} training
 * @param {string} act
 */
function checkAnew(training, act) {
  if (act === "check") return void press(training, act);
  find(training, ".bar > .said").replaceChildren();
  tell(
    training.dataset.tab ?? "",
    "plain",
    make("p", {}, "The form was changed during the check, so nothing has started: press the button again."));
}

/**
 * Open the tab that a config belongs to, and load it there.
 * @param {HTMLElement} button
 */
async function loadElsewhere(button) {
  const { tab = "" } = button.dataset, here = around(button, ".training"), { act, path, more } = loaded;
  await go(`train/${tab}`);
  const there = around(formOf(tab), ".training");
  find(here, ".bar > .said").replaceChildren();
  pathField(there).value = path;
  await press(there, act, more);
}

/**
 * @param {HTMLElement} training
 * @param {Answer} answer
 * @param {string} sentPath the path that was sent; a path typed since stays
 */
export function show(training, answer, sentPath) {
  const { tab = "" } = training.dataset, path = pathField(training);
  const said = find(training, ".bar > .said");
  if (answer.message !== undefined) said.innerHTML = answer.message;
  if (answer.run) said.querySelector(".message")?.setAttribute("data-begun", answer.run);
  if (answer.path !== undefined && path.value === sentPath) path.value = answer.path;
  if (answer.fill) fill(tab, answer.fill, answer.opened === undefined ? undefined : (training.dataset.opened ?? ""));
  if (answer.run) document.dispatchEvent(new CustomEvent("kohya:begun", { detail: answer.run }));
  if (answer.opened !== undefined) training.dataset.opened = answer.opened;
  if (answer.file) {
    const { name, text } = answer.file, type = name.endsWith(".json") ? "application/json" : "application/toml";
    saveFile(new Blob([text], { type }), name);
  }
}

/**
 * The encoding by a file's first bytes: Notepad marks UTF-16, everything else is UTF-8.
 * @param {Uint8Array} file
 */
function encodingOf([first, second]) {
  if (first === 0xff && second === 0xfe) return "utf-16le";
  return first === 0xfe && second === 0xff ? "utf-16be" : "utf-8";
}

/**
 * The JSON header of a LoRA file, whose metadata has its training settings.
 * @param {Blob} file
 * @returns {Promise<Blob>}
 */
async function headerOf(file) {
  const length = new DataView(await file.slice(0, 8).arrayBuffer());
  return length.byteLength < 8 ? file : file.slice(8, 8 + Number(length.getBigUint64(0, true)));
}

/**
 * Load a config of the visitor's computer.
 * @param {HTMLElement} training
 * @param {File} file
 */
export async function upload(training, file) {
  const { tab = "" } = training.dataset;
  try {
    const weights = file.name.toLowerCase().endsWith(".safetensors");
    const part = weights ? await headerOf(file) : file;
    if (part.size > MAX_CONFIG_BYTES)
      throw new Error("This file is larger than any config: choose a TOML, JSON or YAML file.");
    const bytes = await part.arrayBuffer();
    const text = new TextDecoder(encodingOf(new Uint8Array(bytes)), { fatal: true }).decode(bytes);
    await press(training, "upload", { name: file.name, text });
  } catch (error) {
    tellError(
      tab,
      error instanceof TypeError ? new Error("This is not a text file in UTF-8: save it with that encoding.") : error);
  }
}

/**
 * Open a kind of training, and wait for its form. Returns a sentence if there is none.
 * @param {string} kind "" for the open one
 */
async function openKind(kind) {
  if (!kind) return "";
  if (!(await openTab(kind, "#kinds"))) return say("There is no kind of training named {name}.", { name: kind });
  for (let i = 0; i < 200 && !document.getElementById(`${kind}-form`)?.checkVisibility(); i++) await wait(20);
  return "";
}

register("train", openKind);
document.addEventListener("kohya:ended", (event) => {
  const run = /** @type {CustomEvent<string>} */ (event).detail; // the panel shows how it ended
  for (const message of all(document, ".bar > .said [data-begun]")) if (message.dataset.begun === run) message.remove();
});
document.addEventListener("click", (event) => {
  const other = hit(event, "button.elsewhere");
  if (other) void loadElsewhere(other);
  const over = hit(event, "button.overwrite");
  if (over) void press(around(over, ".training"), "save", { path: over.dataset.path, opened: over.dataset.state });
  const { lang } = document.documentElement;
  if (hit(event, ".begin .words")) window.open(addressOfApi(`words?language=${lang}`), "_blank", "noopener");
  const button = hit(event, "button[data-press]");
  if (!button) return;
  const training = around(button, ".training"), act = button.dataset.press ?? "";
  if (act === "upload") find(training, "input.upload").click();
  else void press(training, act);
});
document.addEventListener("change", (event) => {
  const input = hit(event, "input.upload", HTMLInputElement);
  if (!input?.files?.length) return;
  void upload(around(input, ".training"), input.files[0]);
  input.value = ""; // otherwise the same file could not be chosen again
});
document.addEventListener("keydown", (event) => {
  const path = event.key === "Enter" && !event.isComposing && hit(event, ".begin .path");
  if (path) void press(around(path, ".training"), "load");
});
