// The labels of options' fields, for sentences that name options.
import { nameOptions } from "../i18n/labels.js";
import { inEnglish } from "../i18n/words.js";
import { all, isBox, isField } from "../server/elements.js";
import { family, fields, isFor } from "./inputs.js";

/** @typedef {import("./inputs.js").Field} Field */

/**
 * @type {WeakMap<Element, { family: string, count: Map<string, number> }>} how many fields of a family have a label,
 *   by form
 */
const counted = new WeakMap();

/**
 * The label of a field, in English.
 * @param {Field} field
 */
export function englishLabel(field) {
  const label = field.closest("label")?.querySelector("span") ?? field.closest(".field")?.querySelector("label");
  return label ? (inEnglish(label) ?? "").trim() : "";
}

const SWITCHED = { true: "on", false: "off" };

/**
 * A value of a field in English, as a list of choices shows it.
 * @param {Field} field
 * @param {string} value
 */
export function wordOf(field, value) {
  if (isBox(field)) return SWITCHED[/** @type {keyof typeof SWITCHED} */ (value)] ?? value;
  const choices = field instanceof HTMLSelectElement ? field : field instanceof HTMLInputElement ? field.list : null;
  const choice = [...(choices?.options ?? [])].find((option) => option.value === value);
  return choice ? (inEnglish(choice) ?? value) : value;
}

/**
 * @param {HTMLFormElement} where
 * @param {string} label
 */
function isShared(where, label) {
  const chosen = family(where);
  let counts = counted.get(where);
  if (counts?.family !== chosen) {
    const count = new Map();
    for (const text of fields(where)
      .filter((field) => isFor(field, chosen))
      .map(englishLabel))
      count.set(text, (count.get(text) ?? 0) + 1);
    counts = { family: chosen, count };
    counted.set(where, counts);
  }
  return (counts.count.get(label) ?? 0) > 1;
}

/**
 * The form that a sentence is about: the one around it, or the visible one.
 * @param {Element | null} near
 */
function formOf(near) {
  const enclosing = near?.closest(".training")?.querySelector("form.settings");
  const forms = all(document, "form.settings", HTMLFormElement);
  return enclosing instanceof HTMLFormElement ? enclosing : forms.find((where) => where.checkVisibility()) ?? forms[0];
}

/**
 * The field of an option of image folders, which each row has, and no other field of the form.
 * @param {HTMLFormElement} where
 * @param {string} name
 */
function fieldOfRow(where, name) {
  const templates = all(where, ".datasets template", HTMLTemplateElement);
  return templates.map(({ content }) => content.querySelector(`[data-set="${name}"]`)).find(isField);
}

nameOptions((name, near) => {
  const selector = `[data-option="${name}"], [data-launch="${name}"]`, where = formOf(near);
  const matching = where ? /** @type {Field[]} */ (all(where, selector).filter(isField)) : [];
  const field =
    matching.find((candidate) => isFor(candidate, family(where))) ??
    matching[0] ??
    (where && fieldOfRow(where, name)) ??
    /** @type {Field[]} */ (all(document, selector).filter(isField))[0];
  const text = field ? englishLabel(field) : "";
  const isAmbiguous = Boolean(field?.form) && isShared(field.form, text);
  return text ? { text, isShared: isAmbiguous, wordOf: (value) => wordOf(field, value) } : null;
}, (value, near) => {
  const choice = formOf(near)?.querySelector(`option[value="${value}"]`);
  return (choice && inEnglish(choice)) ?? "";
});
