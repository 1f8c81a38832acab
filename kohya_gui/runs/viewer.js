// One sample on the whole screen, alone or compared with another one of its prompt: on a run's page, in the panel and
// in the tab Try it.
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { fillSelect, find, hit, make, makeButton } from "../server/elements.js";

/** @typedef {{ position: number, title: string, address: string }} Shot `position`: its step or column */
/** @typedef {{ prompt: string, shots: Shot[] }} Row */
/** @typedef {import("../server/images.js").Lost} Lost */

/** @type {HTMLDialogElement | undefined} */
let dialog;
/** @type {() => Row[]} the samples to choose from; more may come while the dialog is open */
let rows = () => [];
let row = 0, place = 0; // of the sample that is shown
let beside = -1; // index of the sample overlaid from the left, -1 without one
/** @type {number | null} the position chosen for comparison, kept after the dialog is closed */
let chosen = null;
let border = 50; // right edge of the overlaid sample, in percent of the width
let giveFocus = () => {};

/**
 * @param {() => Row[]} sources
 * @param {string} address of the sample to show
 * @param {boolean} [isCompared] whether to compare it with the one before at once
 * @param {() => void} [refocus] called on closing if the element that had the focus is gone
 */
export function openViewer(sources, address, isCompared = false, refocus = () => {}) {
  const isIt = (/** @type {Shot} */ shot) => shot.address === address;
  [rows, giveFocus] = [sources, refocus];
  row = rows().findIndex(({ shots }) => shots.some(isIt));
  if (row < 0) return;
  const { shots } = shownRow();
  place = shots.findIndex(isIt);
  beside = shots.findIndex(({ position }) => position === chosen);
  if (isCompared && (beside < 0 || beside === place)) beside = place ? place - 1 : 1;
  dialog ??= build();
  render();
  if (!dialog.open) dialog.showModal();
  find(dialog, ".stage").focus();
}

const shownRow = () => rows()[row];

function build() {
  const slider = make("input", {
    type: "range", min: "0", max: "100", "aria-label": translated("Where the left one ends"),
  });
  slider.addEventListener("input", () => {
    border = Number(slider.value);
    render();
  });
  const shown = make("select", { className: "at", "aria-label": translated("Sample") });
  shown.addEventListener("change", () => move(Number(shown.value) - place));
  const other = make("select", { className: "other", "aria-label": translated("Compare with") });
  other.addEventListener("change", () => {
    beside = Number(other.value);
    chosen = shownRow().shots[beside]?.position ?? null;
    render();
  });
  const stage = make("div", { className: "stage", tabIndex: 0, role: "group", "aria-label": translated("Sample") },
    ...["under", "over"].flatMap((className) => [make("img", { className, alt: "" }), goneNote(undefined, className)]),
    make("i", { className: "divider" }), make("b", { className: "left" }), make("b", { className: "right" }));
  for (const kind of /** @type {const} */ (["pointerdown", "pointermove"])) stage.addEventListener(kind, drag);
  stage.addEventListener("kohya:lost", (event) => {
    const { target, detail } = /** @type {CustomEvent<Lost>} */ (event);
    if (!(target instanceof HTMLImageElement)) return;
    target.classList.add("broken");
    target.nextElementSibling?.replaceChildren(wordsOfLoss(detail));
  });
  stage.addEventListener("load", ({ target }) => // which does not bubble
    target instanceof HTMLImageElement && target.classList.remove("broken"), true);
  /** @type {HTMLDialogElement} */
  const element = make("dialog", { className: "viewer", "aria-label": translated("Sample in full size") },
    make("header", {}, make("p", {}, make("span", { className: "own" })),
      makeButton("✕", () => element.close(), { className: "close", "aria-label": translated("Close") })),
    stage,
    make("footer", {},
      make("span", {},
        makeButton("←", () => move(-1), { "aria-label": translated("Previous sample"), className: "previous" }), shown,
        makeButton("→", () => move(1), { "aria-label": translated("Next sample"), className: "next" })),
      makeButton("↑", () => turn(-1), { "aria-label": translated("Previous prompt"), className: "up" }),
      makeButton("↓", () => turn(1), { "aria-label": translated("Next prompt"), className: "down" }),
      other, slider));
  element.addEventListener("keydown", press);
  element.addEventListener("close", () => document.activeElement === document.body && giveFocus());
  (document.querySelector(".gradio-container") ?? document.body).append(element); // for its font
  return element;
}

