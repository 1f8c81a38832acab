// Numbers, durations and times of runs in words.
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";

export const NONE = "–";

/**
 * A number with about this many significant digits: 0.0816, 1.2e-5.
 * @param {number | null | undefined} value
 * @param {number} [digits]
 */
export function short(value, digits = 4) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6))
    return value.toExponential(Math.min(2, digits - 1)).replace(/\.?0*e\+?/, "e");
  return String(Number(value.toPrecision(digits)));
}

/**
 * Seconds in words: 45 s, 12 min, 3 h 20 min.
 * @param {number | null} seconds
 */
export function duration(seconds) {
  if (seconds === null) return NONE;
  if (seconds < 90) return say("{count} s", { count: Math.max(0, Math.round(seconds)) });
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return say("{count} min", { count: minutes });
  return say("{hours} h {minutes} min", { hours: Math.floor(minutes / 60), minutes: minutes % 60 });
}

/**
 * Day and time of a moment, in the order of the page's language.
 * @param {number | null} seconds since 1970
 */
export function moment(seconds) {
  if (seconds === null) return NONE;
  const when = new Date(seconds * 1000);
  const isThisYear = when.getFullYear() === new Date().getFullYear();
  return when.toLocaleString(document.documentElement.lang || [], {
    day: "numeric", month: "short", year: isThisYear ? undefined : "numeric",
    hour: "2-digit", minute: "2-digit", hourCycle: "h23",
  });
}

/** @type {Record<string, string>} */
const STATES = {
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
  starting: "busy", running: "busy", stopping: "busy", finished: "good", failed: "bad", interrupted: "bad",
};
export const stateNames = Object.keys(STATES);

/** @param {string} state */
export const stateWord = (state) => translated(STATES[state] ?? state);

/** @param {string} state */
export const moodOf = (state) => MOODS[state] ?? "calm";

/**
 * The name of a run among others; one that has the name of another gets the end of its id.
 * @param {string} id
 * @param {string[]} others their ids, with this one among them or not
 * @param {(id: string) => string} nameOf
 */
export function nameAmong(id, others, nameOf) {
  const name = nameOf(id), hasTwin = others.some((other) => other !== id && nameOf(other) === name);
  return hasTwin ? `${name} (${id.slice(-20)})` : name;
}
