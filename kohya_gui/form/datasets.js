// The images of a training as rows, one for each folder that the form or its dataset file names, counted as a training
// counts them. Edits are saved to a dataset file.
import { say } from "../i18n/sentences.js";
import { all, around, find, hit, make, setValue, withAllowButton } from "../server/elements.js";
import { addressOf, go } from "../server/addresses.js";
import { ask, messageOf } from "../server/http.js";
import { countRequests } from "../server/late.js";
import { groupOf, groupsOf, rowOf, showCount, textsOf } from "./datasets_rows.js";
import { sentOf } from "./messages.js";
import * as inputs from "./inputs.js";
import { formAround, tabOf } from "./inputs.js";
import * as form from "./page.js";
import { store } from "./storage.js";

/** @typedef {import("./datasets_rows.js").Texts} Texts */
/** @typedef {import("./datasets_rows.js").Group} Group */
/** @typedef {{ groups: Group[], file: string, known: string, flat?: boolean, problems: string[] }} Listing */
/**
 * @typedef {{ listing: Listing, watched?: string, named?: string, begin: () => () => boolean,
 *   timer?: ReturnType<typeof setTimeout>, refreshTimer?: ReturnType<typeof setTimeout>, unsaved?: boolean,
 *   saving?: boolean, keepsMessage?: boolean, isSending?: boolean,
 *   sending?: import("../server/uploads.js").Sending }} State
 * `keepsMessage`: keep the message at the next change of the form, which is ours */

const PAUSE = 700; // milliseconds without typing after which rows are saved
const FILE = "dataset_config", FOLDER = "train_data_dir", REPEATS = "dataset_repeats";
const REPLACED = [FOLDER, "reg_data_dir", "in_json"]; // options that a dataset file replaces
/** @type {Listing} */
const NOTHING = { groups: [], file: "", known: "", problems: [] };
/** @type {WeakMap<Element, State>} */
const states = new WeakMap();

/**
 * @param {Element} box
 * @returns {State}
 */
export function stateOf(box) {
  const state = states.get(box) ?? { listing: NOTHING, begin: countRequests() };
  states.set(box, state);
  return state;
}

/**
 * @param {Element} box
 * @param {string} name
 */
export const valueOf = (box, name) => String(inputs.fieldOf(formAround(box), name)?.value ?? "").trim();

/**
 * Put values into the form, as one change that can be undone.
 * @param {Element} box
 * @param {Texts} values
 */
export function choose(box, values) {
  const where = formAround(box);
  form.remember(where);
  stateOf(box).keepsMessage = true;
  for (const [name, value] of Object.entries(values)) {
    const field = inputs.fieldOf(formAround(box), name);
    if (field) setValue(field, value);
  }
  form.settle(where);
}

/**
 * @param {Element} box
 * @param {string} text
 * @param {string} [wrong] what also went wrong
 * @param {boolean} [below] what is shown already
 */
export function showMessage(box, text, wrong = "", below = false) {
  const lines = (/** @type {string} */ each, className = "") =>
    each
      .split("\n")
      .filter(Boolean)
      .map((line) => make("span", { className }, ...withAllowButton(line)));
  const place = find(box, ".file");
  if (!below) place.replaceChildren();
  place.append(...lines(text), ...lines(wrong, "bad"));
}

// ---- showing

/**
 * Load what the form names now: first the folders, then how a training would count their images.
 * @param {Element} box
 */
export async function refresh(box) {
  const state = stateOf(box), tab = tabOf(box), isNewest = state.begin();
  const question = { tab, sent: sentOf(tab) };
  try {
    const isNamed = [FILE, ...REPLACED].some((name) => valueOf(box, name));
    /** @type {Listing} */
    const newListing = isNamed ? await ask("datasets", question) : NOTHING;
    if (!isNewest() || state.unsaved) return;
    const isOther = newListing.file !== state.listing.file;
    state.listing = newListing;
    if (restore(box)) return void showCount(box, null);
    show(box);
    if (newListing.problems.length) showMessage(box, "", newListing.problems.join("\n"));
    else if (isOther)
      showMessage(box, newListing.file && say("The images are described in {file}.", { file: newListing.file }));
    if (!newListing.groups.length || newListing.problems.length) return void showCount(box, null);
    const counted = await ask("datasets_count", question);
    if (isNewest()) showCount(box, counted);
  } catch (error) {
    if (!isNewest()) return;
    showCount(box, null);
    showMessage(box, "", messageOf(error));
  }
}

