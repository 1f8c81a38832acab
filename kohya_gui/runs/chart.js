// One chart: its lines, the values under mouse, finger or keyboard, and its zoom.
import { duration } from "../i18n/dates.js";
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { find, make } from "../server/elements.js";
import { short } from "./format.js";

/** @typedef {import("./uplot.js").UPlot} UPlot */
/** @typedef {import("./uplot.js").UPlotClass} UPlotClass */
/** @typedef {import("./chart_data.js").Chart} Chart */
/** @typedef {import("./chart_data.js").Line} Line */
/** @typedef {import("./chart_data.js").View} View */

const HEIGHT = 190, TALL = 320, PHONE = 600; // pixels
const MIN_WIDTH = 200;
const LINE = { line: 1.75, faint: 1, points: 1.25 };
const FAINT_ALPHA = 0.28;
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((unit) => [unit, 2 * unit, 5 * unit]); // steps between two ticks
const OUTLIERS = 0.01; // share of a faint line's values, at each end
const ZOOM = 0.5; // share of the shown range, for each press of + or -

/**
 * The callbacks of a chart's events.
 * @typedef {{ zoomed: (from: OneChart, min: number, max: number) => void, reset: () => void,
 *   nameOf: (run: string) => string }} Group
 */

export class OneChart {
  /**
   * @param {Chart} chart
   * @param {Group} group
   */
  constructor(chart, group) {
    this.chart = chart;
    this.group = group;
    /** @type {UPlot | undefined} */
    this.plot = undefined;
    /** @type {Line[]} */
    this.lines = [];
    this.shape = "";
    /** @type {View} */
    this.view = { hours: false, log: false, smoothing: 0 };
    this.isZoomed = false;
    this.isLed = false; // its scale follows another chart
    this.place = make("div", { className: "plot", tabIndex: 0, role: "slider", "aria-label": translated(chart.title) });
    this.values = make("div", { className: "values" });
    this.element = make("figure", { className: `run-chart ${chart.tall ? "tall" : ""}`, "data-chart": chart.key },
      make("figcaption", {}, make("b", {}, translated(chart.title)), this.values), this.place);
    this.place.addEventListener("keydown", (event) => this.press(event));
    this.place.addEventListener("blur", () => this.point(null));
    for (const kind of /** @type {const} */ (["pointerdown", "pointermove"]))
      this.place.addEventListener(kind, (event) => this.touch(event));
  }

  /**
   * Show lines; the plot is built anew only if their number or their looks have changed.
   * @param {UPlotClass} uPlot
   * @param {Line[]} lines
   * @param {View} view
   */
  show(uPlot, lines, view) {
    this.element.hidden = !lines.length;
    this.lines = lines;
    this.view = view;
    if (!lines.length) return;
    // A logarithmic scale has no place for zero.
    const isPositive = () => lines.every(({ ys }) => ys.every((y) => y === null || y > 0));
    const isLog = view.log && Boolean(this.chart.canBeLog) && isPositive();
    const data = uPlot.join(lines.map(({ xs, ys }) => [xs, ys]));
    const shape = JSON.stringify([isLog, view.hours, lines.map(({ run, label, look, at }) => [run, label, look, at])]);
    if (this.plot && shape === this.shape) this.plot.setData(data, !this.isZoomed);
    else this.build(uPlot, data, isLog);
    this.shape = shape;
    this.showValues();
  }

