// The form in the browser: collect its values, fill it, remember it. All decisions are made on the server.
import { around, fieldValue, find, hit, isField, setValue } from "../server/elements.js";
import * as memories from "./family_values.js";
import * as histories from "./history.js";
import { families, familiesOf, family, fields, fieldsOf, images, isFor, same, tabOf } from "./inputs.js";
import { forgetMarks, markChanged, markRequired } from "./marks.js";
import { jump } from "./sections.js";
import { source, store } from "./storage.js";

/** @typedef {import("./inputs.js").Field} Field */
/** @typedef {Record<string, string | boolean>} Values by option name, as fields hold them */
/**
 * @typedef {{ id: string, title: string, why?: string, text?: string, notes?: string[], values: Values,
 *   purpose?: string, purposes?: [string, string][], meant?: string, elsewhere?: string, sets?: [string, string][],
 *   advice?: string, texts?: import("../i18n/sentences.js").Sentence[] }} Start
 * `purpose` and the rest belong to the recipe on top of the preset: `sets` are labels and values, `advice` is about
 * images and steps */
/**
 * @typedef {{ family: string, starts?: Record<string, Start>, memory?: memories.Memory, kept:
 *   [string, string | boolean][], opened?: string, source?: string }} Copy `opened` is the config that was loaded
 *   before, `source` its text
 */

/**
 * @param {string} tab
 * @returns {HTMLFormElement}
 */
export const formOf = (tab) => find(document, `#${tab}-form`, HTMLFormElement);

// ---- the start of the form: a preset or the defaults, for each family

/** @type {Record<string, Record<string, Start>>} form -> family -> start */
const starts = {};
/** @type {Record<string, memories.Memory>} by form */
const memory = {};
const NAMED = ["output_name", "output_dir"]; // proposed by a start, but never replaced once typed

/**
 * The starts that suit this machine, by family.
 * @param {HTMLFormElement} where
 * @returns {Record<string, Start>}
 */
export const suited = (where) => JSON.parse(where.dataset.starts || "{}");

/**
 * A start from the defaults of a family.
 * @param {HTMLFormElement} where
 * @param {string} name
 * @returns {Start}
 */
export const bare = (where, name) => ({
  id: "defaults",
  title: families(where).find((choice) => choice.value === name)?.dataset.defaults ?? "",
  why: "",
  values: {},
});

/**
 * @param {HTMLFormElement} where
 * @param {string} name of a family
 */
export const startOf = (where, name) => starts[where.id]?.[name] ?? bare(where, name);

/**
 * The initial value of a field, as text.
 * @param {Field} field
 * @param {string} name of the chosen family
 */
function firstValue(field, name) {
  const { values } = startOf(field.form, isFor(field, name) ? name : familiesOf(field)[0]);
  return String(values[field.dataset.option ?? ""] ?? field.dataset.default);
}

/**
 * The name or folder of the result that the form proposes, unless it was typed or loaded.
 * @param {Field} field
 * @param {string} name of a family
 */
function proposed(field, name) {
  const { option = "" } = field.dataset;
  return NAMED.includes(option) ? suited(field.form)[name]?.values[option] : undefined;
}

/**
 * @param {Field} field
 * @param {string} name of the chosen family
 */
export const untouched = (field, name) => same(String(fieldValue(field)), firstValue(field, name));

/**
 * Fill the form with its start: each family's own fields, and the shared ones with the chosen family's values.
 * @param {HTMLFormElement} where
 */
function open(where) {
  const name = family(where);
  starts[where.id] = suited(where);
  memory[where.id] = memories.nothing();
  for (const field of fields(where)) setValue(field, firstValue(field, name));
  where.dataset.family = name;
  settle(where);
}

/**
 * Start over with other values, and keep what was typed.
 * @param {HTMLFormElement} where
 * @param {Start} start
 */
export function restart(where, start) {
  const name = family(where);
  const follow = fields(where).filter((field) => isFor(field, name) && untouched(field, name)); // the new start
  starts[where.id] = { ...starts[where.id], [name]: start };
  for (const field of follow) if (!NAMED.includes(field.dataset.option ?? "")) setValue(field, firstValue(field, name));
  settle(where);
}

/**
 * Choose a family, with the values it was left with. To a family chosen for the first time, typed and loaded values
 * carry over; the rest is its start.
 * @param {HTMLFormElement} where
 * @param {string} name
 */
