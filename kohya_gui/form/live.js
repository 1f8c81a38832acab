// Around the form: checks while the user types, presets, fixes, and keys of other services.
import { say } from "../i18n/sentences.js";
import { inEnglish, translated } from "../i18n/words.js";
import { all, around, find, hit, make, withAllowButton } from "../server/elements.js";
import { ask } from "../server/http.js";
import { countRequests } from "../server/late.js";
import { pick } from "../server/picker.js";
import { go } from "../server/addresses.js";
import { makeCaches } from "./caches.js";
import { compare, table } from "./compare.js";
import { sentOf, tell, tellError } from "./messages.js";
import * as inputs from "./inputs.js";
import { tabOf } from "./inputs.js";
import * as form from "./page.js";
import { probe } from "./probe.js";
import { editText } from "./text_editor.js";
import { takeStep } from "./undo.js";
import { chosenPurpose } from "./recipes.js";
import { MODEL, recognise } from "./recognition.js";
import { several } from "./several.js";
import { onOpened } from "./tab.js";

/** @typedef {import("./inputs.js").Field} Field */
/** @typedef {import("./recognition.js").Model} Model */
/**
 * @typedef {{ wrong: Record<string, string>, ineffective: Record<string, string>, outlook: string, kept: string[],
 *   model: Model, profile: string, chosen: string, adapter: import("./adapter.js").Adapter | null }} Judgement
 * `wrong` and `ineffective` have a sentence by field id, `kept` the ids of fields whose key is stored; `chosen` is the
 * base model, if all of its parts are there */

// ---- while the user types

/** @type {Record<string, ReturnType<typeof setTimeout>>} */
const timers = {};
/** @type {Record<string, ReturnType<typeof countRequests>>} begins a request for each form */
const begin = {};

/** @type {Set<string>} tabs whose forms have changed while hidden: checked when opened */
const later = new Set();

form.onSettled((where) => {
  const tab = tabOf(where);
  clearTimeout(timers[tab]);
  timers[tab] = setTimeout(() => (where.checkVisibility() ? judge(tab) : later.add(tab)), 250);
});
onOpened((where) => {
  const tab = tabOf(where);
  if (later.delete(tab)) judge(tab);
});

/** The option whose field is being typed in: an incomplete path is no mistake there. */
function typedOption() {
  const field = document.activeElement;
  return field instanceof HTMLElement && field.dataset.dirty === "true" ? field.dataset.option : "";
}

/** @param {string} tab */
async function judge(tab) {
  begin[tab] ??= countRequests();
  const isNewest = begin[tab]();
  try {
    const sent = sentOf(tab), typing = typedOption(), judgement = await ask("judge", { tab, sent, typing });
    if (!isNewest() || sent !== sentOf(tab)) return; // a newer request follows
    show(form.formOf(tab), judgement);
    document.dispatchEvent(
      new CustomEvent("kohya:judged", {
        detail: { where: form.formOf(tab), adapter: judgement.adapter, chosen: judgement.chosen },
      }));
  } catch {} // the user's next action reports a missing server
}

/**
 * @param {HTMLFormElement} where
 * @param {Judgement} judgement
 */
function show(where, judgement) {
  const name = inputs.family(where);
  for (const field of inputs.fields(where)) {
    if (!inputs.isFor(field, name)) continue;
    const wrong = judgement.wrong[field.id] ?? "", reason = judgement.ineffective[field.id] ?? "";
    const isModel = field.dataset.option === MODEL && judgement.model.path === field.value;
    explain(
      field,
      wrong || (isModel && say("The file is {kind}.", { kind: judgement.model.words ?? "" })) || "",
      !wrong && reason ? say("No effect: {reason}", { reason }) : "");
    const box = around(field, ".field");
    box.classList.toggle("wrong", Boolean(wrong));
    box.classList.toggle("ineffective", Boolean(reason) && !wrong);
    if (wrong) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
    if (field instanceof HTMLInputElement && field.type === "password")
      showKey(field, judgement.kept.includes(field.id));
  }
  for (const card of all(where, ".profile"))
    card.setAttribute("aria-pressed", String(card.dataset.preset === judgement.profile));
  const outlook = where.querySelector(".outlook");
  if (outlook && outlook.textContent !== judgement.outlook) outlook.textContent = judgement.outlook;
  recognise(where, judgement.model);
}

