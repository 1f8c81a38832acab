// The table of all runs: sorted, filtered, several chosen at once. On a phone each run is a card.
import { count, say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { all, find, make, makeButton } from "../server/elements.js";
import { addressOf, go } from "../server/addresses.js";
import { call, messageOf } from "../server/http.js";
import { countRequests } from "../server/late.js";
import { COLUMNS, ordered, rowOf, tellApart } from "./columns.js";
import { stateNames, stateWord } from "./format.js";

/** @typedef {import("./columns.js").Row} Row */
/** @typedef {import("./columns.js").Column} Column */

const MAX_SHOWN = 200; // rows initially shown
const MAX_COMPARED = 8;

/** @type {Map<string, Row>} in the server's order, the newest first */
let rows = new Map();
let mark = ""; // mark of the last answer
/** @type {Set<string>} */
const chosen = new Set();
/** @type {Map<string, { tr: HTMLTableRowElement, keys: Map<string, string> }>} */
const shown = new Map();
/** @type {{ key: string, direction: 1 | -1 }} */
let sorted = { key: "started", direction: -1 };
let isAllShown = false;
/** @type {HTMLElement} */
let list;

/** @param {HTMLElement} room */
export function mountTable(room) {
  list = find(room, ".runs-list");
  shown.clear();
  find(list, ".words").addEventListener("input", render);
  for (const filter of all(list, ".of-state, .of-family")) filter.addEventListener("change", render);
  const by = find(list, ".by", HTMLSelectElement);
  by.append(...COLUMNS.map(({ key, title }) => make("option", { value: key }, translated(title))));
  by.addEventListener("change", () => sortBy(by.value));
  find(list, ".more").addEventListener("click", () => {
    isAllShown = true;
    render();
  });
  fillHead();
  if (mark) render();
}

/** All loaded runs, the newest first. */
export const knownRuns = () => [...rows.values()];

let isAsking = false;
const begin = countRequests();

/**
 * Ask for the rows that have changed.
 * @param {boolean} [now] even while a request is under way, whose answer may predate a change
 */
export async function update(now = false) {
  if (isAsking && !now) return;
  isAsking = true;
  const isNewest = begin();
  try {
    const answer = await call(`runs?count=10000&since=${mark}`);
    if (!isNewest()) return;
    take(answer);
    tellLost("");
  } catch (error) {
    if (isNewest()) tellLost(messageOf(error));
  } finally {
    if (isNewest()) isAsking = false;
  }
}

/** @param {{ runs: import("./columns.js").Run[], mark: string, ids: string[] | null }} answer */
function take({ runs, mark: now, ids }) {
  const isFirst = !mark, changed = new Map(runs.map((run) => [run.id, rowOf(run)]));
  rows = new Map((ids ?? [...rows.keys()]).flatMap((id) => {
    const row = changed.get(id) ?? rows.get(id);
    return row ? [[id, row]] : [];
  }));
  mark = now;
  tellApart(rows.values());
  for (const id of chosen) if (!rows.has(id)) chosen.delete(id);
  if (isFirst || changed.size || ids) render();
}

/** @param {string} text that the server does not answer, or "" */
function tellLost(text) {
  const place = find(list, ".how");
  place.classList.toggle("bad", Boolean(text));
  if (text) place.textContent = text;
  else if (mark) place.textContent = summary();
}

function summary() {
  const active = knownRuns().filter((row) => row.active).length;
  const runs = count(rows.size, "run");
  if (!rows.size) return translated("No run yet. A training is listed here as soon as it starts.");
  return active ? say("{runs}, {active} at work", { runs, active }) : runs;
}

/** The runs that pass the filters, in the order of the table. */
function passing() {
  const words = find(list, ".words", HTMLInputElement).value.toLowerCase().split(/\s+/).filter(Boolean);
  const state = find(list, ".of-state", HTMLSelectElement).value;
  const family = find(list, ".of-family", HTMLSelectElement).value;
  const column = COLUMNS.find(({ key }) => key === sorted.key) ?? COLUMNS[0];
  return knownRuns()
    .filter((row) => {
      const text = [row.name, row.id, row.note, row.family, row.kind, row.preset, row.state].join(" ").toLowerCase();
      return words.every((word) => text.includes(word)) && (!state || row.state === state) &&
        (!family || row.family === family);
    })
    .sort(ordered(column, sorted.direction));
}

function render() {
  fillFilters();
  const found = passing(), visible = isAllShown ? found : found.slice(0, MAX_SHOWN);
  const columns = COLUMNS.filter(isShown);
  for (const [id, { tr }] of shown) if (!visible.some((row) => row.id === id)) tr.remove(), shown.delete(id);
  const body = find(list, "tbody");
  visible.forEach((row, at) => {
    const tr = rowElement(row, columns);
    if (body.children[at] !== tr) body.insertBefore(tr, body.children[at] ?? null);
  });
  markHead(columns, found);
  const none = find(list, ".none");
  none.hidden = Boolean(found.length) || !rows.size;
  none.textContent = translated("No run passes these filters.");
  find(list, ".scroll").hidden = !found.length;
  const more = find(list, ".more");
  const cut = found.length - visible.length;
  more.hidden = !cut;
  more.textContent = say("Show {count} more run", { count: cut }, "Show {count} more runs");
  if (!find(list, ".how").matches(".bad")) find(list, ".how").textContent = summary();
  renderChosen();
}

/** @param {Column} column */
function isShown(column) {
  if (!column.isOptional) return true;
  const values = new Set(knownRuns().map(column.sorts).filter((value) => value !== null));
  return values.size > (column.isTold ? 1 : 0);
}

/**
 * The row of a run; only cells whose content has changed are replaced.
 * @param {Row} row
 * @param {Column[]} columns
 */
function rowElement(row, columns) {
  const element = shown.get(row.id) ?? newRow(row);
  const { tr, keys } = element;
  tr.className = chosen.has(row.id) ? "is-chosen" : "";
  for (const column of COLUMNS) {
    const cell = find(tr, `[data-column="${column.key}"]`), key = JSON.stringify(column.basis(row));
    cell.hidden = !columns.includes(column);
    if (keys.get(column.key) === key) continue;
    keys.set(column.key, key);
    cell.replaceChildren(...column.show(row).filter((child) => child instanceof Node || typeof child === "string"));
    cell.classList.toggle("no-value", column.sorts(row) === null);
  }
  return tr;
}

/** @param {Row} row */
function newRow(row) {
  const box = make("input", { type: "checkbox", "aria-label": say("Choose {name}", { name: row.name }) });
  box.checked = chosen.has(row.id);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(row.id);
    else chosen.delete(row.id);
    render();
  });
  const cells = COLUMNS.map((column) => make(column.key === "name" ? "th" : "td",
    { "data-column": column.key, "data-label": column.title, className: column.isNumber ? "number" : "",
      ...(column.key === "name" ? { scope: "row" } : {}) }));
  const tr = make("tr", { "data-run": row.id }, make("td", { className: "choose" }, make("label", {}, box)), ...cells);
  tr.addEventListener("click", ({ target }) => {
    // Clicks anywhere in a row except on its controls, and not while text is being selected.
    if (target instanceof Element && !target.closest("a, input, button, .choose") && !String(getSelection()))
      void go(addressOf("runs", row.id));
  });
  const element = { tr, keys: new Map() };
  shown.set(row.id, element);
  return element;
}

