// The source of the room Data's images: one folder, or everything that a training tab's form names, one row each.
import * as form from "../form/page.js";
import { tabOf } from "../form/inputs.js";
import { count, say } from "../i18n/sentences.js";
import { all, fieldValue, finder, hit, isField, make, makeButton, setValue } from "../server/elements.js";

/** @typedef {import("./images.js").Tab} Tab */
/** @typedef {import("./images_overview.js").Overview} Overview */
/** @typedef {import("./images_overview.js").Place} Place */
/**
 * @typedef {{ title: string, script: string, values: Record<string, unknown>, processes: number }} Taken the settings
 *   taken from a form
 */
/** @typedef {{ folder: string, fields: string[] }} Before the view to return to from a single source */

const FILES = ["dataset_config", "in_json"]; // options whose file describes images
const NAMES = ["reg_data_dir", ...FILES]; // options that may name images outside the folder

/** @type {HTMLElement} */
let root;
/** @type {Tab} */
let tab;
/** @type {Taken | null} */
let taken = null;
/** @type {Before | null} */
let before = null;
/** @type {Taken | null} */
let followed = null; // the form to count with while no other is chosen
let isFollowing = true; // until a setting is changed here
let lastForm = ""; // id of the training tab that was open last

const part = finder(() => root);
const folder = () => part("#images-folder", HTMLInputElement);
const setting = (/** @type {string} */ name) => part(`[data-setting="${name}"]`, HTMLInputElement);

/** The id and title of the chosen training tab. */
function chosenTab() {
  const list = part("#images-tab", HTMLSelectElement);
  return { id: list.value, title: list.selectedOptions[0].text };
}

/** List the settings taken from the form that have no field in this tab. */
export function question() {
  const form = taken ?? followed;
  return form ? { script: form.script, taken: form.values, processes: form.processes } : {};
}

function showTaken() {
  part(".taken").hidden = !taken && !followed;
  part(".taken [data-do=forget]").hidden = !taken;
  if (taken)
    part(".taken span").textContent = say(
      "Counted as the training of the {tab} tab, with its other settings for images and captions.",
      { tab: taken.title });
  else if (followed)
    part(".taken span").textContent = say(
      "Counted with the resolution, batch size, buckets and repeats of the {tab} tab.", { tab: followed.title });
}

/**
 * Count as the last open form would: with its sizes, batches, buckets and repeats. Returns whether anything
 * has changed.
 */
export function follow() {
  const list = part("#images-tab", HTMLSelectElement);
  if (taken || before || !isFollowing) return false;
  if (!document.getElementById(`${lastForm || list.value}-form`)) return false;
  const old = JSON.stringify([question(), fieldValues()]);
  if (lastForm) list.value = lastForm;
  const { values, ...form } = formNow();
  followed = { ...form, values: {} };
  putValues(Object.fromEntries(Object.entries(values).filter(([name]) => !NAMES.includes(name))));
  showTaken();
  return old !== JSON.stringify([question(), fieldValues()]);
}

const fieldValues = () => all(root, "[data-setting]", HTMLInputElement).map((field) => fieldValue(field));

/** Store the open form before another tab is opened. */
function noteForm() {
  const shown = all(document, "form.settings").find((where) => where.checkVisibility());
  if (shown) lastForm = tabOf(shown);
}

/** Count a folder that belongs to the chosen form as that form would train it. */
export function adopt() {
  const { id } = chosenTab(), where = document.getElementById(`${id}-form`);
  const formFolder = where && form.held(form.formOf(id)).values.train_data_dir;
  if (taken || !formFolder || String(formFolder).trim() !== folder().value.trim() || before) return;
  adoptSettings();
  showTaken();
}

/** Copy a form's image settings to this tab's fields; settings without a field are kept unchanged. */
function take() {
  const { title } = chosenTab(), values = adoptSettings();
  before = null;
  showTaken();
  if (values.train_data_dir) setValue(folder(), values.train_data_dir);
  if (folder().value || tab.described()) tab.open();
  else
    tab.notify("plain", say("The settings of the {tab} tab were taken. It names no image folder yet.", { tab: title }));
}

/** The chosen form, with all of its values. */
function formNow() {
  const { id, title } = chosenTab();
  const { family, values, launch } = form.held(form.formOf(id));
  const script = JSON.parse(form.formOf(id).dataset.scripts ?? "{}")[family];
  return { title, script, values, processes: Math.max(1, parseInt(String(launch.num_processes), 10) || 1) };
}

/**
 * Put a form's values into this tab's fields; fields that the form lacks get their initial values.
 * @param {Record<string, string | boolean>} values
 */
function putValues(values) {
  for (const field of all(root, "[data-setting]", HTMLInputElement)) {
    const name = field.dataset.setting ?? "";
    const keeps = name === "resolution" && !values[name] && !values.dataset_config;
    const initial = field.type === "checkbox" ? field.defaultChecked : field.defaultValue;
    if (!keeps) setValue(field, values[name] ?? initial);
  }
}

/** Adopt the chosen form's settings about images. Returns all of its values. */
function adoptSettings() {
  const { values, ...form } = formNow();
  const names = (root.dataset.takes ?? "").split(" ").filter((name) => name in values);
  taken = { ...form, values: Object.fromEntries(names.map((name) => [name, values[name]])) };
  putValues(values);
  return values;
}

