// All charts of one run, or of several overlaid, and the controls for drawing them.
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { find, make, makeButton } from "../server/elements.js";
import { call, messageOf, pathOfRun } from "../server/http.js";
import { OneChart } from "./chart.js";
import { CHARTS, got, joined, linesOf } from "./chart_data.js";
import { nameAmong, short } from "./format.js";
import { loadUPlot } from "./uplot.js";

/** @typedef {import("./chart_data.js").Series} Series */
/** @typedef {import("./chart_data.js").View} View */

const MAX_OVERLAID = 8;

/** @type {View} kept for the next run that is looked at */
const view = { hours: false, log: false, smoothing: 0.5 };

export class RunCharts {
  /**
   * @param {HTMLElement} room
   * @param {string[]} runs
   * @param {() => { id: string, name: string }[]} others runs that can be laid over these
   */
  constructor(room, runs, others) {
    this.room = room;
    this.runs = [...runs];
    this.first = runs.length;
    this.others = others;
    /** @type {Map<string, Series>} */
    this.series = new Map();
    this.isAsking = false;
    const group = {
      zoomed: (/** @type {OneChart} */ from, /** @type {number} */ min, /** @type {number} */ max) => {
        for (const chart of this.charts) if (chart !== from) chart.follow(min, max);
        this.markZoom();
      },
      reset: () => this.resetZoom(),
      nameOf: (/** @type {string} */ run) => (this.runs.length > 1 ? this.nameOf(run) : ""),
    };
    this.charts = CHARTS.map((chart) => new OneChart(chart, group));
    this.notice = make("p", { className: "quiet", role: "status" }, translated("Reading the measurements"));
    this.table = make("details", { className: "values-table" }, make("summary", {}, translated("Values as a table")));
    this.table.addEventListener("toggle", () => this.fillTable());
    this.element = make("section", { className: "run-charts", "aria-label": translated("Charts") },
      make("div", { className: "section-head" }, make("h3", {}, translated("Charts")), this.bar()), this.notice,
      make("div", { className: "plots" }, ...this.charts.map(({ element }) => element)), this.table);
    for (const chart of this.charts) chart.element.hidden = true;
    this.sizes = new ResizeObserver(() => this.charts.forEach((chart) => chart.resize()));
    this.sizes.observe(find(this.element, ".plots"));
    this.looks = new MutationObserver(() => this.rebuild()); // light and dark
    this.looks.observe(document.body, { attributeFilter: ["class"] });
  }

  /** The controls above the charts. */
  bar() {
    const steps = makeButton(translated("Steps"), () => this.setHours(false));
    const hours = makeButton(translated("Hours"), () => this.setHours(true));
    this.axis = [steps, hours];
    const log = make("input", { type: "checkbox", checked: view.log });
    log.addEventListener("change", () => {
      view.log = log.checked;
      this.draw();
    });
    const smoothing = make("input", { type: "range", min: "0", max: "100", value: String(view.smoothing * 100) });
    smoothing.addEventListener("input", () => {
      view.smoothing = Number(smoothing.value) / 100;
      this.draw();
    });
    this.whole = makeButton(translated("Show all"), () => this.resetZoom(), { className: "whole", hidden: true });
    this.over = make("select", { className: "over", "aria-label": translated("Lay another run over it") });
    this.over.addEventListener("change", () => this.over && this.add(this.over.value));
    this.markAxis();
    return make("div", { className: "chart-bar" },
      make("div", { className: "segments", role: "group", "aria-label": translated("Across") }, steps, hours),
      make("label", {}, log, make("span", {}, translated("Log scale"))),
      make("label", { className: "smooth" }, make("span", {}, translated("Smoothing")), smoothing),
      this.over, this.whole);
  }

  /** @param {string} run one of those shown */
  nameOf(run) {
    return nameAmong(run, this.runs, (id) => this.series.get(id)?.name ?? id);
  }

