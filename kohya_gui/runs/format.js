// Numbers and states of runs in words.
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
 * The name of a run among others, with the end of its id if another has the same name.
 * @param {string} id
 * @param {string[]} others their ids, with this one among them or not
 * @param {(id: string) => string} nameOf
 */
export function nameAmong(id, others, nameOf) {
  const name = nameOf(id), hasTwin = others.some((other) => other !== id && nameOf(other) === name);
  return hasTwin ? `${name} (${id.slice(-20)})` : name;
}