/** @param {KeyboardEvent} event */
function press(event) {
  if (hit(event, "select, input")) return;
  /** @type {Record<string, () => void>} */
  const keys = {
    ArrowLeft: () => move(-1), ArrowRight: () => move(1), ArrowUp: () => turn(-1), ArrowDown: () => turn(1),
    Home: () => move(-Infinity), End: () => move(Infinity),
  };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
}

/**
 * @param {number} at
 * @param {unknown[]} list
 */
const within = (at, list) => Math.min(list.length - 1, Math.max(0, at));

/** @param {number} by samples of this prompt */
function move(by) {
  place = within(place + by, shownRow().shots);
  render();
}

/** @param {number} by prompts: the nearest sample of that prompt is shown, and compared with the same one */
function turn(by) {
  const { shots } = shownRow(), { position } = shots[place], compared = shots[beside]?.position;
  row = within(row + by, rows());
  const distances = shownRow().shots.map((shot) => Math.abs(shot.position - position));
  place = distances.indexOf(Math.min(...distances));
  beside = shownRow().shots.findIndex((shot) => shot.position === compared);
  render();
}

/** @param {PointerEvent} event that drags the border between two samples */
function drag(event) {
  const stage = /** @type {HTMLElement} */ (event.currentTarget);
  if (!stage.closest(".pair") || (event.type === "pointermove" && !event.buttons)) return;
  event.preventDefault();
  const box = stage.getBoundingClientRect();
  border = Math.round(Math.min(100, Math.max(0, ((event.clientX - box.left) / box.width) * 100)));
  render();
}

/** @param {Lost} lost */
const wordsOfLoss = ({ isGone }) => translated(isGone ? "The file is gone" : "This image cannot be shown");

/**
 * What stands in place of an image that the server refuses, mostly as its file was deleted.
 * @param {Lost} [lost]
 * @param {string} [of]
 */
export const goneNote = (lost = { isGone: true }, of = "") =>
  make("span", { className: `gone ${of}`.trim() }, wordsOfLoss(lost));

/** @param {number} step */
export const titleOfStep = (step) =>
  translated(step ? say("Step {step}", { step: step.toLocaleString("en") }) : "Base model");

function render() {
  if (!dialog) return;
  const { prompt, shots } = shownRow(), shot = shots[place], other = beside === place ? undefined : shots[beside];
  find(dialog, "header span").textContent = prompt;
  show(find(dialog, "img.under", HTMLImageElement), shot, prompt);
  if (other) show(find(dialog, "img.over", HTMLImageElement), other, prompt);
  dialog.classList.toggle("pair", Boolean(other));
  find(dialog, ".stage").style.setProperty("--at", `${border}%`);
  find(dialog, ".left").textContent = other?.title ?? "";
  find(dialog, ".right").textContent = shot.title;
  const many = shots.length, choices = shots.map(({ title }, at) => [String(at), title]);
  fillSelect(find(dialog, ".at"), choices.map(([at, title]) =>
    [at, say("{title} · {place} of {many}", { title, place: Number(at) + 1, many })]), String(place));
  fillSelect(find(dialog, ".other"), [["-1", translated("Compare with …")],
    ...choices.filter((_, at) => at !== place)], String(other ? beside : -1));
  find(dialog, ".other").hidden = many < 2;
  enable(".previous", place > 0);
  enable(".next", place < many - 1);
  enable(".up", row > 0);
  enable(".down", row < rows().length - 1);
  const slider = find(dialog, "input", HTMLInputElement);
  slider.value = String(border);
  slider.hidden = !other;
}

/**
 * @param {HTMLImageElement} image
 * @param {Shot} shot
 * @param {string} prompt
 */
function show(image, { title, address }, prompt) {
  if (image.getAttribute("src") !== address) {
    image.src = address;
    image.classList.remove("broken");
  }
  image.alt = `${title}: ${prompt}`;
}

/**
 * @param {string} selector
 * @param {boolean} can
 */
const enable = (selector, can) => dialog && (find(dialog, selector, HTMLButtonElement).disabled = !can);