  /**
   * @param {UPlotClass} uPlot
   * @param {(number | null | undefined)[][]} data
   * @param {boolean} isLog
   */
  build(uPlot, data, isLog) {
    const zoomed = this.isZoomed && this.plot ? { ...this.plot.scales.x } : null;
    this.plot?.destroy();
    const colour = coloursOf(this.element);
    const series = this.lines.map(({ label, look, at }) => ({
      label,
      stroke: colour.line(at),
      alpha: look === "faint" ? FAINT_ALPHA : 1,
      width: LINE[look],
      dash: look === "points" ? [5, 3] : undefined,
      spanGaps: true,
      points: { show: look === "points", size: 7, fill: colour.card },
    }));
    const axis = {
      stroke: colour.quiet, grid: { stroke: colour.edge, width: 1 }, ticks: { stroke: colour.edge, width: 1, size: 4 },
      font: "12px system-ui, sans-serif",
    };
    const texts = (/** @type {UPlot} */ _plot, /** @type {(number | null)[]} */ values) =>
      values.map((value) => (value === null ? "" : short(value, 4)));
    const dot = (/** @type {UPlot} */ _plot, /** @type {number} */ at) => series[at - 1].stroke;
    const range = (/** @type {UPlot} */ plot) => this.range(plot, isLog);
    this.plot = new uPlot({
      width: this.width(), height: this.height(), legend: { show: false }, pxAlign: 1,
      cursor: {
        sync: { key: "runs" }, drag: { x: true, y: false, dist: 6 }, y: false,
        points: { size: 8, fill: dot }, bind: { dblclick: () => () => this.group.reset() },
      },
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, range } },
      axes: [
        { ...axis, size: 28, values: texts, incrs: this.view.hours ? undefined : WHOLE },
        { ...axis, size: 58, values: texts },
      ],
      series: [{}, ...series],
      hooks: {
        setCursor: [() => this.showValues()],
        setScale: [(/** @type {UPlot} */ plot, /** @type {string} */ key) => key === "x" && this.scaled(plot)],
      },
    }, data, this.place);
    if (zoomed) this.plot.setScale("x", zoomed);
  }

  /**
   * The range of the values on screen, without the outliers of faint lines, and with a little space around it.
   * @param {UPlot} plot
   * @param {boolean} isLog
   * @returns {[number, number]}
   */
  range(plot, isLog) {
    const xs = /** @type {number[]} */ (plot.data[0]), { min, max } = plot.scales.x;
    const isSeen = (/** @type {number} */ at) => min === null || min === undefined || (xs[at] >= min && xs[at] <= max);
    const limits = this.lines.flatMap(({ look }, place) => {
      const seen = plot.data[place + 1].filter((y, at) => y !== null && y !== undefined && isSeen(at));
      const sorted = /** @type {number[]} */ (seen).sort((a, b) => a - b);
      const cut = look === "faint" ? Math.floor(sorted.length * OUTLIERS) : 0;
      return sorted.length ? [sorted[cut], sorted[sorted.length - 1 - cut]] : [];
    });
    if (!limits.length) return isLog ? [0.1, 1] : [0, 1];
    const low = Math.min(...limits), high = Math.max(...limits);
    if (isLog) return [roundTo(low, Math.floor), roundTo(high, Math.ceil)];
    const margin = Math.max((high - low) * 0.06, Math.abs(high) * 0.03) || 1;
    return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
  }

  width() {
    return Math.max(MIN_WIDTH, this.place.clientWidth);
  }

  height() {
    return this.chart.tall && innerWidth > PHONE ? TALL : HEIGHT;
  }

  resize() {
    if (this.plot && this.place.clientWidth) this.plot.setSize({ width: this.width(), height: this.height() });
  }

  /** @param {UPlot} plot whose scale has changed */
  scaled(plot) {
    const xs = /** @type {number[]} */ (plot.data[0]), { min, max } = plot.scales.x;
    if (this.isLed || min === null || max === null || xs.length < 2) return;
    const isWhole = min <= xs[0] && max >= xs[xs.length - 1];
    if (isWhole === !this.isZoomed) return this.isZoomed ? this.group.zoomed(this, min, max) : undefined;
    this.isZoomed = !isWhole;
    if (!isWhole) this.group.zoomed(this, min, max);
  }

  /**
   * Follow the zoom of another chart.
   * @param {number} min
   * @param {number} max
   */
  follow(min, max) {
    if (!this.plot) return;
    this.isLed = true;
    this.isZoomed = true;
    this.plot.setScale("x", { min, max });
    this.isLed = false;
  }

  reset() {
    this.isZoomed = false;
    if (!this.plot) return;
    this.isLed = true;
    this.plot.setData(this.plot.data, true);
    this.isLed = false;
  }

  /** Show the values at the cursor, or else the newest of each line. */
  showValues() {
    const plot = this.plot;
    if (!plot) return;
    const xs = /** @type {number[]} */ (plot.data[0]), at = plot.cursor.idx ?? null;
    const texts = this.lines.flatMap((line, place) => {
      if (line.look === "faint") return [];
      const [x, y] = valueNear(plot.data[place + 1], xs, at);
      const name = this.group.nameOf(line.run), text = y === null ? "–" : `${short(y)} ${this.chart.unit}`.trim();
      return [{ line, x, name, text }];
    });
    const x = at === null ? null : xs[at];
    const where = x === null || x === undefined ? "" : this.xText(x);
    this.values.replaceChildren(
      make("span", { className: "where" }, where),
      ...texts.map(({ line, name, text }) => make("span", { className: "value" },
        make("i", { className: `mark c${line.at % 8} ${line.look}` }),
        ...this.label(line.label, name).flatMap((part) => [part, " "]), make("b", {}, text))));
    this.place.setAttribute("aria-valuemin", String(xs[0] ?? 0));
    this.place.setAttribute("aria-valuemax", String(xs[xs.length - 1] ?? 0));
    this.place.setAttribute("aria-valuenow", String(x ?? xs[xs.length - 1] ?? 0));
    const said = texts.map(({ line, name, text }) => `${name} ${translated(line.label)} ${text}`.trim());
    this.place.setAttribute("aria-valuetext", [where || translated("Newest values"), ...said].join(", "));
  }

  /**
   * @param {string} label
   * @param {string} name of the run, "" for the only one
   */
  label(label, name) {
    const parts = name ? [make("span", { className: "own" }, name)] : [];
    const isOnly = this.lines.every((line) => !line.label || line.label === label);
    const isPlain = label === this.chart.title && (name || isOnly);
    return isPlain ? parts : [...parts, make("span", {}, translated(label))];
  }

  /** @param {number} x */
  xText(x) {
    return this.view.hours ? duration(x * 3600) : say("Step {step}", { step: x });
  }

  /**
   * Put the cursor on a point, or with null nowhere.
   * @param {number | null} at
   */
  point(at) {
    const plot = this.plot;
    if (!plot) return;
    if (at === null) return plot.setCursor({ left: -10, top: -10 });
    const xs = /** @type {number[]} */ (plot.data[0]);
    const place = Math.min(xs.length - 1, Math.max(0, at));
    const { min, max } = plot.scales.x, x = xs[place];
    if (x < min || x > max) this.group.zoomed(this, x < min ? x : x - (max - min), x < min ? x + (max - min) : x);
    if (x < min || x > max) this.follow(x < min ? x : x - (max - min), x < min ? x + (max - min) : x);
    plot.setCursor({ left: plot.valToPos(x, "x"), top: 20 });
  }

  /** @param {KeyboardEvent} event */
  press(event) {
    const plot = this.plot, last = (plot?.data[0].length ?? 0) - 1;
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = plot.cursor.idx ?? last, pace = event.shiftKey ? 10 : 1;
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowLeft: () => this.point(at - pace),
      ArrowRight: () => this.point(at + pace),
      Home: () => this.point(0),
      End: () => this.point(last),
      "+": () => this.zoom(ZOOM),
      "=": () => this.zoom(ZOOM),
      "-": () => this.zoom(1 / ZOOM),
      0: () => this.group.reset(),
      Escape: () => this.group.reset(),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  /**
   * Zoom to this share of the shown range, around the cursor.
   * @param {number} share
   */
  zoom(share) {
    const plot = this.plot;
    if (!plot) return;
    const xs = /** @type {number[]} */ (plot.data[0]), { min, max } = plot.scales.x;
    const first = xs[0], last = xs[xs.length - 1], middle = xs[plot.cursor.idx ?? -1] ?? (min + max) / 2;
    const width = (max - min) * share, low = Math.max(first, middle - width / 2), high = Math.min(last, low + width);
    if (high - low >= last - first) return this.group.reset();
    this.follow(low, high);
    this.group.zoomed(this, low, high);
  }

  /** @param {PointerEvent} event of a finger; a mouse moves uPlot's cursor by itself */
  touch(event) {
    if (event.pointerType === "mouse" || !this.plot) return;
    const box = find(this.place, ".u-over").getBoundingClientRect();
    this.plot.setCursor({ left: event.clientX - box.left, top: event.clientY - box.top });
  }
}