/**
 * Show below a field its help, or a text `instead` of it, and then why the field has no effect at the moment.
 * @param {Field} field
 * @param {string} instead
 * @param {string} reason
 */
function explain(field, instead, reason) {
  const help = find(document, `#${CSS.escape(field.id)}-help`);
  const helpText = help.dataset.help ?? inEnglish(help);
  help.dataset.help = helpText;
  const text = instead || helpText, now = `${text}\n${reason}`;
  if ((help.dataset.now ?? `${helpText}\n`) === now) return;
  help.dataset.now = now;
  help.replaceChildren(...withAllowButton(text), ...(reason ? [make("em", {}, reason)] : []));
}

/** Show what the running training has compiled, while these settings are visible. */
setInterval(async () => {
  const line = all(document, ".compiling .compile-log").find((log) => log.parentElement?.checkVisibility());
  const works = document.querySelector(".run:is([data-state=starting], [data-state=running], [data-state=stopping])");
  if (!line || (!works && line.hidden) || line.parentElement?.closest("[hidden]")) return;
  try {
    const { text } = works ? await ask("compile_log") : { text: "" };
    if (line.textContent !== text) line.textContent = text;
    line.hidden = !text;
  } catch {} // the next request may succeed
}, 3000);

document.addEventListener("kohya:allowed", ({ target }) => {
  if (target instanceof Element && target.closest("form.settings"))
    form.settle(/** @type {HTMLFormElement} */ (around(target, "form.settings")));
});
// A path is complete once its field loses the focus.
document.addEventListener("input", ({ target }) => {
  if (target instanceof HTMLElement && target.dataset.option) target.dataset.dirty = "true";
});
document.addEventListener("change", ({ target }) => {
  if (!(target instanceof HTMLElement) || !target.dataset.option || !target.closest("form.settings")) return;
  delete target.dataset.dirty;
  judge(tabOf(target));
});

/**
 * Show in a key's field whether a key is stored, with a button that deletes it.
 * @param {HTMLInputElement} field
 * @param {boolean} isKept
 */
function showKey(field, isKept) {
  const box = around(field, ".field"), button = box.querySelector(".forget");
  field.placeholder = isKept ? translated("Kept; type to replace it") : "";
  if (isKept && !button)
    box.append(make("button", { type: "button", className: "forget" }, translated("Delete the stored key")));
  if (!isKept) button?.remove();
}

/** @param {HTMLElement} button */
async function forgetKey(button) {
  await ask("forget", { name: find(around(button, ".field"), "[data-option]").dataset.option });
  judge(tabOf(button));
}

// ---- presets, fixes

let presets = Promise.resolve(); // in order, as a profile adds to the preset before it

/**
 * @param {string} tab
 * @param {string} id
 * @returns {Promise<void>}
 */
async function preset(tab, id) {
  try {
    const sent = sentOf(tab), purpose = chosenPurpose(form.formOf(tab));
    const answer = await ask("preset", { tab, sent, id, purpose });
    if (sent !== sentOf(tab)) return preset(tab, id); // otherwise later typing would be lost
    form.fill(tab, answer.fill);
    const remark = answer.profile ? "All else is kept." : "Paths and names are kept, all else is as in the preset.";
    /** @type {string[]} */
    const notes = answer.notes ?? [];
    const about = make("span", {}, answer.text);
    tell(tab, "good",
      make("p", {}, make("b", {}, answer.title), " ", about, " · ", make("span", {}, remark), " ",
        make("button", { type: "button", className: "undo" }, "Undo")),
      ...notes.map((note) => make("p", {}, note)),
      ...changesMade(answer.changes ?? []));
  } catch (error) {
    tellError(tab, error);
  }
}

/**
 * The settings that a preset has changed; they can be folded.
 * @param {import("./compare.js").Comparison["rows"]} rows
 */
function changesMade(rows) {
  if (!rows.length) return [];
  const title = say("{count} setting changed", { count: rows.length }, "{count} settings changed");
  const first = translated("Before"), second = translated("After");
  const differences = make("div", { className: "differences" }, table({ first, second, rows }));
  return [make("details", { className: "changes-made", open: true }, make("summary", {}, title), differences)];
}

/** @param {HTMLButtonElement} button */
function fix(button) {
  if (button.dataset.leave) form.leaveOut(tabOf(button), button.dataset.leave.split(" "));
  else form.apply(tabOf(button), JSON.parse(button.dataset.fix ?? "{}"));
  button.disabled = true;
  button.classList.add("done");
  countAgain(around(button, ".message"));
}