/**
 * Rebuild the rows, and keep the focus in its field.
 * @param {Element} box
 * @param {Group[]} [groups]
 */
function show(box, groups = stateOf(box).listing.groups) {
  const focus = document.activeElement, fields = all(box, "[data-set]");
  const at = focus instanceof HTMLElement ? fields.indexOf(focus) : -1;
  const open = all(box, "details", HTMLDetailsElement).map((details) => details.open);
  find(box, ".groups").replaceChildren(...groups.map((group, number) => groupOf(box, group, number, groups.length)));
  for (const [i, details] of all(box, "details", HTMLDetailsElement).entries()) details.open = open[i] ?? false;
  find(box, "[data-row=add-set]").hidden = !groups.length;
  box.classList.toggle("empty", !groups.length);
  box.classList.toggle("of-file", Boolean(stateOf(box).listing.file));
  if (at >= 0) all(box, "[data-set]")[at]?.focus();
}

// ---- changing

/**
 * The storage key for rows that are not saved anywhere else yet.
 * @param {Element} box
 */
const key = (box) => `${tabOf(box)}-datasets`;

/**
 * Restore rows that could not be saved before a reload: all of them, or, if the file has changed since, those whose
 * folders are not in it. Returns false if there are none.
 * @param {Element} box
 */
function restore(box) {
  const { named, listing } = stateOf(box);
  /** @type {{ named: string, known: string, groups: Group[] } | null} */
  const stored = JSON.parse(store(key(box)) ?? "null");
  if (!stored || stored.named !== named) return false;
  const added = stored.groups
    .map((group) => ({ ...group, rows: group.rows.filter(({ at }) => at === null) }))
    .filter(({ rows }) => rows.length);
  if (stored.known !== listing.known && !added.length) return false;
  const groups = stored.known === listing.known
    ? stored.groups
    : [...listing.groups, ...added.map((group) => ({ ...group, at: null }))];
  show(
    box,
    groups.map((group) => {
      const saved = listing.groups.find(({ at }) => at !== null && at === group.at);
      return {
        ...saved,
        ...group,
        rows: group.rows.map((row) => ({ ...saved?.rows.find(({ at }) => at === row.at), ...row })),
      };
    }));
  saveSoon(box, 0);
  return true;
}

/**
 * Save the rows after a pause in typing; until then they are in the browser's storage.
 * @param {Element} box
 * @param {number} [pause]
 */
function saveSoon(box, pause = PAUSE) {
  const state = stateOf(box);
  clearTimeout(state.timer);
  state.unsaved = true;
  store(key(box), JSON.stringify({ named: state.named, known: state.listing.known, groups: groupsOf(box) }));
  state.timer = setTimeout(() => void save(box), pause);
}

/** @param {Element} box */
export async function save(box) {
  const state = stateOf(box);
  if (state.saving) return saveSoon(box);
  clearTimeout(state.timer); // a delayed save would clear the message that follows this one
  state.unsaved = false;
  const groups = groupsOf(box), values = asFormValues(box, groups);
  if (values) {
    store(key(box), "null");
    return choose(box, values);
  }
  const tab = tabOf(box), { file, known } = state.listing;
  state.saving = true;
  try {
    /** @type {{ file: string, known: string, said: string }} */
    const saved = await ask("datasets_save", { tab, sent: sentOf(tab), file, known, groups });
    showMessage(box, saved.said);
    state.listing = { ...state.listing, file: saved.file, known: saved.known };
    if (state.unsaved) return saveSoon(box); // the stored rows now belong to this version of the file
    store(key(box), "null");
    if (file) await refresh(box);
    else choose(box, { [FILE]: saved.file, ...Object.fromEntries(REPLACED.map((name) => [name, ""])) });
  } catch (error) {
    showMessage(box, "", messageOf(error));
    state.unsaved = true; // do not overwrite the rows before they are saved
  } finally {
    state.saving = false;
  }
}

