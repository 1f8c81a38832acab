// Undo and Redo: the buttons, the keys, and the messages.
import { say } from "../i18n/sentences.js";
import { inEnglish } from "../i18n/words.js";
import { all, around, find, isBox, isField, make } from "../server/elements.js";
import { step, type } from "./history.js";
import { families, isFor, tabOf } from "./inputs.js";
import { englishLabel, wordOf } from "./labels.js";
import { tell } from "./messages.js";
import * as form from "./page.js";
import { source } from "./storage.js";

/** @typedef {import("./inputs.js").Field} Field */
/** @typedef {import("./page.js").Copy} Copy */

// Fields whose changes are undone.
const SETTINGS = "[data-option], [data-launch], [data-argument], .kinds, [name=family]";
const NAMED = 3; // maximum settings named in a message

/**
 * Describe the changes in a form.
 * @param {HTMLFormElement} where
 * @param {Copy} before
 * @param {Copy} after
 */
function sentencesOf(where, before, after) {
  const old = new Map(before.kept);
  const changed = after.kept
    .filter(([id, value]) => old.get(id) !== value)
    .map(([id]) => document.getElementById(id))
    .filter((field) => isField(field) && isFor(/** @type {Field} */ (field), after.family));
  if (before.family !== after.family) {
    const radio = families(where).find(({ value }) => value === after.family);
    const title = radio?.nextElementSibling;
    return [say("{label}: {value} again", { label: "Model family", value: (title && inEnglish(title)) ?? "" })];
  }
  if (!changed.length || changed.length > NAMED) return ["The form is as it was before."];
  return /** @type {Field[]} */ (changed).map((field) => {
    const value = isBox(field) ? String(field.checked) : field.value.trim();
    return say("{label}: {value} again", {
      label: englishLabel(field), value: value ? wordOf(field, value) : "not set",
    });
  });
}

/**
 * Undo the last change, or redo the last undone one, and report the restored settings.
 * @param {string} tab
 * @param {"done" | "undone"} from
 */
export function takeStep(tab, from) {
  const where = form.formOf(tab), training = around(where, ".training");
  const before = form.copyOf(where), { opened = "" } = training.dataset;
  const file = { opened, source: source(tab) };
  const target = step(form.historyOf(where), from, (copy) => ("opened" in copy ? { ...before, ...file } : before));
  form.nextTurn(tab);
  if (target) form.restore(where, target);
  if (target?.opened !== undefined) { // otherwise Save would overwrite another config
    training.dataset.opened = target.opened;
    source(tab, target.source ?? "");
    find(training, ".begin .path", HTMLInputElement).value = target.opened.split("\n")[0];
  }
  const nothing = from === "done" ? "There is nothing to undo." : "There is nothing to redo.";
  const sentences = target ? sentencesOf(where, before, target) : [nothing];
  tell(tab, "plain", ...sentences.map((sentence) => make("p", {}, sentence)));
  showButtons(where);
}

/** @param {HTMLFormElement} where */
function showButtons(where) {
  const { done, undone } = form.historyOf(where), row = around(where, ".training").querySelector(".bar > .row");
  row?.querySelector(".undo")?.setAttribute("aria-disabled", String(!done.length));
  row?.querySelector(".redo")?.setAttribute("aria-disabled", String(!undone.length));
}

form.onSettled(showButtons);

// Before the form's own listener, which remembers the form as it is after the change.
document.addEventListener("input", ({ target }) => {
  if (!isField(target) || !target.form?.matches("form.settings") || !target.matches(SETTINGS)) return;
  type(form.historyOf(target.form), target.id || target.name || target.className, form.latestOf(target.form));
}, true);
document.addEventListener("change", ({ target }) => {
  if (isField(target) && target.form?.matches("form.settings")) form.historyOf(target.form).typing = "";
});

/** @param {EventTarget | null} target */
const isTyped = (target) =>
  target instanceof HTMLTextAreaElement ||
  (target instanceof HTMLInputElement && !["checkbox", "radio", "button", "file"].includes(target.type)) ||
  (target instanceof HTMLElement && target.isContentEditable);

document.addEventListener("keydown", (event) => {
  const key = event.key.toLowerCase();
  if (!(event.ctrlKey || event.metaKey) || event.altKey || !["z", "y"].includes(key)) return;
  // Text fields have the browser's own undo.
  if (isTyped(event.target) || document.querySelector("dialog[open]")) return;
  const where = all(document, "form.settings", HTMLFormElement).find((shown) => shown.checkVisibility());
  if (!where || event.defaultPrevented) return;
  event.preventDefault();
  takeStep(tabOf(where), key === "y" || event.shiftKey ? "undone" : "done");
});