/** Put this folder and its settings into a form, as one change that can be undone. */
function give() {
  const { id, title } = chosenTab(), where = form.formOf(id);
  /** @type {string[]} */
  const left = [];
  form.remember(where);
  for (const name of ["train_data_dir", ...FILES, "caption_extension", "resolution", "enable_bucket"]) {
    const from = name === "train_data_dir" ? folder() : setting(name);
    const field = where.querySelector(`[data-option="${name}"]`);
    if (!isField(field)) continue;
    const before = field.value.trim(), value = fieldValue(from);
    // A file that describes other images would be used instead of the folder.
    if (FILES.includes(name) && before && before !== String(value).trim()) left.push(before);
    setValue(field, value);
  }
  form.settle(where);
  const sentences = [
    say("The {tab} tab has this folder now, with its caption extension, resolution and buckets.", { tab: title }),
    ...left.map((file) =>
      say("It no longer uses {file}, which describes other images; Undo in that tab brings it back.", { file })),
  ];
  tab.notify("good", sentences.join("\n"));
}

function forget() {
  [taken, isFollowing] = [null, true];
  follow();
  showTaken();
  tab.open();
}

/**
 * Open a single source, where its images and captions can be edited.
 * @param {string} path
 */
function openAlone(path) {
  before ??= { folder: folder().value, fields: NAMES.map((name) => setting(name).value) };
  for (const name of NAMES) setting(name).value = "";
  folder().value = path;
  tab.open();
}

/** Return from a single source to all of them. */
function back() {
  if (!before) return;
  folder().value = before.folder;
  for (const [i, name] of NAMES.entries()) setting(name).value = before.fields[i];
  before = null;
  tab.open();
}

/**
 * Change a setting of this tab, as if it was typed.
 * @param {string} name
 * @param {string} value
 */
export function change(name, value) {
  [followed, isFollowing] = [null, false];
  setValue(setting(name), value);
  showTaken();
  void tab.open(true);
}

/** @param {Place} place */
function line(place) {
  const { path } = place, [smallest, largest = smallest] = place.span;
  /** @type {HTMLElement[]} */
  const name = [make("span", { className: place.folder ? "own" : "" }, place.folder || "The folder itself")];
  if (place.role) name.push(make("small", {}, "regularisation"));
  if (place.held)
    name.push(make("small", {}, say("{count} held out for validation", { count: place.held.toLocaleString("en") })));
  if (place.unused) name.push(make("small", {}, say("not used: {why}", { why: place.unused })));
  if (place.fixed && path)
    name.push(makeButton("Open", () => openAlone(path), { title: say("Open {path}", { path }) }));
  const numbers = [
    place.used.toLocaleString("en"), smallest === largest ? `${smallest}` : `${smallest} to ${largest}`,
    place.seen.toLocaleString("en"),
  ];
  return make("tr", {},
    make("th", { scope: "row" }, name),
    numbers.map((text) => make("td", {}, text)));
}

/** @param {Overview} found */
export function show({ places, count: training, fixed, problems }) {
  part(".sources").replaceChildren(
    ...(places.length
      ? [
          make("thead", {},
            make("tr", {},
              ["Folder", "Images", "Repeats", "Per epoch"].map((title) => make("th", { scope: "col" }, title)))),
          make("tbody", {}, places.map(line)),
        ]
      : []));
  /** @type {string[]} */
  const also = [];
  if (training.regularisation)
    also.push(
      say("{images} for regularisation, seen as often as the others.", {
        images: count(training.regularisation, "image"),
      }));
  if (training.validation)
    also.push(say("{images} used for validation.", { images: count(training.validation, "image") }));
  if (training.world > 1) also.push(say("{count} processes share the batches.", { count: training.world }));
  if (fixed) also.push(say("{why} to change them.", { why: fixed }));
  part(".also").replaceChildren(...also.map((text) => make("span", {}, text, " ")));
  part(".also").hidden = !also.length;
  part(".stops").hidden = !problems.length;
  part(".stops").replaceChildren(
    make("b", {}, "A training would not start:"),
    make("ul", {},
      problems.map((text) => make("li", {}, text))));
  part("[data-do=back]").hidden = !before;
}

/** The state that a reload of the page restores. */
export const state = () => ({ taken, before });

/** @param {ReturnType<typeof state> | null} restored */
export function restore(restored) {
  ({ taken, before } = restored ?? { taken: null, before: null });
  showTaken();
}

/**
 * @param {HTMLElement} element
 * @param {Tab} parentTab
 */
export function mount(element, parentTab) {
  [root, tab, taken, before, followed, isFollowing] = [element, parentTab, null, null, null, true];
  part(".how").addEventListener("change", (event) => {
    if (!hit(event, "[data-setting]") || !event.isTrusted) return;
    [followed, isFollowing] = [null, false]; // the form's values would replace it
    showTaken();
  });
  Object.assign(tab.actions, { take, give, forget, back });
}

// Before Gradio's own listener, which shows the tab.
document.addEventListener("click", (event) => hit(event, '[role="tab"], a, button') && noteForm(), true);
form.onSettled(noteForm);