  /** Offer to add runs that are not shown, and to remove added ones. */
  fillOthers() {
    const added = this.runs.slice(this.first), rest = this.others().filter(({ id }) => !this.runs.includes(id));
    const key = JSON.stringify([added, rest.map(({ id }) => id)]);
    if (!this.over || this.over.dataset.filled === key) return;
    this.over.dataset.filled = key;
    this.over.replaceChildren(
      make("option", { value: "" }, translated("Lay over …")),
      ...added.map((id) => make("option", { value: id }, say("Without {name}", { name: this.nameOf(id) }))),
      ...rest.slice(0, 200).map(({ id, name }) => make("option", { value: id }, `${name} (${id.slice(-20)})`)));
    this.over.hidden = !rest.length && !added.length;
  }

  /** @param {string} run laid over, or taken away again */
  add(run) {
    if (!run) return;
    if (this.runs.includes(run)) {
      this.runs = this.runs.filter((id) => id !== run);
      this.series.delete(run);
    } else if (this.runs.length < MAX_OVERLAID) this.runs.push(run);
    void this.update();
  }

  /** @param {boolean} hours */
  setHours(hours) {
    view.hours = hours;
    for (const chart of this.charts) chart.reset();
    this.markAxis();
    this.draw();
  }

  markAxis() {
    this.axis?.forEach((button, at) => button.setAttribute("aria-pressed", String(Boolean(at) === view.hours)));
  }

  /** Ask for new points, and draw them. Returns whether a run is still active. */
  async update() {
    if (this.isAsking) return true;
    this.isAsking = true;
    try {
      const shown = [...this.runs];
      const [uPlot, ...answers] = await Promise.all([loadUPlot(this.room), ...shown.map((run) =>
        call(pathOfRun(run, `series?${new URLSearchParams({ since: got(this.series.get(run)) })}`)))]);
      this.uPlot = uPlot;
      this.series = new Map(shown.map((run, at) => [run, joined(this.series.get(run), answers[at])]));
      this.draw();
      return [...this.series.values()].some(({ active }) => active);
    } catch (error) {
      this.notice.textContent = messageOf(error);
      this.notice.hidden = false;
      return true;
    } finally {
      this.isAsking = false;
    }
  }

  draw() {
    if (!this.uPlot || !this.element.isConnected) return;
    for (const chart of this.charts) chart.show(this.uPlot, linesOf(chart.chart, this.series, view), { ...view });
    const isEmpty = this.charts.every(({ lines }) => !lines.length);
    this.notice.hidden = !isEmpty;
    if (isEmpty)
      this.notice.textContent = translated("Nothing has been measured yet: charts begin with the first step.");
    this.table.hidden = isEmpty;
    this.fillOthers();
    this.fillTable();
  }

  rebuild() {
    for (const chart of this.charts) chart.shape = "";
    this.draw();
  }

  markZoom() {
    if (this.whole) this.whole.hidden = !this.charts.some(({ isZoomed }) => isZoomed);
  }

  resetZoom() {
    for (const chart of this.charts) chart.reset();
    this.markZoom();
  }

  /** The charts as a table, for screen readers. */
  fillTable() {
    if (!(/** @type {HTMLDetailsElement} */ (this.table).open)) return;
    const rows = this.charts.flatMap(({ chart, lines }) => lines.filter(({ look }) => look !== "faint").map((line) => {
      const known = line.ys.filter((y) => y !== null), first = known[0] ?? null, last = known.at(-1) ?? null;
      const lowest = known.length ? known.reduce((low, y) => Math.min(low, y)) : null;
      const run = this.runs.length > 1 ? this.nameOf(line.run) : "";
      const name = run ? [make("span", { className: "own" }, run), " "] : [];
      const label = line.label === chart.title ? "" : translated(line.label);
      return make("tr", {}, make("th", { scope: "row" }, ...name, make("span", {}, translated(chart.title)), " ",
        make("span", {}, label)), ...[first, lowest, last].map((value) => make("td", {}, short(value))));
    }));
    const heads = ["Measured", "First", "Lowest", "Newest"].map((title) =>
      make("th", { scope: "col" }, translated(title)));
    const table = make("table", {}, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, rows));
    this.table.querySelector("table")?.remove();
    this.table.append(table);
  }

  remove() {
    this.sizes.disconnect();
    this.looks.disconnect();
    for (const chart of this.charts) chart.plot?.destroy();
  }
}
