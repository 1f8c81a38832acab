// The live panel in the browser: its buttons, the support bundle, and comparing two samples.
import * as form from "../form/page.js";
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { all, around, hit, isField, make, makeButton, one, saveFile, setValue } from "../server/elements.js";
import { address, ask, messageOf } from "../server/http.js";
import { openTab } from "../server/tabs.js";

/** @typedef {HTMLDialogElement & { row?: { title: string, large: string }[] }} Comparison the samples of the row that is shown */

/** @type {Record<string, string>} */
const TITLES = { lora: "LoRA", dreambooth: "DreamBooth", finetune: "Finetune", "textual-inversion": "Textual inversion", lllite: "LLLite" };

/**
 * Put settings that the server sent into the form of their tab, and show it.
 * @param {{ tab: string, fill: string, launch: Record<string, string> }} settings
 */
export async function openInForm({ tab, fill, launch }) {
  await openTab(TITLES[tab], () => document.getElementById(`${tab}-form`)?.checkVisibility());
  form.fill(tab, fill);
  const where = form.formOf(tab);
  for (const field of all(where, "[data-launch]").filter(isField)) {
    const value = launch[field.dataset.launch ?? ""] ?? field.dataset.default;
    setValue(field, field.type === "checkbox" ? value.toLowerCase() : value);
  }
  where.dispatchEvent(new Event("input", { bubbles: true }));
  one(where, "[data-option]").dispatchEvent(new Event("input", { bubbles: true }));
  where.scrollIntoView({ block: "start" });
}

/** @param {HTMLButtonElement} button of an action on a run */
async function act(button) {
  const where = around(button, ".acts"), place = one(where, ".answer"), run = where.dataset.run ?? "";
  const tell = (/** @type {string} */ text, bad = false) => {
    place.textContent = text;
    place.classList.toggle("bad", bad);
  };
  button.disabled = true;
  try {
    if (button.dataset.act === "bundle") tell(await saveBundle(run, tell));
    else {
      const answer = await ask("act", { act: button.dataset.act, run, sure: button.dataset.sure === "true" });
      if (answer.ask) confirm(button, place, answer.ask);
      if (answer.fill) await openInForm(answer);
      if (answer.run) lookAt(answer.run);
      if (!answer.ask) tell(translated(answer.said ?? "The form holds the settings of this run: change what you like."));
    }
  } catch (error) {
    tell(messageOf(error), true);
  }
  button.disabled = false;
}

/**
 * Ask what is to be known first; yes is the same button once more.
 * @param {HTMLButtonElement} button
 * @param {HTMLElement} place
 * @param {string} text
 */
function confirm(button, place, text) {
  const yes = make("button", { type: "button", className: "stop", "data-act": button.dataset.act, "data-sure": "true" }, button.textContent);
  const no = makeButton(translated("Cancel"), () => place.replaceChildren(), { className: "no" });
  place.classList.remove("bad");
  place.replaceChildren(translated(text), " ", yes, " ", no);
  no.focus();
}

/**
 * Save the support bundle of a run; what to say of it.
 * @param {string} run
 * @param {(text: string) => void} tell
 */
async function saveBundle(run, tell) {
  tell(translated("Collecting, which takes some seconds …"));
  const answer = await fetch(address("bundle", { run }));
  if (!answer.ok) throw new Error(await answer.text());
  const name = /filename="([\w.-]+)"/.exec(answer.headers.get("content-disposition") ?? "")?.[1] ?? "support.zip";
  saveFile(await answer.blob(), name);
  return `${name}: ${translated("no captions, images, names or tokens are in it. Look through it before you pass it on.")}`;
}

// ---- two samples, one over the other

/** @type {Comparison | undefined} */
let dialog;

/** @param {HTMLElement} sample */
function compare(sample) {
  const row = sample.parentElement ? all(sample.parentElement, ".sample") : [];
  const place = row.indexOf(sample);
  dialog ??= build();
  const samples = row.map(({ dataset }) => ({ title: dataset.title ?? translated(say("Step {step}", { step: dataset.step ?? "" })), large: dataset.large ?? "" }));
  dialog.row = samples;
  one(dialog, "p").textContent = sample.dataset.prompt ?? "";
  const [first, second] = dialog.querySelectorAll("select");
  for (const choice of [first, second])
    choice.replaceChildren(...samples.map(({ title }, i) => make("option", { value: String(i) }, title)));
  second.value = String(place);
  first.value = String(Math.min(place + 1, row.length - 1)); // the one before it, as the newest comes first
  dialog.classList.toggle("single", row.length < 2);
  render(dialog);
  dialog.showModal();
}

function build() {
  /** @type {Comparison} */
  const made = make("dialog", { className: "compare", "aria-label": translated("Compare samples") },
    make("header", {}, make("p"), make("button", { type: "button", className: "close", "aria-label": translated("Close") }, "✕")),
    make("div", { className: "pair" }, make("img", { alt: "" }), make("img", { alt: "" })),
    make("div", { className: "between" },
      make("select", { "aria-label": translated("Left") }),
      make("input", { type: "range", min: 0, max: 100, value: 50, "aria-label": translated("Where the left one ends") }),
      make("select", { "aria-label": translated("Right") })));
  made.addEventListener("input", () => render(made));
  made.addEventListener("click", (event) => {
    if (event.target === made || hit(event, ".close")) made.close();
  });
  document.body.append(made);
  return made;
}

