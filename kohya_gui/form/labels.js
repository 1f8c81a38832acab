// The labels of options' fields, for sentences that name options.
import { nameOptions } from "../i18n/labels.js";
import { inEnglish } from "../i18n/words.js";
import { all, isField } from "../server/elements.js";
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
function labelOf(field) {
  const label = field.closest("label")?.querySelector("span") ?? field.closest(".field")?.querySelector("label");
  return label ? (inEnglish(label) ?? "").trim() : "";
}

/**
 * @param {HTMLFormElement} where
 * @param {string} label
 */
function isShared(where, label) {
  const chosen = family(where);
  let known = counted.get(where);
  if (known?.family !== chosen) {
    const count = new Map();
    for (const text of fields(where)
      .filter((field) => isFor(field, chosen))
      .map(labelOf))
      count.set(text, (count.get(text) ?? 0) + 1);
    known = { family: chosen, count };
    counted.set(where, known);
  }
  return (known.count.get(label) ?? 0) > 1;
}

/**
 * The form that a sentence is about: the one around it, or the visible one.
 * @param {Element | null} near
 */
function formOf(near) {
  const own = near?.closest(".training")?.querySelector("form.settings");
  const every = all(document, "form.settings", HTMLFormElement);
  return own instanceof HTMLFormElement ? own : every.find((where) => where.checkVisibility()) ?? every[0];
}

nameOptions((name, near) => {
  const selector = `[data-option="${name}"], [data-launch="${name}"]`, where = formOf(near);
  const own = where ? /** @type {Field[]} */ (all(where, selector).filter(isField)) : [];
  const field =
    own.find((one) => isFor(one, family(where))) ??
    own[0] ??
    /** @type {Field[]} */ (all(document, selector).filter(isField))[0];
  const text = field ? labelOf(field) : "";
  return text ? { text, isShared: isShared(field.form, text) } : null;
});
