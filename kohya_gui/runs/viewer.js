// One sample over the whole screen, alone or with another step of its prompt over it.
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { find, hit, make, makeButton } from "../server/elements.js";

/**
 * @typedef {{ row: string, step: number, rows: () => string[], steps: (row: string) => number[],
 *   promptOf: (row: string) => string, addressOf: (row: string, step: number) => string }} Shown rows are prompts
 */

/** @type {HTMLDialogElement | undefined} */
let dialog;
/** @type {Shown} */
let shown;
/** @type {number | null} the step that lies over the other, from the left */
let before = null;
/** The share of the width at which the left image ends. */
let at = 50;

/** @param {Shown} what */
export function openViewer(what) {
  shown = what;
  const steps = shown.steps(shown.row);
  if (before !== null && !steps.includes(before)) before = null;
  dialog ??= build();
  render();
  if (!dialog.open) dialog.showModal();
  find(dialog, ".stage").focus();
}

function build() {
  const slider = make("input", {
    type: "range", min: "0", max: "100", "aria-label": translated("Where the left one ends"),
  });
  slider.addEventListener("input", () => {
    at = Number(slider.value);
    render();
  });
  const other = make("select", { "aria-label": translated("Compare with") });
  other.addEventListener("change", () => {
    before = other.value === "" ? null : Number(other.value);
    render();
  });
  const stage = make("div", { className: "stage", tabIndex: 0, role: "group", "aria-label": translated("Sample") },
    make("img", { className: "after", alt: "" }), make("img", { className: "before", alt: "" }),
    make("i", { className: "divider" }), make("b", { className: "left-step" }), make("b", { className: "right-step" }));
  for (const kind of /** @type {const} */ (["pointerdown", "pointermove"])) stage.addEventListener(kind, drag);
  /** @type {HTMLDialogElement} */
  const element = make("dialog", { className: "viewer", "aria-label": translated("Sample in full size") },
    make("header", {}, make("p", { className: "own" }),
      makeButton("✕", () => element.close(), { className: "close", "aria-label": translated("Close") })),
    stage,
    make("footer", {},
      makeButton("←", () => move(-1), { "aria-label": translated("Earlier step"), className: "earlier" }),
      make("output", { className: "at" }),
      makeButton("→", () => move(1), { "aria-label": translated("Later step"), className: "later" }),
      makeButton("↑", () => turn(-1), { "aria-label": translated("Previous prompt"), className: "up" }),
      makeButton("↓", () => turn(1), { "aria-label": translated("Next prompt"), className: "down" }),
      other, slider));
  element.addEventListener("keydown", press);
  element.addEventListener("click", (event) => event.target === element && element.close());
  (document.querySelector(".gradio-container") ?? document.body).append(element); // which has the page's typeface
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

/** @param {number} by steps: 1 for the next later one */
function move(by) {
  const steps = shown.steps(shown.row), place = steps.indexOf(shown.step) + by;
  shown.step = steps[Math.min(steps.length - 1, Math.max(0, place))];
  render();
}

/** @param {number} by prompts */
function turn(by) {
  const rows = shown.rows(), place = rows.indexOf(shown.row) + by;
  shown.row = rows[Math.min(rows.length - 1, Math.max(0, place))];
  const steps = shown.steps(shown.row);
  // The nearest step that this prompt has.
  shown.step = steps.reduce((best, step) => (Math.abs(step - shown.step) < Math.abs(best - shown.step) ? step : best));
  if (before !== null && !steps.includes(before)) before = null;
  render();
}

/** @param {PointerEvent} event that drags the border between two images */
function drag(event) {
  if (before === null || (event.type === "pointermove" && !event.buttons)) return;
  event.preventDefault();
  const box = find(around(event), ".after").getBoundingClientRect();
  at = Math.round(Math.min(100, Math.max(0, ((event.clientX - box.left) / box.width) * 100)));
  render();
}

/** @param {Event} event */
const around = ({ currentTarget }) => /** @type {HTMLElement} */ (currentTarget);

/** @param {number} step */
const titleOf = (step) => (step ? say("Step {step}", { step: step.toLocaleString("en") }) : translated("Base model"));

function render() {
  if (!dialog) return;
  const { row, step } = shown, steps = shown.steps(row), rows = shown.rows();
  const prompt = shown.promptOf(row);
  find(dialog, "header p").textContent = prompt;
  show(find(dialog, ".after", HTMLImageElement), shown.addressOf(row, step), `${titleOf(step)}: ${prompt}`);
  const under = find(dialog, "img.before", HTMLImageElement), isPair = before !== null && before !== step;
  if (isPair) show(under, shown.addressOf(row, before ?? 0), `${titleOf(before ?? 0)}: ${prompt}`);
  dialog.classList.toggle("pair", isPair);
  find(dialog, ".stage").style.setProperty("--at", `${at}%`);
  find(dialog, ".left-step").textContent = isPair ? titleOf(before ?? 0) : "";
  find(dialog, ".right-step").textContent = isPair ? titleOf(step) : "";
  const place = steps.indexOf(step);
  find(dialog, ".at").textContent =
    say("{title} · {place} of {many}", { title: titleOf(step), place: place + 1, many: steps.length });
  enable(".earlier", place > 0);
  enable(".later", place < steps.length - 1);
  enable(".up", rows.indexOf(row) > 0);
  enable(".down", rows.indexOf(row) < rows.length - 1);
  const other = find(dialog, "select", HTMLSelectElement), slider = find(dialog, "input", HTMLInputElement);
  other.replaceChildren(make("option", { value: "" }, translated("Compare with …")),
    ...steps.filter((one) => one !== step).map((one) => make("option", { value: String(one) }, titleOf(one))));
  other.value = isPair ? String(before) : "";
  slider.value = String(at);
  slider.hidden = !isPair;
}

/**
 * @param {HTMLImageElement} image
 * @param {string} src
 * @param {string} alt
 */
function show(image, src, alt) {
  if (image.src !== src) image.src = src;
  image.alt = alt;
}

/**
 * @param {string} selector
 * @param {boolean} can
 */
const enable = (selector, can) => dialog && (find(dialog, selector, HTMLButtonElement).disabled = !can);
