// Dates, times and durations on the page, in the words of dates.py: 23 Nov 21:40.
import { say } from "./sentences.js";
import { translated } from "./words.js";

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/** @param {Date} when */
const clockOf = (when) =>
  `${String(when.getHours()).padStart(2, "0")}:${String(when.getMinutes()).padStart(2, "0")}`;

/**
 * Day and time of a moment, with the year unless it is this one.
 * @param {number} seconds since 1970
 */
export function moment(seconds) {
  const when = new Date(seconds * 1000), clock = clockOf(when);
  const day = when.getDate(), month = translated(MONTHS[when.getMonth()]), year = when.getFullYear();
  if (year === new Date().getFullYear()) return say("{day} {month} {clock}", { day, month, clock });
  return `${say("{day} {month} {year}", { day, month, year })} ${clock}`;
}

/**
 * A time of the clock, with the day unless it is today.
 * @param {number} seconds since 1970
 */
export function timeOfDay(seconds) {
  const when = new Date(seconds * 1000);
  return when.toDateString() === new Date().toDateString() ? clockOf(when) : moment(seconds);
}

/**
 * Seconds in words, as duration_in_words in durations.py: 45 s, 12 min, 3 h 20 min.
 * @param {number} seconds
 */
export function duration(seconds) {
  if (seconds < 90) return say("{count} s", { count: Math.max(0, Math.round(seconds)) });
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return say("{count} min", { count: minutes });
  return say("{hours} h {minutes} min", { hours: Math.floor(minutes / 60), minutes: minutes % 60 });
}