/**
 * Update a message's count of problems once some of its fixes are in the form.
 * @param {HTMLElement} message
 */
function countAgain(message) {
  const title = message.querySelector(".title");
  if (!title || !message.matches(".bad, .warn")) return;
  const lines = all(
    message,
    ":scope > details > ul:not(.findings) > li:not(:has(.elsewhere)), :scope > details > .findings > li.bad");
  const left = lines.filter((line) => !line.querySelector(".fix.done")).length;
  const still = say("{count} problem to fix", { count: left }, "{count} problems to fix");
  title.textContent = left ? still : "Everything here is fixed";
  message.classList.toggle("settled", !left);
}

/**
 * Confirm images without captions: press the button that asked once more.
 * @param {HTMLElement} button
 */
function anyway(button) {
  const where = form.formOf(tabOf(button));
  where.dataset.anyway = inputs.images(where);
  find(around(button, ".bar"), `button.${button.dataset.again}`).click();
}

/**
 * Show the images of a tab's form in the room Data.
 * @param {string} tab
 */
export async function showImages(tab) {
  await go("data");
  const list = find(document, "#images-tab", HTMLSelectElement);
  list.value = tab;
  list.dispatchEvent(new Event("change", { bubbles: true }));
  find(document, ".images [data-do=take]").click();
}

/**
 * Ask for a path and save there: put it into the path field and press Save config.
 * @param {HTMLElement} training
 */
async function saveAs(training) {
  const path = find(training, ".begin .path", HTMLInputElement), tab = training.dataset.tab ?? "";
  const typed = path.value;
  const { path: free } = await ask("save_name", { tab, sent: sentOf(tab) }).catch(() => ({ path: "" }));
  let isChosen = false;
  const chosen = () => {
    isChosen = true;
    setTimeout(() => find(training, ".begin button.save").click(), 50);
  };
  path.addEventListener("change", chosen, { once: true });
  if (free) path.value = free;
  pick(path, "new", ".toml");
  // Closing the picker chooses nothing, and a later change of the path is no answer.
  find(document, "dialog.picker").addEventListener("close", () => {
    path.removeEventListener("change", chosen);
    if (!isChosen) path.value = typed;
  }, { once: true });
}

/**
 * Fill a button's value into the field above it.
 * @param {HTMLButtonElement} button
 */
function fillSibling(button) {
  const field = find(around(button, ".field"), "[data-option]", HTMLInputElement);
  field.value = button.dataset.value ?? "";
  field.dispatchEvent(new Event("input", { bubbles: true }));
}

/** @type {[string, (button: HTMLButtonElement) => unknown][]} What a click on a button does; the first that matches. */
const CLICKS = [
  ["[data-preset]", (button) => {
    const sheet = /** @type {HTMLElement | null} */ (button.closest(".sheet"));
    sheet?.hidePopover();
    presets = presets.then(() => preset(sheet?.dataset.tab ?? tabOf(button), button.dataset.preset ?? ""));
  }],
  [".undo", (button) => takeStep(button.dataset.tab ?? tabOf(button), "done")],
  [".redo", (button) => takeStep(tabOf(button), "undone")],
  [".unqueued > .away", (button) => button.parentElement?.remove()],
  [".message > .away", (button) => button.closest(".bar")?.classList.add("away")],
  [".message .anyway", anyway],
  [".message .captions", (button) => showImages(tabOf(button))],
  [".fix", fix],
  [".forget", forgetKey],
  [".as-text", (button) => editText(button.dataset.tab ?? "")],
  [".compare", (button) => compare(button.dataset.tab ?? "")],
  [".saveas", (button) => saveAs(around(button, ".training"))],
  ["button.several", (button) => several(tabOf(button), around(button, ".field"))],
  ["button.caches", (button) => makeCaches(tabOf(button), button.dataset.kind ?? "")],
  ["button.few-steps", fillSibling],
  ["button.probe", (button) => probe(tabOf(button))],
  [
    ".extra",
    (button) => button.setAttribute("aria-expanded", String(around(button, ".training").classList.toggle("more-open"))),
  ],
];

document.addEventListener("click", (event) => {
  for (const [selector, act] of CLICKS) {
    const button = hit(event, selector, HTMLButtonElement);
    if (button) return void act(button);
  }
});
