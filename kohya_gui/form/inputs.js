// The fields of a form, and the families that each is for.
import { all, around, fieldValue, find, isField } from "../server/elements.js";

/**
 * @typedef {import("../server/elements.js").Field & { form: HTMLFormElement }} Field a field of one option or launch
 *   setting
 */

/** @param {Element} element in a form */
export const formAround = (element) => /** @type {HTMLFormElement} */ (around(element, "form.settings"));

/**
 * The id of the training tab that an element belongs to: its form, or anything in or beside it.
 * @param {Element} element
 */
export const tabOf = (element) =>
  (element.closest("form.settings") ?? find(around(element, ".training"), "form.settings")).id.replace(/-form$/, "");

/**
 * @param {ParentNode} where
 * @returns {Field[]}
 */
export const fields = (where) => /** @type {Field[]} */ (all(where, "[data-option], [data-launch]").filter(isField));

/** @param {HTMLFormElement} where */
export const families = (where) => all(where, "[name=family]", HTMLInputElement);

/**
 * The chosen family. Called for every field: the choices are at the top of the form, so the selector finds them
 * quickly.
 * @param {HTMLFormElement} where
 */
export const family = (where) =>
  /** @type {HTMLInputElement | null} */ (where.querySelector("[name=family]:checked"))?.value ?? "";

/** @param {Field} field */
export const familiesOf = (field) => (field.dataset.families ?? "").split(" ");

/**
 * @param {Field} field
 * @param {string} name of a family
 */
export const isFor = (field, name) => familiesOf(field).includes(name);

/**
 * The field of an option, of the chosen family.
 * @param {HTMLFormElement} where
 * @param {string} name
 */
export const fieldOf = (where, name) => fieldsOf(where, [name])[0];

/**
 * The fields of some options, of the chosen family. Selected by name, as a form has hundreds of others.
 * @param {HTMLFormElement} where
 * @param {string[]} names
 */
export const fieldsOf = (where, names) => {
  const elements = all(where, names.map((name) => `[data-option="${name}"]`).join()), chosen = family(where);
  return /** @type {Field[]} */ (elements.filter(isField)).filter((field) => isFor(field, chosen));
};

/**
 * The images that a form names, as one text: missing captions have to be confirmed once for each.
 * @param {HTMLFormElement} where
 */
export function images(where) {
  return fieldsOf(where, ["train_data_dir", "dataset_config", "in_json", "caption_extension"])
    .map(fieldValue)
    .join("\n");
}

/**
 * Whether two texts mean the same value: 1600.0 is 1600, and 0.0001 is 1e-4.
 * @param {string} a
 * @param {string} b
 */
export const same = (a, b) => a === b || (a.trim() !== "" && b !== "" && Number(a) === Number(b));
