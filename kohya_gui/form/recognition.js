// The family and options that a base model needs, recognised by its header, and the files beside it.
import { say } from "../i18n/sentences.js";
import { fieldValue, make, setValue } from "../server/elements.js";
import { ask } from "../server/http.js";
import * as inputs from "./inputs.js";
import { putAway, sentOf, tell } from "./messages.js";
import * as form from "./page.js";

/** @typedef {import("./inputs.js").Field} Field */
/**
 * @typedef {{ path?: string, family?: string, words?: string, options?: form.Values, proposed?: form.Values }} Model
 *   the base model's file; empty if unknown. It needs `options`, or `proposed` by its file name
 */

export const MODEL = "pretrained_model_name_or_path";

/** @type {Record<string, form.Values>} the options that the last recognised model needs, by form and family */
const needed = {};

for (const type of ["input", "change"])
  document.addEventListener(type, ({ target, isTrusted }) => {
    if (!(target instanceof HTMLInputElement) || target.dataset.option !== MODEL || !target.form) return;
    if (isTrusted || type === "change") target.form.dataset.named = target.value; // typed or picked, and not filled in
  });

/**
 * The options that a model needs. Options proposed by its file name count only if the user has just named the model,
 * not if a config or a reload did.
 * @param {HTMLFormElement} where
 * @param {Model} model
 */
function neededBy(where, { path, options = {}, proposed = {} }) {
  const isNamed = where.dataset.named === path;
  delete where.dataset.named;
  return isNamed ? proposed : options;
}

/**
 * The options that a model needs, and the defaults of those that the previous model needed and nobody has changed
 * since.
 * @param {Field[]} mine
 * @param {form.Values} options
 * @param {form.Values} before
 */
function valuesFor(mine, options, before) {
  const values = { ...options };
  for (const field of mine) {
    const name = field.dataset.option ?? "";
    if (name in before && !(name in options) && fieldValue(field) === before[name])
      values[name] = field.dataset.default ?? "";
  }
  return values;
}

/**
 * Choose the family and the options that a checkpoint's header requires, once each time the file is named. Options of
 * the previous model go back to their defaults.
 * @param {HTMLFormElement} where
 * @param {Model} model
 */
export function recognise(where, model) {
  const { path, family } = model, isNamed = where.dataset.named === path;
  const isNew = where.dataset.seen !== path || isNamed;
  where.dataset.seen = path ?? "";
  if (!path || !isNew) return;
  const options = neededBy(where, model);
  if (!family) return;
  if (isNamed) setTimeout(() => fillBeside(where, path)); // after the family was changed
  const held = form.held(where), key = `${where.id} ${family}`, before = needed[key] ?? {};
  needed[key] = options;
  const mine = inputs.fields(where).filter((field) => inputs.isFor(field, family));
  const values = valuesFor(mine, options, before);
  const differs = mine.some(
    (field) => String(fieldValue(field)) !== String(values[field.dataset.option ?? ""] ?? fieldValue(field)));
  if (family === held.family && !differs) return;
  form.remember(where);
  if (family !== held.family) {
    form.chooseFamily(where, family);
    putAway(where);
  }
  values[MODEL] = held.values[MODEL];
  for (const field of mine)
    if ((field.dataset.option ?? "") in values) setValue(field, values[field.dataset.option ?? ""]);
  form.settle(where);
}

/**
 * Fill in the text encoders and VAE found beside a model that the user has just named, if their fields are empty.
 * @param {HTMLFormElement} where
 * @param {string} path
 */
async function fillBeside(where, path) {
  const tab = inputs.tabOf(where), sent = sentOf(tab);
  /** @type {{ values: form.Values }} */
  const { values } = await ask("models_beside", { tab, sent }).catch(() => ({ values: {} }));
  const empty = inputs
    .fields(where)
    .filter(
      (field) => inputs.isFor(field, inputs.family(where)) && (field.dataset.option ?? "") in values && !field.value);
  if (!empty.length || inputs.fieldOf(where, MODEL)?.value !== path) return;
  form.remember(where);
  for (const field of empty) setValue(field, values[field.dataset.option ?? ""]);
  form.settle(where);
  const names = empty.map((field) => field.value.split(/[\\/]/).at(-1)).join(", ");
  tell(
    tab,
    "good",
    make("p", {},
      say("Filled in what is beside the model: {names}.", { names }),
      " ",
      make("button", { type: "button", className: "undo" }, "Undo")));
}
