// Which file of a run is best: a part of the tab Try it, which the run's panel opens.
import { around, find, finder, hit, make, scrollToSettled, showMessage } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { noteSubject } from "../server/late.js";
import { go } from "../server/addresses.js";
import { watcher } from "../tools/commands.js";
import { promptStrips } from "./strips.js";

/** @typedef {import("./strips.js").SampleImage} SampleImage */
/**
 * @typedef {{ columns: string[], saved: string[], rows: string[], cells: (SampleImage | null)[][], losses: string[],
 *   likeness: string[], held_out: boolean, best: number | null, reason: string, notes: string[], folder: string }}
 *   Comparison
 */

/** @type {HTMLElement | undefined} */
let place;
let runFromPanel = ""; // the run chosen in the panel
/** @type {((begun?: string) => void) | undefined} */
let look;

const part = finder(() => place ?? document);
const runs = () => part("#comparing-run", HTMLSelectElement);
const encoder = () => part("#comparing-encoder", HTMLSelectElement);

/** @param {Element} element */
export function mount(element) {
  place = find(element, ".comparing");
  look = watcher(part(".jobs"), "compare", () => void render(), () => void render());
  encoder().addEventListener("change", settle);
  runs().addEventListener("change", () => void render());
  part(".compare-files", HTMLButtonElement).addEventListener("click", () => void begin());
  void start();
  look();
}

/** Reload the choices, and show the run chosen in the panel, if there is one. */
async function start() {
  const run = runFromPanel || runs().value, isFromPanel = Boolean(runFromPanel);
  runFromPanel = "";
  try {
    const { runs: comparableRuns } = /** @type {{ runs: [string, string][] }} */ (await ask("comparing_choices"));
    runs().replaceChildren(...comparableRuns.map(([value, title]) => make("option", { value }, title)));
    part(".compare-files").closest("section")?.toggleAttribute("hidden", !comparableRuns.length);
    if (comparableRuns.some(([value]) => value === run)) runs().value = run;
    settle();
    if (comparableRuns.length) await render();
    if (isFromPanel && place) scrollToSettled(place);
  } catch (error) {
    showMessage(part(".said-of"), "bad", messageOf(error));
  }
}

/** Show the folder's field only if a folder is to be chosen. */
function settle() {
  around(part("#comparing-folder"), ".field").hidden = encoder().value !== "folder";
}

async function begin() {
  const go = part(".compare-files", HTMLButtonElement);
  go.disabled = true;
  try {
    const { job } = await ask("comparing_begin", {
      run: runs().value,
      encoder: encoder().value,
      folder: part("#comparing-folder", HTMLInputElement).value,
      prompts: part("#comparing-prompts", HTMLTextAreaElement).value,
    });
    showMessage(part(".said-of"), "good", "");
    look?.(job.id);
  } catch (error) {
    showMessage(part(".said-of"), "bad", messageOf(error));
  }
  go.disabled = false;
}

/** Show the newest comparison of the chosen run so far. */
async function render() {
  const run = runs().value;
  if (!run) return;
  const isChosen = noteSubject(() => runs().value);
  try {
    /** @type {Comparison} */
    const comparison = await ask("comparing_found", { run });
    if (!isChosen()) return;
    part(".verdict").hidden = !comparison.columns.length;
    part(".reason").replaceChildren(comparison.reason);
    part(".where").textContent = comparison.folder;
    part(".notes").replaceChildren(...comparison.notes.map((note) => make("li", {}, note)));
    part(".scroll").replaceChildren(...rows(comparison));
  } catch (error) {
    if (isChosen()) showMessage(part(".said-of"), "bad", messageOf(error));
  }
}

/** @param {Comparison} comparison */
function rows(comparison) {
  const heads = comparison.columns.map((title, at) =>
    make("div", { className: at === comparison.best ? "head best" : "head", title: comparison.saved[at] ?? "" },
      make("b", {}, title),
      at === comparison.best && make("span", {}, "Proposed")));
  const numbers = /** @type {[string, string[]][]} */ ([
    [comparison.held_out ? "Held-out loss" : "Loss on trained images", comparison.losses],
    ["Likeness", comparison.likeness],
  ]);
  return [
    make("div", { className: "line-of heads" }, heads),
    ...numbers
      .filter(([, values]) => values.some(Boolean))
      .flatMap(([title, values]) => [
        make("p", {}, title),
        make("div", { className: "line-of numbers" },
          values.map((value) => make("div", {}, value || "–"))),
      ]),
    ...promptStrips(comparison.columns, comparison.rows, comparison.cells, "line-of strip").flat(),
  ];
}

document.addEventListener("click", (event) => {
  const button = hit(event, "[data-compare]");
  if (!button) return;
  runFromPanel = button.dataset.compare ?? "";
  void go("try");
  if (place?.isConnected) void start(); // otherwise the tab is being built for the first time
});
