// Sample prompts as rows: loaded from the prompt file that the form names, and saved to it while the user types.
import { say } from "../i18n/sentences.js";
import { all, around, find, hit, isField, make, makeButton, setValue } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { countRequests, noteSubject } from "../server/late.js";
import { sentOf } from "./messages.js";
import * as inputs from "./inputs.js";
import { formAround, tabOf } from "./inputs.js";
import * as form from "./page.js";
import { store } from "./storage.js";
import { reveal } from "./shown.js";

/** @typedef {Record<string, string>} Row texts by field; `rest` is the rest of the line */
/**
 * @typedef {{ file: string | null, known: string, unsaved?: boolean, timer?: ReturnType<typeof setTimeout>,
 *   saving?: Promise<void>, again?: boolean, awaited?: Row[], begin: () => () => boolean,
 *   beginCaptions: () => () => boolean }} State
 * `known` is the file's content when it was last loaded or saved; null before any file was loaded. `awaited`: while
 * the file is loading, the rows that are to be shown with it */

const FILE = "sample_prompts", PAUSE = 600; // milliseconds without typing after which rows are saved
const NOTHING = "null"; // stored in place of rows that are saved
const WHEN = ["sample_every_n_epochs", "sample_every_n_steps"];
/** @type {WeakMap<Element, State>} */
const states = new WeakMap();

/**
 * @param {Element} box
 * @returns {State}
 */
function stateOf(box) {
  const state = states.get(box) ?? { file: null, known: "", begin: countRequests(), beginCaptions: countRequests() };
  states.set(box, state);
  return state;
}

/**
 * @param {Element} box
 * @param {string} text
 * @param {boolean} [wrong]
 */
function tell(box, text, wrong = false) {
  const line = find(box, ".file");
  line.textContent = text;
  line.classList.toggle("bad", wrong);
}

/**
 * @param {Element} box
 * @param {Row} row
 * @param {Element | null} [before] the item in front of which it comes; without one it is the last
 */
function add(box, row, before = null) {
  const template = find(box, "template", HTMLTemplateElement);
  const item = /** @type {HTMLElement} */ (document.importNode(find(template.content, "li"), true));
  const withoutField = { ...row }; // keep what has no field
  for (const field of all(item, "[data-prompt]").filter(isField)) {
    const name = field.dataset.prompt ?? "";
    setValue(field, row[name] ?? "");
    if (field.value) delete withoutField[name];
  }
  item.dataset.kept = JSON.stringify(withoutField);
  find(box, "ol").insertBefore(item, before);
  reveal(formAround(box), item);
  return item;
}

/** @param {HTMLElement} item */
function rowOf(item) {
  /** @type {Row} */
  const row = { prompt: "", ...JSON.parse(item.dataset.kept ?? "{}") };
  for (const field of all(item, "[data-prompt]").filter(isField))
    if (field.value.trim()) row[field.dataset.prompt ?? ""] = field.value.replace(/\s*\n\s*/g, " ").trim();
  return row;
}

/** @param {Element} box */
const items = (box) => all(find(box, "ol"), "li");

/**
 * Show the rows of the file that the form names now.
 * @param {Element} box
 * @param {string} file
 */
async function load(box, file) {
  const state = stateOf(box);
  clearTimeout(state.timer);
  find(box, "ol").replaceChildren();
  tell(box, "");
  /** @type {{ file: string, known: string, rows: Row[] } | null} */
  const stored = JSON.parse(store(key(box, file)) ?? NOTHING);
  const typed = stored?.file === file ? stored.rows : []; // from before a reload, not in a file yet
  const basis = typed.length ? stored?.known ?? "" : "";
  Object.assign(state, { file, known: basis, unsaved: false, awaited: typed });
  const isNewest = state.begin();
  const show = (/** @type {Row[]} */ rows, /** @type {Element[]} */ [first]) => {
    for (const row of rows) add(box, row, first);
  };
  try {
    /** @type {{ rows: Row[], known: string }} */
    const { rows, known: fileState } = file.trim() ? await ask("prompts", { file }) : { rows: [], known: "" };
    if (!isNewest()) return;
    const newItems = items(box); // typed meanwhile, and to stay as they are, with the focus
    const existing = new Set(rows.map((row) => row.prompt)), same = fileState === basis;
    if (!typed.length || !same) show(rows, newItems);
    show(typed.filter((row) => same || !existing.has(row.prompt)), newItems);
    Object.assign(state, { known: fileState, unsaved: false, awaited: undefined });
    if (typed.length || newItems.some((item) => rowOf(item).prompt)) soon(box);
  } catch (error) {
    if (!isNewest()) return;
    show(typed, items(box));
    state.awaited = undefined;
    tell(box, messageOf(error), true);
  }
}

/**
 * The storage key for rows that are not in their file yet: they wait for it while another one is chosen.
 * @param {Element} box
 * @param {string | null} file
 */
const key = (box, file) => `${tabOf(box)}-prompts${file ? ` ${file}` : ""}`;

/**
 * @param {Element} box
 * @param {State} state
 */
const keep = (box, state) =>
  void store(key(box, state.file), JSON.stringify({
    file: state.file, known: state.known, rows: [...(state.awaited ?? []), ...items(box).map(rowOf)],
  }));

/**
 * Save the rows after a pause in typing; until then they are in the browser's storage.
 * @param {Element} box
 * @param {number} [pause]
 */
function soon(box, pause = PAUSE) {
  const state = stateOf(box);
  clearTimeout(state.timer);
  state.unsaved = true;
  keep(box, state);
  state.timer = setTimeout(() => void save(box), pause);
}

/**
 * Save the rows to the file. While that is in progress, the next save waits.
 * @param {Element} box
 */
