// The purpose of a training: the values that a recipe sets on top of the preset, and the steps that suit the images.
import { all, around, find, make } from "../server/elements.js";
import { ask } from "../server/http.js";
import { noteSubject } from "../server/late.js";
import { family, fieldOf, tabOf } from "./inputs.js";
import { sentOf } from "./messages.js";
import { onSettled, remember, restart, startOf } from "./page.js";

/** Further inputs of a recipe: the model, and the images per step. */
const WATCHED = ["model_version", "model_type", "train_batch_size", "gradient_accumulation_steps"];
/** @type {Record<string, number>} how many images each form names, where they are counted */
const images = {};
/** @type {Record<string, string>} what the last request of each form was about */
const lastQuestion = {};
/** @type {Record<string, { model: string, purpose: string }>} the purpose chosen in each form, until it is applied */
const chosen = {};

/**
 * The purpose of a form: the chosen one, also while its request is pending, or that of its recipe.
 * @param {HTMLFormElement} where
 */
function purposeOf(where) {
  const model = family(where), waiting = chosen[where.id];
  return waiting?.model === model ? waiting.purpose : startOf(where, model).purpose ?? "";
}

/**
 * Apply the recipe for the form's current values. Typed values stay.
 * @param {HTMLFormElement} where
 */
async function update(where) {
  const name = family(where), start = startOf(where, name), tab = tabOf(where);
  if (!start.advice) return;
  const purpose = purposeOf(where), counted = images[where.id] ?? 0;
  const processes = all(where, "[data-launch=num_processes]", HTMLInputElement)[0]?.value;
  const watched = WATCHED.map((option) => fieldOf(where, option)?.value);
  const about = JSON.stringify([name, start.id, purpose, counted, processes, ...watched]);
  const isFirst = !lastQuestion[where.id] && !counted; // the form starts with its preset's recipe
  if (lastQuestion[where.id] === about) return;
  lastQuestion[where.id] = about;
  if (isFirst && !chosen[where.id]) return;
  const isNewest = noteSubject(() => lastQuestion[where.id] + family(where));
  const question = { tab, sent: sentOf(tab), id: start.id, purpose, images: counted };
  const recipe = await ask("purpose", question).catch(() => null); // then the preset's own values stay
  if (!isNewest()) return;
  delete chosen[where.id];
  if (recipe) restart(where, recipe);
}

/**
 * Show the purposes, and describe the settings of the chosen one.
 * @param {HTMLFormElement} where
 */
function show(where) {
  const box = find(where, ".recipe"),
    { purposes = [], meant = "", elsewhere = "", sets = [], advice = "" } = startOf(where, family(where)),
    purpose = purposeOf(where);
  const shown = JSON.stringify([purpose, purposes, elsewhere, sets, advice]);
  if (box.dataset.shown === shown) return;
  const hasFocus = box.contains(document.activeElement);
  box.dataset.shown = shown;
  box.hidden = !purposes.length;
  const radios = purposes.map(([value, title]) => make("label", {},
    make("input", { type: "radio", name: "purpose", value, checked: value === purpose }), make("span", {}, title)));
  const choice = make("fieldset", { className: "family" }, make("legend", {}, "Purpose"), ...radios);
  const pairs = sets.map(([label, value]) =>
    make("span", {}, make("span", {}, label), " ", make("b", { className: "own" }, value)));
  box.replaceChildren(...(radios.length ? [make("span", { "aria-hidden": "true" }, "Purpose"), choice] : []));
  find(where, ".recipe-about").replaceChildren(
    ...(radios.length ? [make("small", {}, meant), elsewhere && make("small", {}, elsewhere)] : []).filter(Boolean),
    make("small", { className: "sets" }, ...pairs, make("span", {}, advice)));
  if (hasFocus) find(box, "input:checked").focus();
}

onSettled((where) => {
  show(where);
  void update(where);
});
document.addEventListener("kohya:counted", (event) => {
  const box = /** @type {HTMLElement} */ (/** @type {CustomEvent} */ (event).detail);
  const where = /** @type {HTMLFormElement} */ (around(box, "form.settings"));
  images[where.id] = Number(box.dataset.images ?? 0);
  void update(where);
});
document.addEventListener("change", ({ target }) => {
  const where = target instanceof HTMLInputElement && target.name === "purpose" && target.form;
  if (!where) return;
  remember(where);
  chosen[where.id] = { model: family(where), purpose: target.value };
  show(where); // not while another one is pressed, which would move the button from under the mouse
  void update(where);
});
export const chosenPurpose = (/** @type {HTMLFormElement} */ where) =>
  all(where, ".recipe input:checked", HTMLInputElement)[0]?.value ?? "";