export function chooseFamily(where, name) {
  const from = where.dataset.family ?? family(where);
  const radio = families(where).find((choice) => choice.value === name);
  if (!radio) return;
  radio.checked = true;
  where.dataset.family = name;
  if (from === name) return;
  const formMemory = memory[where.id] ??= memories.nothing();
  memories.leave(formMemory, from, shared(where, from).map((field) => asShared(field, from)));
  const values = memories.arrive(formMemory, name, shared(where, name).map((field) => asShared(field, name)));
  for (const field of shared(where, name)) setValue(field, values[field.id]);
}

/**
 * The fields that a family shares with others. Tokens stay unchanged.
 * @param {HTMLFormElement} where
 * @param {string} name
 */
const shared = (where, name) =>
  fields(where).filter((field) => isFor(field, name) && familiesOf(field).length > 1 && field.type !== "password");

/**
 * @param {Field} field
 * @param {string} name of a family
 * @returns {memories.Shared}
 */
function asShared(field, name) {
  const first = firstValue(field, name), value = fieldValue(field);
  return {
    id: field.id, value, first, isTouched: !same(String(value), first), isProposed: value === proposed(field, name),
  };
}

/** @type {Record<string, number>} the requests of each tab and the fillings of its form, counted */
const turns = {};

/**
 * The number of a tab's last request or fill.
 * @param {string} tab
 */
export const turnOf = (tab) => turns[tab] ?? 0;

/** @param {string} tab */
export const nextTurn = (tab) => (turns[tab] = turnOf(tab) + 1);

/**
 * The form's values for the chosen family; `anyway` confirms images without captions.
 * @param {HTMLFormElement} where
 */
export function held(where) {
  const name = family(where), { id: start, purpose = "" } = startOf(where, name);
  /**
   * @type {{ family: string, values: Values, typed: string[], launch: Values, anyway: boolean, start: string,
   *   purpose: string }}
   */
  const sent = {
    family: name, values: {}, typed: [], launch: {}, anyway: where.dataset.anyway === images(where), start, purpose,
  };
  for (const field of fields(where)) {
    if (!isFor(field, name)) continue;
    const { option, launch } = field.dataset;
    if (launch) sent.launch[launch] = fieldValue(field);
    if (!option) continue;
    sent.values[option] = fieldValue(field);
    if (!untouched(field, name)) sent.typed.push(option);
  }
  return sent;
}

/**
 * Fill the form of a tab with values from the server. For a config, `given` are the options that its file names.
 * @param {string} tab
 * @param {string} sent
 * @param {string} [opened] the config that another one replaces
 */
export function fill(tab, sent, opened) {
  if (!sent) return;
  const where = formOf(tab);
  nextTurn(tab);
  const { family: name, values, base, start, given: explicit, prompts = [], launch = {}, source: text = "" } =
    JSON.parse(sent);
  const isLoaded = start?.id === "";
  if (base) store(`${tab}-base`, JSON.stringify(base)); // another program's file, whose other keys an export keeps
  remember(where, isLoaded ? opened ?? around(where, ".training").dataset.opened ?? "" : undefined);
  if (isLoaded) source(tab, text);
  const proposedFields = fields(where).filter(
    (field) => NAMED.includes(field.dataset.option ?? "") && untouched(field, family(where)));
  if (name) chooseFamily(where, name);
  if (start) starts[where.id] = { ...starts[where.id], [family(where)]: start };
  const filled = put(where, values, launch);
  if (!start) return;
  const isSet = ({ dataset: { option = "" } }) => !explicit || explicit.includes(option);
  memories.beginAnew(memory[where.id], family(where), start.id ? undefined : filled.filter(isSet).map(({ id }) => id));
  if (prompts.length) document.dispatchEvent(new CustomEvent("kohya:prompts", { detail: { where, prompts } }));
  if (!start.id) return;
  for (const field of proposedFields) setValue(field, firstValue(field, family(where)));
  settle(where);
}

/**
 * @param {HTMLFormElement} where
 * @param {Values} values
 * @param {Values} [launch]
 */
function put(where, values, launch = {}) {
  const name = family(where);
  const sent = (/** @type {Field} */ { dataset }) => values[dataset.option ?? ""] ?? launch[dataset.launch ?? ""];
  const changed = fields(where).filter((field) => isFor(field, name) && sent(field) !== undefined);
  for (const field of changed) {
    setValue(field, sent(field));
    memories.choose(memory[where.id], name, field.id);
    field.classList.add("mended");
  }
  settle(where);
  return changed;
}

/**
 * Set single values in the form, and bring the first of them into view.
 * @param {string} tab
 * @param {Values} values
 */
export function apply(tab, values) {
  const where = formOf(tab);
  remember(where);
  const [field] = put(where, values);
  if (field) jump(field.id);
}

