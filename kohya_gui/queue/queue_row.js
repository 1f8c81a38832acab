// One entry of the queue: its state, cost, start, differences and buttons.
import { duration, timeOfDay } from "../i18n/dates.js";
import { count, say, sayOption } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { moodOf, stateWord } from "../runs/format.js";
import { make, makeButton } from "../server/elements.js";

/** @typedef {{ option: string, before: string | null, value: string | null, words: string }} Difference */
/**
 * @typedef {{ id: string, name: string, title: string, state: string, run: string, step: number, total_steps: number,
 *   gpus: string[], gpu_count: number, names_gpus: boolean, why: string, waits: boolean, resume_words: string,
 *   resume_hint: string, seconds: number | null, step_seconds: number | null, memory: number | null,
 *   start: number | null, end: number | null }} Entry
 */
/** @typedef {{ form: boolean, differences: Difference[] }} Unlike from the form, or else from the defaults */
/**
 * @typedef {{ moveTo: (id: string, to: number) => unknown, remove: (id: string) => unknown,
 *   duplicate: (id: string) => unknown, actOnRun: (act: string, run: string) => unknown,
 *   openSettings: (id: string) => unknown, openRun: (run: string) => unknown }} Actions
 */

const SHOWN = 3; // differences shown before the rest is unfolded

/** @param {Entry} entry */
export const isBusy = (entry) => moodOf(entry.state) === "busy";

/**
 * @param {Entry} entry
 * @param {number} at its index among the waiting entries
 * @param {number} many waiting entries
 * @param {Unlike | undefined} unlike
 * @param {Actions} actions
 */
export function makeRow(entry, at, many, unlike, actions) {
  const facts = [entry.title, ...factsOf(entry)];
  return make("li",
    { className: `entry ${moodOf(entry.state)}`, "data-id": entry.id, "data-state": entry.state },
    entry.waits && many > 1 ? handle(at) : null,
    make("span", { className: "state" }, entry.state === "waiting" ? translated("Waiting") : stateWord(entry.state)),
    make("div", { className: "about" },
      make("b", { className: "own" }, entry.name),
      make("small", {}, ...facts.flatMap((text, i) => [i ? " · " : "", make("span", {}, text)])),
      timesOf(entry) ? make("small", { className: "when" }, timesOf(entry)) : null,
      entry.why ? make("small", { className: "why" }, entry.why) : null,
      unlike ? differencesOf(unlike) : null),
    make("div", { className: "does" }, ...buttons(entry, at, many, actions)));
}

/** @param {number} at */
const handle = (at) =>
  make("span", { className: "handle", "aria-hidden": "true", title: translated("Drag to reorder") },
    make("i", {}), make("span", { className: "own" }, String(at + 1)));

/** @param {Entry} entry */
function factsOf({ step, total_steps: total, waits, seconds, memory, gpus, gpu_count: gpuCount, names_gpus: names }) {
  /** @type {string[]} */
  const facts = [];
  if (!waits && total) facts.push(say("step {step} / {total}", { step, total }));
  else if (total) facts.push(count(total, "step"));
  if (seconds) facts.push(waits ? say("about {time}", { time: duration(seconds) }) : duration(seconds));
  if (waits && memory) facts.push(say("about {memory} GB of GPU memory", { memory: memory.toFixed(1) }));
  if (gpus.length && (!waits || names)) facts.push(`GPU ${gpus.join(", ")}`);
  else if (gpus.length) facts.push(say("{count} GPU, whichever is free", { count: gpuCount },
    "{count} GPUs, whichever are free"));
  return facts;
}

/** @param {Entry} entry */
function timesOf({ waits, start, end, state }) {
  if (waits && start && end) return say("Starts about {start}, ends about {end}",
    { start: timeOfDay(start), end: timeOfDay(end) });
  if (waits && start) return say("Starts about {start}", { start: timeOfDay(start) });
  if (moodOf(state) === "busy" && end) return say("Ends about {end}", { end: timeOfDay(end) });
  if (!waits && start && end && moodOf(state) !== "busy") return say("{start} to {end}",
    { start: timeOfDay(start), end: timeOfDay(end) });
  return "";
}

/** @param {Unlike} unlike */
function differencesOf({ form, differences }) {
  if (!differences.length)
    return make("small", {}, translated(form ? "Same settings as the form" : "All settings at their defaults"));
  // Those with a value on both sides say more than what a form does not name yet, such as its images.
  const isOneSided = (/** @type {Difference} */ { before, value }) => Number(before === null || value === null);
  const ordered = [...differences].sort((a, b) => isOneSided(a) - isOneSided(b));
  const texts = ordered.map(({ option, before, value, words }) => {
    const from = before ?? translated("the default"), to = value ?? translated("the default");
    if (!form && !words) return make("span", {}, sayOption("{option} {value}", option, { value: to }));
    if (words) return make("span", {}, say("{words}: {value} instead of {before}", { words, value: to, before: from }));
    return make("span", {}, sayOption("{option} {value} instead of {before}", option, { value: to, before: from }));
  });
  const listed = (/** @type {HTMLElement[]} */ parts) => parts.flatMap((part, i) => (i ? [", ", part] : [part]));
  const title = make("span", {}, translated(form ? "Unlike the form:" : "Unlike the defaults:"));
  const first = make("small", { className: "unlike" }, title, " ", ...listed(texts.slice(0, SHOWN)));
  if (texts.length <= SHOWN) return first;
  const rest = texts.slice(SHOWN);
  return make("div", {}, first, make("details", {},
    make("summary", {}, say("and {count} more", { count: rest.length })), make("small", {}, ...listed(rest))));
}

/**
 * The buttons of an entry.
 * @param {Entry} entry
 * @param {number} at its index among the waiting entries
 * @param {number} many waiting entries
 * @param {Actions} actions
 */
function buttons(entry, at, many, actions) {
  const { id, name, run } = entry;
  /** @type {HTMLElement[]} */
  const list = [];
  const add = (/** @type {string} */ text, /** @type {string} */ key, /** @type {() => unknown} */ press,
    /** @type {string} */ label, disabled = false) =>
    list.push(makeButton(translated(text), press,
      { "data-key": `${id}-${key}`, disabled, title: label, "aria-label": label }));
  if (entry.waits && many > 1) {
    add("↑", "up", () => actions.moveTo(id, at), say("Sooner: {name}", { name }), at === 0);
    add("↓", "down", () => actions.moveTo(id, at + 2), say("Later: {name}", { name }), at === many - 1);
  }
  if (isBusy(entry)) {
    add("Look at it", "look", () => actions.openRun(run), say("Look at it: {name}", { name }));
    add("Stop", "stop", () => actions.actOnRun("after_step", run), say("Stop: {name}", { name }));
  }
  if (entry.resume_words) {
    add(entry.resume_words, "resume", () => actions.actOnRun("resume", run),
      say("{action}: {name}", { action: entry.resume_words, name }));
    if (entry.resume_hint) list[list.length - 1].title = entry.resume_hint;
  }
  add("Open in form", "open", () => actions.openSettings(id), say("Open in form: {name}", { name }));
  add("Duplicate", "double", () => actions.duplicate(id), say("Duplicate: {name}", { name }));
  if (!isBusy(entry)) add("Remove", "remove", () => actions.remove(id), say("Remove: {name}", { name }));
  return list;
}