/** @param {Comparison} dialog */
function render(dialog) {
  const [first, second] = all(dialog, "select", HTMLSelectElement).map((choice) => dialog.row?.[Number(choice.value)]);
  // Below is the right one, above it the left one.
  for (const [i, image] of all(dialog, ".pair img", HTMLImageElement).entries()) {
    const sample = i ? first : second;
    if (!sample) continue;
    if (image.getAttribute("src") !== sample.large) image.src = sample.large;
    image.alt = sample.title;
  }
  one(dialog, ".pair").style.setProperty("--at", `${one(dialog, "input", HTMLInputElement).value}%`);
}

// ---- which run, and how much of it

/** The id of the run that is looked at, "" for the newest. */
let looked = "";
const BUSY = ["starting", "running", "stopping"];

/**
 * Look at a run, or with "" at the newest.
 * @param {string} run
 */
export function lookAt(run) {
  looked = run;
  showNews();
}

/** A run that was seen at work stays when it ends: the buttons of the next one would come under the mouse. */
function stay() {
  const { run = "", state = "" } = document.querySelector(".live .run") instanceof HTMLElement ? one(document, ".live .run").dataset : {};
  if (BUSY.includes(state)) looked = run;
}

document.addEventListener("change", (event) => {
  const list = hit(event, "select.runs", HTMLSelectElement);
  if (list) lookAt(list.value);
});
document.addEventListener("kohya:begun", (event) => lookAt(/** @type {CustomEvent<string>} */ (event).detail));

const PERIOD = 1000; // milliseconds between two looks
const LOST = 3; // looks without an answer until the panel says that what it shows is of before
/** Marks of what the server would show, of what Gradio fetches at the moment, and of what is shown. */
let newest = "", fetched = "", mark = "", asking = false, lost = 0, vain = 0;
/** @type {HTMLElement | undefined} the button of a run that was used last; the panel may have replaced it meanwhile */
let used;

/** Gradio begins to fetch what is to be shown; the run to show. */
export function beginLook() {
  fetched = newest;
  return looked;
}

/** It shows what it has fetched. Where that fails, the mark stays another one, and a later look fetches again. */
export function endLook() {
  mark = fetched;
  stay();
}

/** What is shown of the run is Gradio's to change. Each time costs a hundred times what asking for news does. */
const showNews = () => all(document, "button.news")[0]?.click();

async function look() {
  if (asking || document.visibilityState === "hidden" || !document.querySelector("button.news")) return;
  asking = true;
  try {
    newest = (await ask("panel", { run: looked })).mark;
    if (newest !== mark && (newest !== fetched || ++vain % LOST === 0)) showNews(); // Gradio says each time that it failed
    lost = 0;
  } catch {
    newest = mark = ""; // who knows what has happened when the server is back
    lost += 1;
  }
  asking = false;
  showLost();
  keepFocus();
}

/** Say that the server does not answer, for as long as it does not. */
function showLost() {
  const panel = one(document, ".live"), said = panel.querySelector(".lost");
  if (lost >= LOST && !said)
    panel.prepend(make("p", { className: "lost", role: "alert" }, "The page's server does not answer: this is from before. Trainings go on without it."));
  else if (!lost) said?.remove();
}

/** A button has lost the focus while it waited, or is gone: with the keyboard one would begin at the top again. */
function keepFocus() {
  if (used && document.activeElement === document.body) (used.isConnected ? used : all(document, ".live .acts button")[0])?.focus({ preventScroll: true });
}

for (const kind of ["focusin", "pointerdown"]) document.addEventListener(kind, (event) => {
  used = hit(event, ".live .acts button") ?? undefined;
});

/** Gradio puts the panel onto the page, some time. */
function begin() {
  if (!document.querySelector("button.news")) return void setTimeout(begin, 50);
  void look();
  setInterval(look, PERIOD);
}

begin();
document.addEventListener("visibilitychange", look);

document.addEventListener("click", async (event) => {
  const fold = hit(event, ".unfold");
  if (fold) fold.setAttribute("aria-expanded", String(around(fold, ".live").classList.toggle("open")));
  const button = hit(event, "[data-act]", HTMLButtonElement);
  if (button) act(button);
  const sample = hit(event, ".sample");
  if (sample) compare(sample);
  const go = hit(event, "[data-queue]", HTMLButtonElement);
  const other = hit(event, "[data-look]");
  if (other) lookAt(other.dataset.look ?? "");
  if (go) {
    go.disabled = true;
    looked = ""; // what the queue starts now is looked at
    await ask("queue-act", { act: go.dataset.queue }).catch(() => (go.disabled = false));
  }
});