/**
 * Reset options to their initial values.
 * @param {string} tab
 * @param {string[]} names
 */
export function leaveOut(tab, names) {
  const where = formOf(tab);
  remember(where);
  for (const field of fieldsOf(where, names)) {
    setValue(field, firstValue(field, family(where)));
    memories.forget(memory[where.id], family(where), field.id);
    field.classList.add("mended");
  }
  settle(where);
}

/** @type {Record<string, histories.History<Copy>>} by form; without tokens */
const history = {};
/** @type {Record<string, Copy>} each form as it was after its last change */
const latest = {};

/** @param {HTMLFormElement} where */
export const latestOf = (where) => latest[where.id];

/** @param {HTMLFormElement} where */
export const historyOf = (where) => (history[where.id] ??= histories.nothing());

/**
 * Remember a form before it is changed, for Undo.
 * @param {HTMLFormElement} where
 * @param {string} [opened] the config that another one replaces
 */
export function remember(where, opened) {
  const file = opened === undefined ? {} : { opened, source: source(tabOf(where)) };
  histories.remember(historyOf(where), { ...copyOf(where), ...file });
}

/**
 * @param {HTMLFormElement} where
 * @returns {Copy}
 */
export const copyOf = (where) => ({
  family: family(where),
  starts: starts[where.id] ?? {},
  memory: structuredClone(memory[where.id]),
  kept: fields(where).filter((field) => field.type !== "password").map((field) => [field.id, fieldValue(field)]),
});

/**
 * @param {HTMLFormElement} where
 * @param {Copy} copy
 */
export function restore(where, copy) {
  const { family: name, kept: values, starts: storedStarts, memory: formMemory = memories.nothing() } = copy;
  starts[where.id] = storedStarts ?? {};
  memory[where.id] = formMemory;
  const radio = families(where).find((choice) => choice.value === name);
  if (radio) radio.checked = true;
  where.dataset.family = family(where);
  for (const [id, was] of values) {
    const field = document.getElementById(id);
    if (isField(field)) setValue(field, was);
  }
  settle(where);
}

/**
 * After any change: mark fields that differ from the start, which also shows rare settings, and store the form.
 * @param {HTMLFormElement} where
 */
export function settle(where) {
  const name = family(where);
  for (const field of fields(where)) mark(field, name);
  for (const field of fields(where)) if (field.dataset.unless) demand(field, name);
  const now = copyOf(where);
  forgetMarks(latest[where.id]?.kept ?? [], now.kept);
  latest[where.id] = now;
  store(where.id, JSON.stringify(latest[where.id]));
  document.dispatchEvent(new CustomEvent("kohya:settled", { detail: where }));
}

/**
 * Register a callback for every change of a form.
 * @param {(where: HTMLFormElement) => void} listener
 */
export const onSettled = (listener) =>
  document.addEventListener("kohya:settled", (event) => listener(/** @type {CustomEvent} */ (event).detail));

/**
 * Mark a field that differs from its initial value. Returns whether it does.
 * @param {Field} field
 * @param {string} name of the chosen family
 */
function mark(field, name) {
  const differs = !untouched(field, name);
  markChanged(field, differs);
  return differs;
}

/**
 * Require a field only while its alternative is empty.
 * @param {Field} field
 * @param {string} name of the chosen family
 */
function demand(field, name) {
  const other = fields(field.form).find((other) => other.dataset.option === field.dataset.unless && isFor(other, name));
  markRequired(field, !other?.value.trim());
}

/** @param {Element} button */
function reset(button) {
  const [field] = fields(around(button, ".field"));
  remember(field.form);
  setValue(field, firstValue(field, family(field.form)));
  memories.forget(memory[field.form.id], family(field.form), field.id);
  settle(field.form);
  field.focus();
}

/**
 * Set up a form that was added to the page, with its values from before a reload.
 * @param {Element} element
 */
export function mount(element) {
  const where = find(element, "form.settings", HTMLFormElement);
  const copy = store(where.id);
  if (copy) restore(where, JSON.parse(copy));
  else open(where);
}

document.addEventListener("click", (event) => {
  const back = hit(event, ".reset");
  if (back) reset(back);
});
document.addEventListener("input", ({ target }) => {
  if (!(target instanceof Element)) return;
  target.classList.add("mended"); // the last message about it is out of date
  if (!isField(target) || !target.form?.classList.contains("settings")) return;
  if (target.name === "family") chooseFamily(target.form, target.value);
  settle(target.form);
});
document.addEventListener("submit", (event) => {
  if (event.target instanceof Element && event.target.classList.contains("settings")) event.preventDefault();
});
