// The line of a closed section: its settings that differ from the form's start.
import { inEnglish } from "../i18n/words.js";
import { all, find, isBox, make } from "../server/elements.js";
import { family, fields, isFor } from "./inputs.js";
import { englishLabel, wordOf } from "./labels.js";
import { onSettled } from "./page.js";

/** @typedef {import("./inputs.js").Field} Field */

const PARTS = 8, LENGTH = 40; // parts of a summary, and characters of a value, at most

// Values that need no label: Cosine, AdamW8bit.
const ALONE = ["optimizer_type", "lr_scheduler", "loss_type"];
const ADAPTER = ["network_module", "network_args"]; // shown as one type, with fields of its own

const textOf = (/** @type {Node | string} */ piece) => (typeof piece === "string" ? piece : piece.textContent ?? "");

/**
 * A value for display: the text of a choice, the last part of a path.
 * @param {Field} field
 */
function valueOf(field) {
  const text = field.value.trim();
  const word = wordOf(field, text);
  if (word !== text || field instanceof HTMLSelectElement) return make("span", {}, word);
  if (field.type === "password") return "";
  const isPath = Boolean(field.closest(".field")?.querySelector("button.pick"));
  const short = isPath ? text.replace(/[\\/]+$/, "").split(/[\\/]/).at(-1) ?? "" : text.split("\n")[0];
  return make("span", { className: "own" }, short.length > LENGTH ? `${short.slice(0, LENGTH - 1)}…` : short);
}

/**
 * The value of a field.
 * @param {Field} field
 */
function partOf(field) {
  const label = make("span", {}, englishLabel(field)), { option = "" } = field.dataset;
  if (isBox(field)) return field.checked ? [label] : [label, " ", make("span", {}, "off")];
  if (!field.value.trim()) return [label, " ", make("span", {}, "not set")];
  return ALONE.includes(option) ? [valueOf(field)] : [label, " ", valueOf(field)];
}

/**
 * The type of the adapter, once the server has recognised it.
 * @param {Element} section
 * @param {Field[]} changed
 */
function adapterOf(section, changed) {
  const list = section.querySelector(".adapter .kinds");
  const isChanged = changed.some((field) => ADAPTER.includes(field.dataset.option ?? ""));
  if (!isChanged || !(list instanceof HTMLSelectElement) || !list.selectedOptions.length) return null;
  return [make("span", {}, inEnglish(list.selectedOptions[0]) ?? "")];
}

/**
 * The compiling profile instead of its settings, and its cost.
 * @param {Element} section
 * @param {Field[]} changed
 */
function compilingOf(section, changed) {
  const outlook = section.querySelector(".outlook");
  if (!outlook?.textContent) return null;
  const profile = section.querySelector(".profile[aria-pressed=true] b");
  const settings = profile
    ? [[make("span", {}, inEnglish(profile) ?? "")]]
    : changed.filter(({ dataset }) => dataset.option !== "compile").map(partOf);
  return [...settings, [make("span", {}, inEnglish(outlook) ?? "")]];
}

/**
 * Show a section's settings in its header.
 * @param {Element} section
 * @param {Field[]} changed the fields that differ from the form's start
 */
function show(section, changed) {
  const adapter = adapterOf(section, changed);
  const others = changed.filter(({ dataset }) => !adapter || !ADAPTER.includes(dataset.option ?? ""));
  const last = (/** @type {Field} */ field) => Number(field.value.includes("=")); // arguments are long
  others.sort((a, b) => last(a) - last(b));
  const parts = compilingOf(section, changed) ?? [...(adapter ? [adapter] : []), ...others.map(partOf)];
  const pieces = parts.slice(0, PARTS).flatMap((part, at) => (at ? [" · ", ...part] : part));
  const line = find(section, ".fold .set"), now = pieces.map((piece) => textOf(piece)).join("");
  section.classList.toggle("is-set", parts.length > 0);
  if (line.dataset.now === now) return;
  line.dataset.now = now;
  line.replaceChildren(...pieces);
}

/** @param {HTMLFormElement} where */
function showAll(where) {
  const name = family(where);
  /** @type {Map<Element | null, Field[]>} */
  const bySection = new Map();
  for (const field of fields(where)) {
    const section = field.closest(".section");
    if (section && isFor(field, name) && field.closest(".field")?.classList.contains("changed"))
      bySection.set(section, [...(bySection.get(section) ?? []), field]);
  }
  for (const section of all(where, ".section")) show(section, bySection.get(section) ?? []);
}

onSettled(showAll);
// The type of the adapter and what compiling takes come from the server.
document.addEventListener("kohya:judged", (event) => showAll(/** @type {CustomEvent} */ (event).detail.where));