/**
 * The value at a place, or the last one before it, as a line continues until its next point.
 * @param {(number | null | undefined)[]} ys
 * @param {number[]} xs
 * @param {number | null} at
 * @returns {[number | null, number | null]}
 */
function valueNear(ys, xs, at) {
  for (let place = at ?? ys.length - 1; place >= 0; place--) {
    const y = ys[place];
    if (y !== null && y !== undefined) return [xs[place], y];
  }
  return [null, null];
}

/**
 * A round number beside a positive one: 1, 2 or 5 times a power of ten.
 * @param {number} value
 * @param {(place: number) => number} direction
 */
function roundTo(value, direction) {
  const power = 10 ** Math.floor(Math.log10(value)), marks = [1, 2, 5, 10].map((mark) => mark * power);
  return direction === Math.floor
    ? (marks.findLast((mark) => mark <= value) ?? power)
    : (marks.find((mark) => mark >= value) ?? 10 * power);
}

/**
 * The page's colours, which a canvas cannot take by their names.
 * @param {HTMLElement} element
 */
function coloursOf(element) {
  const style = getComputedStyle(element.isConnected ? element : document.body);
  const named = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
  return {
    quiet: named("--quiet"), edge: named("--edge"), card: named("--card"),
    line: (/** @type {number} */ at) => named(`--line-${at % 8}`) || named("--accent"),
  };
}
