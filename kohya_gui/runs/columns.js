// The columns of the table of runs: what each shows, and by what it sorts.
import { duration, moment } from "../i18n/dates.js";
import { say } from "../i18n/sentences.js";
import { make, makeBar } from "../server/elements.js";
import { addressOf } from "../server/addresses.js";
import { addressOfApi, pathOfRun } from "../server/http.js";
import { moodOf, NONE, short, stateNames, stateWord } from "./format.js";

/**
 * @typedef {{ id: string, name: string, family: string, kind: string, title: string, preset: string, state: string,
 *   active: boolean, steps_done: number, steps_total: number, speed: number | null, left: number | null,
 *   taken: number | null, loss: number | null, held_out_loss: number | null, note: string, started: number | null,
 *   last_sample: { step: number, number: number } | null, devices: string[], error: string, damaged: boolean,
 *   apart: string }} Row
 *
 * `apart` distinguishes runs of the same name: the end of its id.
 */
/** @typedef {"active" | "left" | "taken" | "apart"} Made what the page makes of other facts */
/** @typedef {Omit<Row, Made> & { time_left: number | null, seconds: number | null }} Run */
/** @typedef {import("../server/elements.js").Child} Child */
/**
 * @typedef {{ key: string, title: string, sorts: (row: Row) => string | number | null, basis: (row: Row) => unknown,
 *   show: (row: Row) => Child[], isNumber?: boolean, isOptional?: boolean, isTold?: boolean }} Column
 *
 * `basis` is what `show` depends on. An optional column is left out if no run has a value, and one that only tells
 * runs apart also if all have the same.
 */

/** @type {Record<string, string>} */
const KINDS = {
  lora: "LoRA",
  finetune: "Fine-tune",
  "textual-inversion": "Textual inversion",
  lllite: "ControlNet-LLLite",
};
const MAX_NOTE = 300; // characters of a note in the table

/**
 * Convert a run of the API to a row.
 * @param {Run} run
 * @returns {Row}
 */
export const rowOf = ({ time_left: left, seconds, ...run }) => ({
  ...run, left, taken: seconds, active: moodOf(run.state) === "busy", kind: KINDS[run.kind] ?? (run.kind || run.title),
  note: run.note.slice(0, MAX_NOTE), apart: "",
});

/**
 * Distinguish runs of the same name.
 * @param {Iterable<Row>} rows
 */
export function tellApart(rows) {
  /** @type {Map<string, Row[]>} */
  const named = new Map();
  for (const row of rows) named.set(row.name, [...named.get(row.name) ?? [], row]);
  for (const twins of named.values())
    for (const row of twins) row.apart = twins.length > 1 ? row.id.slice(-20) : "";
}

/**
 * A column of a number.
 * @param {string} key
 * @param {string} title
 * @param {(row: Row) => number | null} value
 * @param {(value: number) => string} text
 * @returns {Column}
 */
const numeric = (key, title, value, text = short) => ({
  key, title, sorts: value, isNumber: true, basis: value,
  show: (row) => [value(row) === null ? NONE : text(/** @type {number} */ (value(row)))],
});

/**
 * A column of a plain text.
 * @param {string} key
 * @param {string} title
 * @param {(row: Row) => string} value
 * @returns {Column}
 */
const textual = (key, title, value) => ({
  key, title, basis: value, sorts: (row) => value(row).toLowerCase() || null, show: (row) => [value(row) || NONE],
});

/** @type {Column[]} */
export const COLUMNS = [
  {
    key: "name", title: "Name", sorts: (row) => row.name.toLowerCase(),
    basis: ({ name, apart, last_sample: sample, error, damaged }) => [name, apart, sample, error, damaged],
    show: nameCell,
  },
  {
    key: "state", title: "State", sorts: (row) => stateNames.indexOf(row.state), basis: ({ state }) => state,
    show: ({ state }) => [make("span", { className: `state ${moodOf(state)}` }, stateWord(state))],
  },
  textual("family", "Model", (row) => row.family),
  textual("kind", "Kind", (row) => row.kind),
  { ...textual("preset", "Preset", (row) => row.preset), isOptional: true },
  {
    key: "steps", title: "Steps", isNumber: true, sorts: (row) => row.steps_done,
    basis: ({ steps_done: done, steps_total: total, active }) => [done, total, active],
    show: stepsCell,
  },
  numeric("speed", "s/step", (row) => row.speed, (value) => short(value, 3)),
  {
    key: "time", title: "Time", isNumber: true, sorts: (row) => (row.active ? row.left : row.taken),
    basis: ({ left, taken, active }) => [active ? left : taken, active],
    show: ({ left, taken, active }) =>
      [active && left !== null ? say("{time} left", { time: duration(left) })
        : taken === null ? NONE : duration(taken)],
  },
  numeric("loss", "Loss", (row) => row.loss),
  { ...numeric("held-out", "Held-out loss", (row) => row.held_out_loss), isOptional: true },
  {
    key: "started", title: "Started", isNumber: true, sorts: (row) => row.started, basis: ({ started }) => started,
    show: ({ started }) => [started === null ? NONE : moment(started)],
  },
  { ...textual("device", "GPU", (row) => row.devices.join(", ")), isOptional: true, isTold: true },
  {
    key: "note", title: "Note", sorts: (row) => row.note.toLowerCase() || null, basis: ({ note }) => note,
    show: ({ note }) => [make("span", { className: "own note", title: note }, note)], isOptional: true,
  },
];

/** @param {Row} row */
function nameCell({ id, name, apart, last_sample: sample, error, damaged }) {
  const shown = sample
    ? make("img", {
      // Another address for another image, as browsers keep them.
      src: addressOfApi(
        pathOfRun(id, `samples/newest?small=true&or_nothing=true&of=${sample.step}-${sample.number}`)),
      alt: "", loading: "lazy", decoding: "async",
    })
    : make("span", { className: "no-image" });
  if (sample) shown.addEventListener("kohya:lost", () => shown.replaceWith(make("span", { className: "no-image" })));
  const link = make("a", { href: `#${addressOf("runs", id)}` }, make("span", { className: "own" }, name));
  const which = apart ? make("small", { className: "own" }, apart) : null;
  const why = damaged || error ? make("small", { className: "why", title: error }, error) : null;
  return [make("div", { className: "who" }, shown, make("div", {}, link, which, why))];
}

/** @param {Row} row */
function stepsCell({ steps_done: done, steps_total: total, active }) {
  const bar = active && total
    ? makeBar("span", done / total, say("Step {step} / {total}", { step: done, total }))
    : null;
  return [total ? `${done.toLocaleString("en")} / ${total.toLocaleString("en")}` : done ? String(done) : NONE, bar];
}

/**
 * Compare two rows by a column; rows without a value come last in both directions.
 * @param {Column} column
 * @param {1 | -1} direction
 * @returns {(a: Row, b: Row) => number}
 */
export const ordered = (column, direction) => (a, b) => {
  const [x, y] = [column.sorts(a), column.sorts(b)];
  if (x === null || y === null) return Number(x === null) - Number(y === null);
  if (typeof x === "string") return direction * x.localeCompare(String(y), undefined, { numeric: true });
  return direction * (x - Number(y));
};
