// The Queue tab: shows the queue, and sends requests that change it.
import { count, say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { all, find, make, makeButton } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { lookAt } from "./monitor.js";
import { openInForm } from "./run_buttons.js";

/**
 * @typedef {{ id: string, name: string, title: string, state: string, run: string, step: number, total: number,
 *   gpus: string, processes: number, why: string, waits: boolean, again: boolean }} Entry
 */
/**
 * @typedef {{ entries: Entry[], waiting: number, paused: string, halted: boolean,
 *   gpus: import("../form/gpus.js").Gpu[], go_on: boolean }} Listing
 */

/** @type {Record<string, string>} */
const STATES = {
  waiting: "Waiting",
  starting: "Starting",
  running: "Running",
  stopping: "Stopping",
  finished: "Finished",
  stopped: "Stopped",
  failed: "Failed",
  interrupted: "Interrupted",
};
/** @type {Record<string, string>} */
const MOODS = {
  starting: "busy",
  running: "busy",
  stopping: "busy",
  finished: "good",
  failed: "bad",
  interrupted: "bad",
};
const EMPTY =
  "The queue is empty. Fill in a form and press Add to queue: trainings run in turn, also while this page is closed.";
const PERIOD = 1500; // milliseconds
/** @type {HTMLElement | undefined} */
let place;
let shown = "";

/** @param {Element} element */
export function mount(element) {
  place = find(element, ".queue");
  shown = "";
  look();
}

async function look() {
  if (!place) return;
  try {
    show(place, await ask("queue"));
  } catch (error) {
    tell(messageOf(error), true);
  }
}

setInterval(() => {
  if (place?.isConnected && document.visibilityState === "visible" && place.checkVisibility()) look();
}, PERIOD);

/**
 * @param {string} text
 * @param {boolean} [bad]
 */
function tell(text, bad = false) {
  if (!place) return;
  const where = find(place, ".answer");
  where.textContent = text;
  where.classList.toggle("bad", bad);
}

/** @param {{ act: string, id?: string, run?: string, go_on?: boolean }} question */
async function change(question) {
  try {
    const answer = await ask(question.run ? "act" : "queue-act", question);
    if (answer.fill) return void openInForm(answer);
    if (answer.run) lookAt(answer.run);
    tell(translated(answer.said ?? ""));
    if (answer.entries && place) show(place, answer);
    else look();
  } catch (error) {
    tell(messageOf(error), true);
    look();
  }
}

/**
 * @param {HTMLElement} where
 * @param {Listing} listing
 */
function show(where, listing) {
  const now = JSON.stringify(listing);
  if (now === shown) return;
  shown = now;
  const focused = document.activeElement;
  const key = focused instanceof HTMLElement && where.contains(focused) ? focused.dataset.key : "";
  const at = all(where, ".entry").findIndex((entry) => entry.contains(focused));
  find(where, ".how").textContent = summary(listing);
  find(where, ".switches").replaceChildren(...switches(listing));
  find(where, ".devices").replaceChildren(...(listing.gpus.length > 1 ? listing.gpus.map(device) : []));
  const waiting = listing.entries.filter((entry) => entry.waits);
  const notWaiting = listing.entries.filter((entry) => !entry.waits);
  const active = notWaiting.filter((entry) => MOODS[entry.state] === "busy");
  const ended = notWaiting.filter((entry) => MOODS[entry.state] !== "busy").reverse();
  find(where, ".entries").replaceChildren(...[...active, ...waiting, ...ended].map((entry) => row(entry, waiting)));
  if (key) focusAgain(where, key, at);
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
  if (!entries.length)
    return translated(EMPTY);
  if (halted)
    return say("The queue is halted, as the computer or its process ended. {trainings} left.", {
      trainings: count(waiting, "training"),
    });
  if (paused)
    return paused === "by you"
      ? "Paused: nothing new is started."
      : say("Paused: nothing new is started. {why}", { why: paused });
  if (!waiting) return translated("The queue is empty.");
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
  if (paused || halted) controls.push(button("Continue", "go", () => change({ act: "go_on" }), "primary"));
  else if (waiting) controls.push(button("Pause", "pause", () => change({ act: "pause" })));
  if (entries.some((entry) => !entry.waits && MOODS[entry.state] !== "busy"))
    controls.push(button("Clear what has ended", "clear", () => change({ act: "clear" })));
  const box = make("input", { type: "checkbox", checked: goOn, "data-key": "after" });
  box.addEventListener("change", () => change({ act: "after_failure", go_on: box.checked }));
  if (entries.length)
    controls.push(make("label", {}, box, make("span", {}, translated("Continue when a training fails"))));
  return controls;
}

/**
 * @param {Entry} entry
 * @param {Entry[]} waiting
 */
function row(entry, waiting) {
  const at = waiting.indexOf(entry);
  const progress = entry.total ? say("step {step} / {total}", { step: entry.step, total: entry.total }) : "";
  const several = entry.waits && entry.processes > 1 ? say("{count} GPUs", { count: entry.processes }) : "";
  const gpus = entry.gpus ? `GPU ${entry.gpus}` : several;
  // translated separately
  const parts = [entry.title, progress, gpus].filter(Boolean).map((part) => make("span", {}, part));
  return make("li",
    { className: `entry ${MOODS[entry.state] ?? "calm"}`, "data-id": entry.id, "data-state": entry.state },
    make("span", { className: "state" }, translated(STATES[entry.state] ?? entry.state)),
    make("div", { className: "about" },
      make("b", {}, entry.name),
      make("small", {}, ...parts.flatMap((part, i) => (i ? [" · ", part] : [part]))),
      entry.why && entry.state !== "finished" ? make("small", { className: "why" }, entry.why) : null),
    make("div", { className: "does" }, ...buttons(entry, at, waiting.length)));
}

/**
 * The buttons of an entry.
 * @param {Entry} entry
 * @param {number} at its index among the waiting entries
 * @param {number} many waiting entries
 */
function buttons(entry, at, many) {
  const key = (/** @type {string} */ what) => `${entry.id}-${what}`;
  const act = (/** @type {string} */ what) => () => change({ act: what, id: entry.id });
  const actOnRun = (/** @type {string} */ what) => () => change({ act: what, run: entry.run });
  /** @type {HTMLElement[]} */
  const list = [];
  if (entry.waits && many > 1) {
    list.push(button("↑", key("up"), act("up"), "", say("Sooner: {name}", { name: entry.name }), at === 0));
    list.push(button("↓", key("down"), act("down"), "", say("Later: {name}", { name: entry.name }), at === many - 1));
  }
  if (entry.again)
    list.push(button("Resume", key("resume"), actOnRun("resume"), "", say("Resume: {name}", { name: entry.name })));
  if (MOODS[entry.state] === "busy")
    list.push(button("Stop", key("stop"), actOnRun("after_step"), "", say("Stop: {name}", { name: entry.name })));
  const copy = button("Duplicate", key("open"), act("open"), "", say("Duplicate: {name}", { name: entry.name }));
  copy.title = translated("Open its settings in the form, to change and add them again");
  list.push(copy);
  if (MOODS[entry.state] !== "busy")
    list.push(button("Remove", key("remove"), act("remove"), "", say("Remove: {name}", { name: entry.name })));
  return list;
}

/**
 * @param {string} text
 * @param {string} key that identifies it after a rebuild
 * @param {() => unknown} press
 * @param {string} [kind]
 * @param {string} [label]
 * @param {boolean} [disabled]
 */
const button = (text, key, press, kind = "", label = "", disabled = false) =>
  makeButton(translated(text), press, {
    className: kind, "data-key": key, disabled, title: label, "aria-label": label || undefined,
  });