async function save(box) {
  const state = stateOf(box);
  if (state.awaited) return; // saved once its file is loaded
  if (state.saving) {
    state.again = true;
    return;
  }
  const rows = items(box).map(rowOf), field = inputs.fieldOf(formAround(box), FILE);
  if (!field || !rows.some((row) => row.prompt)) return;
  const { file } = state;
  state.unsaved = false;
  state.saving = write(box, state, field, rows);
  await state.saving;
  state.saving = undefined;
  if (!state.again || (state.file !== file && field.value !== state.file)) return;
  state.again = false;
  await save(box);
}

/**
 * @param {Element} box
 * @param {State} state
 * @param {inputs.Field} field
 * @param {Row[]} rows
 */
async function write(box, state, field, rows) {
  const tab = tabOf(box), { file, known: fileState } = state, isSameFile = noteSubject(() => state.file);
  const waiting = key(box, file), before = store(waiting);
  try {
    /** @type {{ file: string, known: string, said: string }} */
    const saved = await ask("prompts_save", { tab, sent: sentOf(tab), file, known: fileState, rows });
    if (isSameFile() || store(waiting) === before) store(waiting, NOTHING); // unless more was typed before the choice
    if (!isSameFile()) return; // another one was chosen meanwhile
    Object.assign(state, { file: saved.file, known: saved.known });
    if (state.unsaved) keep(box, state); // what was typed meanwhile belongs to this version of the file
    tell(box, saved.said + (field.value ? "" : sampleAfterEpochs(box)));
    if (field.value === saved.file) return;
    setValue(field, saved.file);
    form.settle(formAround(box));
  } catch (error) {
    state.unsaved = true;
    tell(box, messageOf(error), true);
  }
}

/**
 * Sample after each epoch if no other option sets a time, so that prompts are not silently unused.
 * @param {Element} box
 */
function sampleAfterEpochs(box) {
  const fields = WHEN.map((name) => inputs.fieldOf(formAround(box), name));
  if (!fields[0] || fields.some((field) => field?.value)) return "";
  setValue(fields[0], "1");
  return ` ${say("They are generated after each epoch.", {})}`;
}

/** @param {Element} box */
async function propose(box) {
  const list = find(box, ".captions"), tab = tabOf(box), isNewest = stateOf(box).beginCaptions();
  try {
    /** @type {{ captions: Row[] }} */
    const { captions } = await ask("prompts_captions", { tab, sent: sentOf(tab) });
    if (!isNewest()) return;
    list.replaceChildren(...captions.map((row) => {
      const take = makeButton("", () => {
        add(box, row);
        take.parentElement?.remove();
        list.hidden = !list.children.length;
        soon(box);
      });
      take.append(make("span", { className: "own" }, row.prompt), make("small", {}, `${row.width} × ${row.height}`));
      return make("li", {}, take);
    }));
    list.hidden = false;
    tell(box, "");
  } catch (error) {
    if (!isNewest()) return;
    list.hidden = true;
    tell(box, messageOf(error), true);
  }
}

/**
 * @param {Element} box
 * @param {HTMLElement} button
 */
function act(box, button) {
  const item = button.closest("li");
  if (button.dataset.row === "add") find(add(box, {}), "textarea").focus();
  else if (button.dataset.row === "captions") void propose(box);
  else if (button.dataset.row === "copy" && item) {
    find(add(box, rowOf(item), item.nextElementSibling), "textarea").focus();
    soon(box);
  } else if (item) {
    item.remove();
    if (items(box).some((other) => rowOf(other).prompt)) soon(box);
    else if (!stateOf(box).awaited) forget(box); // the file may hold others
  }
}

/**
 * Without rows there are no samples: keep the file, but remove its name from the form.
 * @param {Element} box
 */
function forget(box) {
  const field = inputs.fieldOf(formAround(box), FILE), state = stateOf(box), { file } = state;
  clearTimeout(state.timer);
  state.begin();
  Object.assign(state, { file: "", known: "", unsaved: false, awaited: undefined });
  store(key(box, file), NOTHING);
  if (!field?.value) return;
  setValue(field, "");
  form.settle(formAround(box));
  const fromCaptions = Number(inputs.fieldOf(formAround(box), "sample_from_captions")?.value) > 0;
  tell(box, fromCaptions ? say("Samples are generated from captions. The file is kept: {path}", { path: file ?? "" })
    : say("No samples are generated. The file is kept: {path}", { path: file ?? "" }));
}

document.addEventListener("click", (event) => {
  const button = hit(event, ".prompts button[data-row]");
  if (button) act(around(button, ".prompts"), button);
});
document.addEventListener("input", ({ target }) => {
  const field = target instanceof Element ? target.closest(".prompts [data-prompt]") : null;
  if (field) soon(around(field, ".prompts"));
});
document.addEventListener("change", ({ target }) => { // saved before Train can be pressed
  const field = target instanceof Element ? target.closest(".prompts [data-prompt]") : null;
  if (field) soon(around(field, ".prompts"), 0);
});
document.addEventListener("kohya:prompts", (event) => { // from a loaded config: saved like typed ones
  const { where, prompts } = /** @type {CustomEvent<{ where: HTMLFormElement, prompts: Row[] }>} */ (event).detail;
  for (const box of all(where, ".prompts")) {
    store(key(box, ""), JSON.stringify({ file: "", known: "", rows: prompts }));
    void load(box, "");
  }
});
form.onSettled((where) => {
  for (const box of all(where, ".prompts")) {
    const file = inputs.fieldOf(formAround(box), FILE)?.value ?? "", state = stateOf(box);
    if (file !== state.file) void load(box, file);
    else if (state.unsaved) soon(box); // the cause of the failed save may be gone
  }
});
