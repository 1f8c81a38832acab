// The live panel in the browser: it polls for the parts that have changed, and shows them.
import { all, around, find, hit } from "../server/elements.js";
import { ask, call } from "../server/http.js";

const PERIOD = 1000; // milliseconds between two requests
const BUSY = ["starting", "running", "stopping"];

/** @type {HTMLElement | undefined} */
let panel;
/** The id of the run to show, "" for the newest. */
let picked = "";
/** The server's marks of the parts shown; "" requests all parts. */
let shown = "";
let isAsking = false;
/** @type {HTMLElement | undefined} the button or list that had the focus last; the panel may have replaced it since */
let used;

/** @param {Element} element */
export function mount(element) {
  panel = find(element, ".live");
  // A panel that is taller than the window scrolls with the page until its end is in view.
  new ResizeObserver(([{ target }]) =>
    /** @type {HTMLElement | null} */ (target.closest("#side"))?.style.setProperty(
      "--side-height", `${/** @type {HTMLElement} */ (target).offsetHeight}px`)).observe(panel);
  shown = "";
  find(panel, "details.log").addEventListener("toggle", update);
  update();
}

/**
 * Show a run, or with "" the newest.
 * @param {string} run
 */
export function lookAt(run) {
  picked = run;
  update();
}

/** Open the panel and bring it into view: on a phone it is one line far above the button that begins a run. */
export function reveal() {
  if (!panel) return;
  unfold(find(panel, ".unfold"), true);
  if (find(panel, ".at-hand").getBoundingClientRect().bottom <= 0) panel.scrollIntoView({ block: "start" });
}

/**
 * @param {HTMLElement} fold the button that opens and closes the panel
 * @param {boolean} [isOpen]
 */
function unfold(fold, isOpen) {
  fold.setAttribute("aria-expanded", String(around(fold, ".live").classList.toggle("open", isOpen)));
}

/** Ask the server for the parts that have changed, and show them. One request at a time; hidden pages send none. */
async function update() {
  if (isAsking || !panel?.isConnected || document.visibilityState === "hidden") return;
  if (!panel.checkVisibility()) return; // in the room of runs
  const question = { run: picked, shown, log: isLogOpen(panel) };
  isAsking = true;
  const answer = await ask("panel", question).catch(() => null);
  isAsking = false;
  if (!answer) shown = ""; // the server may have been restarted with another version
  else if (picked === question.run) show(panel, answer);
  keepFocus(panel);
  // The user may have picked another run, or opened the log, while the request was on its way.
  if (answer && (picked !== question.run || isLogOpen(panel) !== question.log)) update();
  else keepRun(panel);
}

/**
 * @param {HTMLElement} where
 * @param {{ parts: Record<string, string>, shown?: string }} answer the HTML of parts by name, and the marks of
 *   all parts
 */
function show(where, answer) {
  for (const [name, markup] of Object.entries(answer.parts)) {
    const part = find(where, `[data-part=${name}]`);
    const follows = name === "log" && part.scrollHeight - part.scrollTop - part.clientHeight < 20;
    part.innerHTML = markup;
    if (follows) part.scrollTop = part.scrollHeight; // unless the user has scrolled up
  }
  shown = answer.shown ?? shown;
  announce(where);
}

let announced = "";

/**
 * Announce state changes of the shown run to screen readers.
 * @param {HTMLElement} where
 */
function announce(where) {
  const { run = "", state = "" } = where.querySelector(".run") ? find(where, ".run").dataset : {};
  const now = `${run} ${state}`, place = find(where, ".announced");
  if (now === announced) return;
  const words = [".who b", ".state"].map((part) => where.querySelector(part)?.textContent ?? "");
  if (announced && run) {
    place.textContent = words.join(": ");
    if (!BUSY.includes(state)) document.dispatchEvent(new CustomEvent("kohya:ended", { detail: run }));
  }
  announced = now;
}

/** @param {HTMLElement} where */
const isLogOpen = (where) => find(where, "details.log", HTMLDetailsElement).open;

/**
 * Keep showing a run that ends while shown, and any run while the mouse is over its buttons, which the next run's
 * buttons would replace.
 * @param {HTMLElement} where
 */
function keepRun(where) {
  const { run = "", state = "" } = where.querySelector(".run") ? find(where, ".run").dataset : {};
  if (BUSY.includes(state) || where.querySelector(".acts:hover")) picked = run;
}

/**
 * Give the focus back to a control that was disabled for a while or replaced: without it, the Tab key would start at
 * the top of the page.
 * @param {HTMLElement} where
 */
function keepFocus(where) {
  if (!used || document.activeElement !== document.body) return;
  const like = used.matches("select") ? "select.runs" : ".acts button";
  (used.isConnected ? used : all(where, like)[0])?.focus({ preventScroll: true });
}

for (const kind of ["focusin", "pointerdown"]) document.addEventListener(kind, (event) => {
  used = hit(event, ".live :is(.acts button, select.runs)") ?? undefined;
});
setInterval(update, PERIOD);
document.addEventListener("visibilitychange", update);
document.addEventListener("kohya:begun", (event) => lookAt(/** @type {CustomEvent<string>} */ (event).detail));
document.addEventListener("change", (event) => {
  const list = hit(event, "select.runs", HTMLSelectElement);
  if (list) lookAt(list.value);
});
document.addEventListener("click", async (event) => {
  const fold = hit(event, ".unfold"), other = hit(event, "[data-look]");
  if (fold) unfold(fold);
  if (other) lookAt(other.dataset.look ?? "");
  const go = hit(event, "[data-queue]", HTMLButtonElement);
  if (!go) return;
  go.disabled = true;
  picked = ""; // show the run that the queue starts
  await call(`queue/${go.dataset.queue}`, {}).catch(() => (go.disabled = false));
});
