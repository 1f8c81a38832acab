// The tab Try it: starts a job with the form's values, and shows its images in rows and columns.
import { read, sentOf } from "../form/messages.js";
import { all, around, find, finder, hit, isField, make, showMessage } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { keepOrder, noteSubject } from "../server/late.js";
import { goneNote } from "../runs/viewer.js";
import { mount as mountComparing } from "./comparing.js";
import { go } from "../server/addresses.js";
import { grow, valueToSend, watcher } from "../tools/commands.js";
import { promptStrips } from "./strips.js";
import { keepWritten, writtenFor } from "./written.js";

/** @typedef {import("./strips.js").SampleImage} SampleImage */
/** @typedef {{ columns: string[], rows: string[], cells: (SampleImage | null)[][], folder: string }} Sheet */
/** @typedef {[name: string, title: string]} Choice */

// Fields that only some models use.
const OF_MODELS = ["control_image_path", "control_image_mask_path", "controlnet_image", "guidance_scale"];
const TAB = "tab:", RUN = "run:", JOB = "job:";
/** @type {HTMLElement | undefined} */
let place;
let nextSheet = ""; // the sheet to show, once it exists
let followed = ""; // the newest job whose images are shown as they arrive, also one from before the page was loaded
let isStale = false; // whether a form has changed since its fields were shown
let runFromPanel = ""; // the run chosen in the panel
/** @type {((begun?: string) => void) | undefined} */
let look;
/** @type {Promise<void> | undefined} until it is known what can be chosen */
let started;
const beginSheet = keepOrder();

const part = finder(() => place ?? document);
const model = () => part("#sampling-model", HTMLSelectElement);
const sheets = () => part("#sampling-sheet", HTMLSelectElement);
const ofPrompts = () =>
  [part("#sampling-prompts", HTMLTextAreaElement), ...all(part("form"), "[data-prompt]").filter(isField)];
const text = (/** @type {string} */ id) => /** @type {HTMLInputElement} */ (part(`#sampling-${id}`)).value;

/** @param {Element} element */
export function mount(element) {
  place = find(element, ".sampling");
  const watch = watcher(
    part(".jobs"),
    "sample",
    (job) => void refresh(JOB + job.id),
    (job) => void follow(job.id));
  look = watch;
  part("form").addEventListener("submit", (event) => event.preventDefault());
  part("form").addEventListener("input", (event) => {
    const list = hit(event, ".files");
    if (list) grow(list);
    if (isField(event.target) && ofPrompts().includes(event.target)) keepWritten(model().value, [event.target]);
  });
  for (const type of ["pointerenter", "focusin"])
    part("form").addEventListener(type, () => void (isStale && model().value.startsWith(TAB) && showTaken()));
  part("#sampling-compare").addEventListener("change", settle);
  model().addEventListener("change", () => void chooseModel());
  sheets().addEventListener("change", () => void renderSheet(sheets().value));
  part(".epochs").addEventListener("click", () => void fillEpochs());
  part(".go", HTMLButtonElement).addEventListener("click", () => void begin());
  started = start();
  watch();
  mountComparing(element);
}

/**
 * Show a job's images from the first one on, until the user chooses others.
 * @param {string} job
 */
async function follow(job) {
  if (followed !== job) nextSheet = JOB + job;
  followed = job;
  await renderSheet(JOB + job);
}

/** Fill in the run chosen in the panel, if there is one. */
async function start() {
  const run = runFromPanel;
  runFromPanel = "";
  await refresh(run);
  if (!run) {
    const written = writtenFor(model().value);
    for (const field of ofPrompts()) if (written[field.id]) propose(field, written[field.id]);
    return void (await showTaken());
  }
  model().value = run;
  await chooseModel();
}

/**
 * Reload the choices, and keep the current ones.
 * @param {string} [show] the sheet to show
 */
async function refresh(show = "") {
  try {
    /** @type {{ models: Choice[], sheets: Choice[] }} */
    const offered = await ask("sampling_choices");
    for (const [list, choices] of /** @type {[HTMLSelectElement, Choice[]][]} */ ([
      [model(), offered.models], [sheets(), offered.sheets],
    ])) {
      const before = list.value;
      list.replaceChildren(...choices.map(([value, title]) => make("option", { value }, title)));
      if (choices.some(([value]) => value === before)) list.value = before;
    }
    part(".board").hidden = !offered.sheets.length;
    if (show && offered.sheets.some(([value]) => value === show)) sheets().value = show;
    if (offered.sheets.length) await renderSheet(sheets().value);
    settle();
  } catch (error) {
    showMessage(part(".said-of"), "bad", messageOf(error));
  }
}

/** Show fields about a run only if one is chosen, and strengths only if they are compared. */
function settle() {
  part(".epochs").hidden = !model().value.startsWith(RUN);
  around(part("#sampling-strengths"), ".field").hidden = text("compare") !== "strengths";
}

/**
 * Fill in the newest file of the run, and the prompts of the run or form with their size, steps and scales, where
 * nobody has written others, now or the last time with this model.
 */