function fillHead() {
  const every = make("input", { type: "checkbox", className: "every", "aria-label": translated("Choose all shown") });
  every.addEventListener("change", () => {
    chosen.clear();
    if (every.checked) for (const { id } of passing()) chosen.add(id);
    for (const box of all(list, "tbody .choose input", HTMLInputElement)) box.checked = every.checked;
    render();
  });
  const heads = COLUMNS.map(({ key, title, isNumber }) =>
    make("th", { scope: "col", "data-column": key, className: isNumber ? "number" : "" },
      makeButton(translated(title), () => sortBy(key))));
  find(list, "thead tr").replaceChildren(make("td", { className: "choose" }, make("label", {}, every)), ...heads);
}

/** @param {string} key */
function sortBy(key) {
  const isSame = sorted.key === key, column = COLUMNS.find((other) => other.key === key);
  sorted = { key, direction: isSame ? /** @type {1 | -1} */ (-sorted.direction) : column?.isNumber ? -1 : 1 };
  render();
}

/**
 * @param {Column[]} columns
 * @param {Row[]} found
 */
function markHead(columns, found) {
  for (const head of all(list, "thead th")) {
    const key = head.dataset.column ?? "";
    head.hidden = !columns.some((column) => column.key === key);
    const direction = sorted.direction === 1 ? "ascending" : "descending";
    head.setAttribute("aria-sort", key === sorted.key ? direction : "none");
  }
  find(list, ".by", HTMLSelectElement).value = sorted.key;
  const every = find(list, ".every", HTMLInputElement), many = found.filter(({ id }) => chosen.has(id)).length;
  every.checked = many > 0 && many === found.length;
  every.indeterminate = many > 0 && many < found.length;
}