/**
 * The form's own values that mean the same as the rows, if a single folder needs no dataset file.
 * @param {Element} box
 * @param {Group[]} groups
 * @returns {Texts | null}
 */
function asFormValues(box, groups) {
  const { file, flat, groups: before } = stateOf(box).listing;
  const rows = groups.flatMap((group) => group.rows);
  if (!rows.length) return { [FILE]: "", ...Object.fromEntries(REPLACED.map((name) => [name, ""])) };
  if (file || rows.length > 1 || Object.keys(groups[0].texts).length) return null;
  const { image_dir: folder, num_repeats: repeats, ...otherTexts } = rows[0].texts;
  const plain = Object.keys(otherTexts).length === 0;
  if (!before.length && plain) return { [FOLDER]: folder, ...(repeats ? { [REPEATS]: repeats } : {}) };
  return flat && plain ? { [FOLDER]: folder, [REPEATS]: repeats || "1" } : null;
}

/**
 * Append a row, or a new data set with its own resolution.
 * @param {Element} box
 * @param {string} folder
 * @param {boolean} [apart]
 */
export function add(box, folder, apart = false) {
  const groups = all(box, ".groups > .group"), list = find(box, ".groups");
  if (apart || !groups.length) {
    list.append(groupOf(box, { at: null, texts: {}, rows: [] }, groups.length, groups.length + 1));
    const group = /** @type {HTMLElement} */ (list.lastElementChild);
    find(group, ".of-set").hidden = !apart;
    find(group, ".of-set", HTMLDetailsElement).open = apart;
  }
  const row = rowOf(box, { at: null, texts: { image_dir: folder } });
  find(/** @type {HTMLElement} */ (list.lastElementChild), "ol").append(row);
  box.classList.remove("empty");
  return row;
}

// ---- events

/**
 * @param {Element} box
 * @param {HTMLElement} button
 */
function press(box, button) {
  const row = button.closest("li"), { row: what } = button.dataset;
  if (what === "add" || what === "add-set") find(add(box, "", what === "add-set"), "[data-set=image_dir]").focus();
  else if (what === "captions" && row) {
    const { image_dir: folder } = textsOf(row);
    if (folder) void go(addressOf("data", folder));
    else find(row, "[data-set=image_dir]").focus();
  } else if (what === "remove" && row) {
    row.remove();
    if (stateOf(box).listing.groups.length || groupsOf(box).length) saveSoon(box, 0);
    else show(box);
  }
}

document.addEventListener("click", (event) => {
  const button = hit(event, ".datasets button[data-row]");
  if (button) press(around(button, ".datasets"), button);
});
for (const type of ["input", "change"]) {
  document.addEventListener(type, ({ target }) => {
    const field = target instanceof Element ? target.closest(".datasets [data-set]") : null;
    if (field && (type === "change" || !field.closest(".wide")))
      saveSoon(around(field, ".datasets"), type === "input" ? PAUSE : 0); // wait for the whole path
  });
}
form.onSettled((where) => {
  for (const box of all(where, ".datasets")) {
    const state = stateOf(box), held = form.held(where), names = (box.dataset.options ?? "").split(" ");
    const watched = JSON.stringify([held.family, held.launch.num_processes, names.map((name) => held.values[name])]);
    if (watched === state.watched) continue;
    if (state.watched && !state.keepsMessage) showMessage(box, "");
    const named = JSON.stringify([FILE, ...REPLACED].map((name) => held.values[name]));
    if (named !== state.named) { // other images: unsaved rows do not belong to them
      clearTimeout(state.timer);
      state.unsaved = false;
      if (state.named) store(key(box), "null");
    }
    Object.assign(state, { watched, named, keepsMessage: false });
    clearTimeout(state.refreshTimer);
    if (!state.unsaved) state.refreshTimer = setTimeout(() => void refresh(box), 300);
  }
});