async function chooseModel() {
  settle();
  const chosen = model().value, isChosen = noteSubject(() => model().value);
  const { files, prompts, fields } = await showTaken(), list = part(".files");
  if (!isChosen()) return;
  propose(all(list, "input", HTMLInputElement)[0], files.at(-1) ?? "");
  for (const row of all(list, ".file").slice(1)) if (!find(row, "input", HTMLInputElement).value) row.remove();
  grow(list);
  const written = writtenFor(chosen);
  for (const field of ofPrompts()) {
    const { prompt } = field.dataset;
    propose(field, written[field.id] ?? (prompt ? fields[prompt] ?? "" : prompts.join("\n")));
  }
}

/**
 * Show the fields that the chosen model uses. Returns further facts about it.
 * @returns {Promise<Known>}
 */
async function showTaken() {
  isStale = false;
  const isChosen = noteSubject(() => model().value), known = await (model().value.startsWith(RUN) ? ofRun() : ofForm());
  if (isChosen() && known.takes)
    for (const name of OF_MODELS)
      around(part(`#sampling-${name}`), ".field").hidden = !known.takes.includes(name);
  return known;
}

/**
 * Fill in a field that is empty or unchanged since the last filling.
 * @param {import("../server/elements.js").Field} field
 * @param {string} value
 */
function propose(field, value) {
  if (field.value.trim() && field.value !== field.dataset.proposed) return;
  field.value = value;
  field.dataset.proposed = value;
}

/**
 * @typedef {{ files: string[], prompts: string[], fields: Record<string, string>, takes?: string[] }} Known of a run or
 *   a form
 */

/** @returns {Promise<Known>} */
const ofRun = () => valuesFrom("sampling_run", { run: model().value.slice(RUN.length) });

/** @returns {Promise<Known>} */
const ofForm = () => {
  const tab = model().value.slice(TAB.length);
  return valuesFrom("sampling_form", { tab, form: sentOf(tab) });
};

/**
 * @param {string} what
 * @param {Record<string, string>} sent
 * @returns {Promise<Known>}
 */
async function valuesFrom(what, sent) {
  const isChosen = noteSubject(() => model().value);
  try {
    return await ask(what, sent);
  } catch (error) {
    if (isChosen()) showMessage(part(".said-of"), "bad", messageOf(error));
    return { files: [], prompts: [], fields: {} };
  }
}

/** Fill in every file that the run has saved, and compare them. */
async function fillEpochs() {
  const isChosen = noteSubject(() => model().value), { files } = await ofRun(), list = part(".files");
  if (!isChosen()) return;
  for (const row of all(list, ".file").slice(1)) row.remove();
  all(list, "input", HTMLInputElement)[0].value = "";
  for (const file of files) {
    const last = all(list, ".file").at(-1);
    if (last) find(last, "input", HTMLInputElement).value = file;
    grow(list);
  }
  if (files.length > 1) part("#sampling-compare", HTMLSelectElement).value = "files";
  settle();
  showMessage(part(".said-of"), files.length ? "" : "bad", files.length ? "" : "This run has saved no file yet.");
}

async function begin() {
  const go = part(".go", HTMLButtonElement);
  go.disabled = true;
  await started;
  const chosen = model().value;
  keepWritten(chosen, ofPrompts().filter((field) => field.value !== (field.dataset.proposed ?? "")));
  const fields = Object.fromEntries(
    all(part("form"), "[data-prompt]")
      .filter((field) => isField(field) && !around(field, ".field").hidden)
      .map((field) => [field.dataset.prompt, isField(field) ? field.value : ""]));
  try {
    const { job } = await ask("sampling_begin", {
      model: chosen,
      form: chosen.startsWith(TAB) ? read(chosen.slice(TAB.length)) : "",
      fields,
      prompts: text("prompts"),
      loras: String(valueToSend(part(".files")))
        .split("\n")
        .filter(Boolean),
      compare: text("compare"),
      ...(text("compare") === "strengths" ? { strengths: text("strengths") } : {}),
      folder: text("folder"),
    });
    showMessage(part(".said-of"), "good", "");
    look?.(job.id);
  } catch (error) {
    showMessage(part(".said-of"), "bad", messageOf(error));
  }
  go.disabled = false;
}

/**
 * Show a sheet.
 * @param {string} name
 */
async function renderSheet(name) {
  const take = beginSheet();
  try {
    /** @type {Sheet} */
    const { columns, rows, cells, folder } = await ask("sampling_sheet", { name });
    const isShown = sheets().value === name;
    if ((!isShown && (nextSheet !== name || !cells.length)) || !take()) return;
    if (!isShown) {
      nextSheet = ""; // it is listed once it has its first images
      return void (await refresh(name));
    }
    part(".board").hidden = false;
    part(".where").textContent = folder;
    const isEmpty = !cells.flat().some(Boolean); // they were deleted
    part(".pictures").replaceChildren(...isEmpty ? [goneNote()] :
      promptStrips(columns, rows, cells, "strip").map((row) => make("div", { className: "row-of" }, ...row)));
  } catch (error) {
    if (take()) showMessage(part(".said-of"), "bad", messageOf(error));
  }
}

document.addEventListener("kohya:settled", () => {
  isStale = true;
});
document.addEventListener("click", (event) => {
  const button = hit(event, "[data-try]");
  if (!button) return;
  runFromPanel = RUN + button.dataset.try;
  void go("try");
  if (place?.isConnected) void start(); // otherwise the tab is being built for the first time
});
