// The queue: shows it, and sends requests that change it.
import { count, say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { lookAt } from "../panel/monitor.js";
import { actOn, openInForm } from "../panel/run_buttons.js";
import { tabOf } from "../form/inputs.js";
import { sentOf } from "../form/messages.js";
import { addressOf, go, register } from "../server/addresses.js";
import { all, find, hit, make, makeButton } from "../server/elements.js";
import { ask, call, messageOf } from "../server/http.js";
import { keepOrder } from "../server/late.js";
import { dragBy, isDragging } from "./queue_drag.js";
import { isBusy, makeRow } from "./queue_row.js";

/** @typedef {import("./queue_row.js").Entry} Entry */
/**
 * @typedef {{ entries: Entry[], waiting: number, paused: string, halted: boolean, said: string, entry: string,
 *   gpus: import("../form/gpus.js").Gpu[], go_on: boolean }} Listing
 */
/** @typedef {{ text: string, press: () => unknown, kind?: string }} Offer a button beside an answer */

const EMPTY =
  "The queue is empty. Fill in a form and press Add to queue: trainings run in turn, also while this page is closed.";
const PERIOD = 1500; // milliseconds
/** @type {HTMLElement | undefined} */
let place;
let shown = "";
let compared = ""; // the entries and forms that were compared last
/** @type {Record<string, import("./queue_row.js").Unlike>} by entry */
let unlike = {};
/** @type {Map<string, { basis: string, row: HTMLElement }>} the rows on screen by id, and what they are made of */
const rowsById = new Map();
let isLost = false; // the last listing request has failed
const beginListing = keepOrder(), beginComparison = keepOrder();

/** @param {Element} element */
export function mount(element) {
  place = find(element, ".queue");
  shown = "";
  dragBy(place, moveTo);
  look();
}

async function look() {
  if (!place) return;
  const take = beginListing();
  try {
    const listing = await call("queue");
    await compare(listing);
    if (!isDragging() && take()) show(place, listing);
    if (isLost) tell("");
    isLost = false;
  } catch (error) {
    if (!take()) return;
    isLost = true;
    tell(messageOf(error), true);
  }
}

/**
 * Request the entries' differences from the forms, unless neither has changed.
 * @param {Listing} listing
 */
async function compare({ entries }) {
  const opened = all(document, "form.settings").map(tabOf);
  const forms = entries.length ? Object.fromEntries(opened.map((tab) => [tab, sentOf(tab)])) : {};
  const now = JSON.stringify([entries.map(({ id }) => id), forms]);
  if (now === compared) return;
  const take = beginComparison(), answer = await ask("queue-differences", { forms });
  if (!take()) return;
  unlike = answer.entries;
  compared = now;
  shown = "";
}

setInterval(() => {
  if (place?.isConnected && document.visibilityState === "visible" && place.checkVisibility()) look();
}, PERIOD);

/**
 * Show the result of a request, with its follow-up buttons.
 * @param {string} text
 * @param {boolean} [bad]
 * @param {Offer[]} [offers]
 */
function tell(text, bad = false, offers = []) {
  if (!place) return;
  const where = find(place, ".answer");
  const buttons = offers.map(({ text: words, press, kind = "" }) =>
    makeButton(translated(words), press, { className: kind }));
  where.replaceChildren(make("span", {}, text), ...buttons.flatMap((button) => [" ", button]));
  where.classList.toggle("bad", bad);
}

/**
 * Send a change of the queue, and show the resulting queue.
 * @param {string} path
 * @param {Record<string, unknown>} [body]
 * @param {(listing: Listing) => Offer[]} [offers]
 */
async function change(path, body = {}, offers = () => []) {
  try {
    const listing = await call(`queue/${path}`, body);
    beginListing()(); // a slow server may send a listing from before this change after it
    tell(path === "pause" ? "" : translated(listing.said), false, offers(listing)); // the heading says it
    if (place) show(place, listing);
    look(); // for what differs in an entry that was added
  } catch (error) {
    shown = ""; // the dragged entry returns to its place
    tell(messageOf(error), true);
    look();
  }
}

/**
 * @param {string} id
 * @param {number} to 1 for the next one
 */
const moveTo = (id, to) => change(`${id}/move`, { to });

/** @param {string} id */
const remove = (id) =>
  change(`${id}/remove`, {}, () => [{ text: "Undo", press: () => change(`${id}/restore`) }]);

/** @param {string} id */
const duplicate = (id) =>
  change(`${id}/duplicate`, {}, ({ entry }) => [{ text: "Undo", press: () => change(`${entry}/remove`) }]);

/**
 * Send an action on a run, after a question if there is one.
 * @param {string} act
 * @param {string} run
 * @param {{ sure?: boolean, pause?: boolean }} [more]
 */
async function actOnRun(act, run, more = {}) {
  try {
    const answer = await actOn(act, run, more);
    if (answer.ask) return void askFirst(act, run, answer.ask, answer.next);
    if (answer.run) lookAt(answer.run);
    tell(translated(answer.said ?? ""));
  } catch (error) {
    tell(messageOf(error), true);
  }
  look();
}

/**
 * Before a run is stopped, ask for confirmation and whether the queue continues.
 * @param {string} act
 * @param {string} run
 * @param {string} text
 * @param {string} [next] the training that the queue starts then
 */
function askFirst(act, run, text, next) {
  const stop = (/** @type {boolean} */ pause) => () => actOnRun(act, run, { sure: true, pause });
  const pausing = next ? [{ text: "Stop and pause the queue", press: stop(true) }] : [];
  tell(translated(text), false, [
    { text: "Stop", press: stop(false), kind: "stop" }, ...pausing, { text: "Cancel", press: () => tell("") },
  ]);
  if (place) find(place, ".answer button:last-child").focus();
}

/** @param {string} id */
async function openSettings(id) {
  try {
    openInForm(await ask("open", { entry: id }));
  } catch (error) {
    tell(messageOf(error), true);
  }
}

/** @param {string} run */
function openRun(run) {
  lookAt(run);
  go(addressOf("runs", run));
}

const ACTIONS = { moveTo, remove, duplicate, actOnRun, openSettings, openRun };

/**
 * @param {HTMLElement} where
 * @param {Listing} listing
 */
function show(where, listing) {
  const now = JSON.stringify({ ...listing, said: "", texts: [] });
  if (now === shown) return;
  shown = now;
  const focused = document.activeElement;
  const key = focused instanceof HTMLElement && where.contains(focused) ? focused.dataset.key : "";
  const at = all(where, ".entry").findIndex((entry) => entry.contains(focused));
  find(where, ".how").textContent = summary(listing);
  find(where, ".switches").replaceChildren(...switches(listing));
  find(where, ".devices").replaceChildren(...(listing.gpus.length > 1 ? listing.gpus.map(device) : []));
  const ended = listing.entries.filter((entry) => !entry.waits && !isBusy(entry));
  const rest = listing.entries.filter((entry) => entry.waits || isBusy(entry));
  find(where, ".keys").hidden = listing.waiting < 2;
  find(where, ".history").hidden = !ended.length;
  const waiting = listing.entries.filter((entry) => entry.waits);
  const rows = (/** @type {Entry[]} */ entries) => entries.map((entry) => rowOf(entry, waiting));
  putRows(find(where, ".entries"), rows(rest));
  putRows(find(where, ".ended"), rows(ended));
  for (const id of rowsById.keys()) if (!listing.entries.some((entry) => entry.id === id)) rowsById.delete(id);
  if (key && !where.contains(document.activeElement)) focusAgain(where, key, at);
}

/**
 * The row of an entry: the existing one if nothing in it has changed, as it may be being pressed.
 * @param {Entry} entry
 * @param {Entry[]} waiting
 */
function rowOf(entry, waiting) {
  const at = waiting.indexOf(entry), own = unlike[entry.id];
  const basis = JSON.stringify([entry, own, at, waiting.length, document.documentElement.lang]);
  const known = rowsById.get(entry.id);
  if (known?.basis === basis) return known.row;
  const row = makeRow(entry, at, waiting.length, own, ACTIONS);
  rowsById.set(entry.id, { basis, row });
  return row;
}

/**
 * @param {HTMLElement} list
 * @param {HTMLElement[]} rows
 */
function putRows(list, rows) {
  for (const old of all(list, ".entry")) if (!rows.includes(old)) old.remove();
  rows.forEach((row, at) => {
    if (list.children[at] !== row) list.insertBefore(row, list.children[at] ?? null);
  });
}

/**
 * Give a button the focus back after a rebuild. If it is gone or disabled, the same button of the entry in its place or
 * a neighbour gets it: otherwise the Tab key would start at the top of the page.
 * @param {HTMLElement} where
 * @param {string} key
 * @param {number} at the index of its entry
 */
function focusAgain(where, key, at) {
  const same = where.querySelector(`[data-key="${key}"]`), entries = all(where, ".entry");
  const entry = same?.closest(".entry") ?? entries[Math.min(at, entries.length - 1)] ?? where;
  const next = entry.querySelector(`[data-key$="${key.slice(key.lastIndexOf("-"))}"]`);
  const can = [same, next, ...entry.querySelectorAll("button"), ...where.querySelectorAll("button")];
  /** @type {HTMLElement | null | undefined} */ (can.find((candidate) => candidate?.matches(":enabled")))?.focus();
}

/** @param {Listing} found */
function summary({ entries, waiting, paused, halted, gpus }) {
  if (!entries.length && !paused)
    return translated(EMPTY);
  if (halted && waiting)
    return say("The queue is halted, as the computer or its process ended. {trainings} left.", {
      trainings: count(waiting, "training"),
    });
  if (paused)
    return paused === "by you"
      ? "Paused: no new training starts."
      : say("Paused: no new training starts. {why}", { why: paused });
  if (!waiting) return translated("No training is waiting.");
  const trainings = count(waiting, "training");
  if (gpus.length < 2) return say("{trainings} waiting.", { trainings });
  return say("{trainings} waiting. One training at a time on each GPU ({gpus}).", {
    trainings,
    gpus: gpus.map(({ index }) => index).join(", "),
  });
}

/**
 * A GPU and its user.
 * @param {import("../form/gpus.js").Gpu} gpu
 */
function device({ index, name, free, total, user }) {
  const memory = total ? say("{free} of {total} GB free", { free: free.toFixed(1), total: total.toFixed(1) }) : "";
  return make("li", { "data-gpu": index }, make("span", { className: "own" }, `GPU ${index} · ${name}`),
    make("b", { className: "own" }, translated(user || "Free")), make("small", {}, memory));
}

/** @param {Listing} found */
function switches({ entries, waiting, paused, halted, go_on: goOn }) {
  /** @type {HTMLElement[]} */
  const controls = [];
  const button = (/** @type {string} */ text, /** @type {string} */ path, kind = "") =>
    makeButton(translated(text), () => change(path), { className: kind, "data-key": path });
  if (paused || (halted && waiting)) controls.push(button("Continue", "resume", "primary"));
  else if (waiting || entries.some(isBusy)) controls.push(button("Pause", "pause"));
  if (entries.some((entry) => !entry.waits && !isBusy(entry))) controls.push(button("Clear what has ended", "clear"));
  const box = make("input", { type: "checkbox", checked: goOn, "data-key": "after" });
  box.addEventListener("change", () => change("after-failure", { go_on: box.checked }));
  if (entries.length)
    controls.push(make("label", {}, box, make("span", {}, translated("Continue when a training fails"))));
  return controls;
}

register("queue", (name) => {
  if (name) return say("There is no {name} here.", { name });
  document.dispatchEvent(new Event("kohya:queue")); // a run's page leaves room for it
  place?.scrollIntoView({ block: "start" });
});

// Alt with an arrow key moves the entry that has the focus.
document.addEventListener("keydown", (event) => {
  const by = { ArrowUp: -1, ArrowDown: 1 }[event.key], entry = hit(event, ".queue .entry");
  if (!by || !event.altKey || !entry || entry.dataset.state !== "waiting") return;
  event.preventDefault();
  change(`${entry.dataset.id}/move`, { by });
});