function fillFilters() {
  const families = [...new Set(knownRuns().map(({ family }) => family).filter(Boolean))].sort();
  const states = stateNames.filter((state) => knownRuns().some((row) => row.state === state));
  fill(".of-family", "All models", families.map((name) => [name, name]));
  fill(".of-state", "All states", states.map((state) => [state, stateWord(state)]));
}

/**
 * @param {string} selector
 * @param {string} everything
 * @param {string[][]} entries key and text
 */
function fill(selector, everything, entries) {
  const select = find(list, selector, HTMLSelectElement), key = JSON.stringify(entries);
  if (select.dataset.filled === key) return;
  select.dataset.filled = key;
  const { value } = select;
  select.replaceChildren(make("option", { value: "" }, translated(everything)),
    ...entries.map(([name, text]) => make("option", { value: name }, text)));
  select.value = entries.some(([name]) => name === value) ? value : "";
}

// ---- what can be done with several

function renderChosen() {
  const bar = find(list, ".chosen"), ids = knownRuns().map(({ id }) => id).filter((id) => chosen.has(id));
  bar.hidden = !ids.length;
  const key = ids.join(" ");
  if (!ids.length || bar.dataset.shown === key) return;
  bar.dataset.shown = key;
  const compare = makeButton(translated("Compare"), () => go(addressOf("runs", ids.join(","))),
    { className: "primary", disabled: ids.length < 2 || ids.length > MAX_COMPARED });
  compare.title = say("Overlays the charts of up to {most} runs", { most: MAX_COMPARED });
  bar.replaceChildren(
    make("b", {}, say("{count} chosen", { count: ids.length })), compare,
    makeButton(translated("Remove from the list"), () => remove(ids)),
    makeButton(translated("Choose none"), () => {
      chosen.clear();
      for (const box of all(list, ".choose input", HTMLInputElement)) box.checked = false;
      render();
    }));
}

/** @param {string[]} ids */
async function remove(ids) {
  try {
    await call("runs/unlist", { runs: ids });
    tell(say("{runs} removed from the list; all files stay.", { runs: count(ids.length, "run") }),
      makeButton(translated("Undo"), () => restore(ids), { className: "put-back" }));
  } catch (error) {
    tell(messageOf(error), null, true);
  }
  await update(true);
}

/** @param {string[]} ids */
async function restore(ids) {
  try {
    await call("runs/relist", { runs: ids });
    tell(say("{runs} put back on the list.", { runs: count(ids.length, "run") }));
  } catch (error) {
    tell(messageOf(error), null, true);
  }
  await update(true);
}

/**
 * @param {string} text
 * @param {HTMLElement | null} [button]
 * @param {boolean} [bad]
 */
function tell(text, button = null, bad = false) {
  const place = find(list, ".answer");
  place.classList.toggle("bad", bad);
  place.replaceChildren(make("span", {}, text), ...(button ? [" ", button] : []));
}
