// The samples of a run: prompts as rows, steps as columns. New images appear while it trains.
import { count, say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { find, make, makeButton } from "../server/elements.js";
import { address, addressOfApi, call, pathOfRun } from "../server/http.js";
import { noteSubject } from "../server/late.js";
import { goneNote, openViewer, titleOfStep } from "./viewer.js";

/** @typedef {{ run: string, place: number, step: number, number: number, prompt: string, made: number }} Sample */
/** @typedef {{ key: string, number: number, prompt: string }} Row */
/** @typedef {import("../server/images.js").Lost} Lost */
/** @typedef {{ rows: Row[], steps: number[], samples: Map<string, Sample> }} Grid */

const MAX_COLUMNS = 24, MAX_ROWS = 24; // initially shown, the newest steps

/**
 * The row of a sample: a prompt that a resume has changed is another row.
 * @param {Sample} sample
 * @returns {Row}
 */
const rowOf = ({ number, prompt }) => ({ key: `${number} ${prompt}`, number, prompt });

/** @param {Row} row */
const wordsOf = ({ prompt, number }) => prompt || translated(say("Prompt {number}", { number: number + 1 }));

/**
 * @param {string} row
 * @param {number} step
 */
const keyOf = (row, step) => `${step} ${row}`;

/**
 * Prompts as rows, steps as columns; of several samples of both, the last.
 * @param {Sample[]} samples
 * @returns {Grid}
 */
function arranged(samples) {
  const byKey = new Map(samples.map((sample) => [keyOf(rowOf(sample).key, sample.step), sample]));
  const rows = new Map(samples.map(rowOf).map((row) => [row.key, row]));
  const steps = new Set(samples.map(({ step }) => step));
  return {
    rows: [...rows.values()].sort((a, b) => a.number - b.number), steps: [...steps].sort((a, b) => a - b),
    samples: byKey,
  };
}

export class Gallery {
  /** @param {string} run */
  constructor(run) {
    this.run = run;
    this.requested = ""; // the server's images at the last request
    this.columns = MAX_COLUMNS;
    this.rows = MAX_ROWS;
    /** @type {Grid} */
    this.grid = arranged([]);
    /** @type {Map<string, HTMLElement>} cells by prompt, step and time of the image */
    this.cells = new Map();
    this.more = make("div", { className: "more-samples" });
    this.table = make("table", { className: "gallery" });
    this.scroll = make("div", { className: "gallery-scroll", tabIndex: 0, role: "group",
      "aria-label": translated("Samples by prompt and step") }, this.table);
    this.element = make("section", { className: "run-samples", "aria-label": translated("Samples"), hidden: true },
      make("div", { className: "section-head" }, make("h3", {}, translated("Samples")), this.more), this.scroll);
  }

  /** @param {string} newest what the server has now */
  async update(newest) {
    if (newest === this.requested) return;
    this.requested = newest;
    const isNewest = noteSubject(() => this.requested);
    const answer = await call(pathOfRun(this.run, "samples?resumed=true")).catch(() => null);
    if (!isNewest()) return;
    if (!answer) return void (this.requested = ""); // the next update retries
    this.grid = arranged(answer.samples);
    this.draw();
  }

  draw() {
    const { rows, steps, samples } = this.grid;
    this.element.hidden = !samples.size;
    if (!samples.size) return;
    const shownSteps = steps.slice(-this.columns), shownRows = rows.slice(0, this.rows);
    const { scroll } = this, isAtEnd = scroll.scrollLeft + scroll.clientWidth >= scroll.scrollWidth - 40;
    const head = make("tr", {}, make("th", { scope: "col", className: "prompt" }, translated("Prompt")),
      ...shownSteps.map((step) => make("th", { scope: "col" }, titleOfStep(step))));
    const body = shownRows.map((row) => make("tr", {},
      make("th", { scope: "row", className: "prompt" },
        make("span", { className: "own", title: row.prompt }, wordsOf(row))),
      ...shownSteps.map((step) => this.cell(row, step))));
    const focused = document.activeElement;
    this.table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
    if (focused instanceof HTMLElement && this.table.contains(focused)) focused.focus({ preventScroll: true });
    if (isAtEnd) scroll.scrollLeft = scroll.scrollWidth;
    this.offerMore();
  }

  offerMore() {
    const { steps, rows, samples } = this.grid, shownSteps = steps.slice(-this.columns);
    const shownRows = rows.slice(0, this.rows).map(({ key }) => key);
    const cut = [...samples.values()].filter((sample) =>
      !shownSteps.includes(sample.step) || !shownRows.includes(rowOf(sample).key)).length;
    const words = say("Show {count} more image", { count: cut }, "Show {count} more images");
    const all = makeButton(words, () => {
      this.columns = this.rows = Infinity;
      this.draw();
    });
    const sheet = make("a", { href: address("learned", { run: this.run }), download: `${this.run}.png` },
      translated("Save as one image"));
    this.more.replaceChildren(make("span", { className: "quiet" }, count(samples.size, "sample image")),
      ...(cut ? [all] : []), ...(steps.length > 1 ? [sheet] : []));
  }

  /**
   * A cell: the existing one unless its image has changed.
   * @param {Row} row
   * @param {number} step
   */
  cell(row, step) {
    const sample = this.grid.samples.get(keyOf(row.key, step));
    const key = `${keyOf(row.key, step)} ${sample?.made}`, before = this.cells.get(key);
    if (before) return before;
    const cell = make("td");
    if (sample) {
      const prompt = wordsOf(row);
      const about = step ? say("Sample of step {step}: {prompt}", { step, prompt })
        : say("Sample of the base model: {prompt}", { prompt });
      const image = make("img", {
        src: this.addressOf(row.key, step, true), alt: "", loading: "lazy", decoding: "async", width: 144, height: 144,
      });
      const button = makeButton("", () => openViewer(() => this.pictures, this.addressOf(row.key, step)), {
        className: "shot", "aria-label": about,
      });
      image.addEventListener("kohya:lost", (event) =>
        button.replaceWith(goneNote(/** @type {CustomEvent<Lost>} */ (event).detail)), { once: true });
      button.append(image);
      cell.append(button);
    }
    this.cells.set(key, cell);
    return cell;
  }

  /**
   * @param {string} row
   * @param {number} step
   * @param {boolean} [small]
   */
  addressOf(row, step, small = false) {
    const { run = "", place = 0, made = 0 } = this.grid.samples.get(keyOf(row, step)) ?? {};
    const query = new URLSearchParams({ of: String(made), ...(small ? { small: "true" } : {}) });
    return addressOfApi(pathOfRun(run, `samples/${place}?${query}`));
  }

  /** @returns {import("./viewer.js").Row[]} */
  get pictures() {
    const { rows, steps, samples } = this.grid;
    return rows.map((row) => ({
      prompt: wordsOf(row),
      shots: steps.filter((step) => samples.has(keyOf(row.key, step))).map((step) =>
        ({ position: step, title: titleOfStep(step), address: this.addressOf(row.key, step) })),
    }));
  }

  /** @returns {HTMLElement} */
  get title() {
    return find(this.element, "h3");
  }
}
