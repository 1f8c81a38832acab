// The data of the charts: points from the server, and the lines that each chart draws.

/**
 * @typedef {{ steps: number[], seconds: number[], values: Record<string, (number | null)[]> }} Columns
 * @typedef {{ generation: number, from: [number, number], steps: Columns, checks: Columns, resumed: number[],
 *   likeness: [number, number][], name: string, active: boolean }} Series as `RunSeries.since` in series.py sends it
 * @typedef {{ run: string, label: string, xs: number[], ys: (number | null)[], look: "line" | "faint" | "points",
 *   at: number }} Line of a chart; `at` is the place of its colour
 * @typedef {Omit<Line, "run" | "at">} PlainLine
 * @typedef {{ key: string, title: string, unit: string, tall?: boolean, canBeLog?: boolean,
 *   lines: (series: Series, view: View) => PlainLine[] }} Chart
 * @typedef {{ hours: boolean, log: boolean, smoothing: number }} View
 */

const MAX_WEIGHT = 0.99; // share of earlier values, with the slider at its end

/**
 * Add points from the server to the existing ones.
 * @param {Series | undefined} before
 * @param {Series} news
 * @returns {Series}
 */
export function joined(before, news) {
  if (!before || before.generation !== news.generation) return news;
  const [steps, checks] = news.from;
  return {
    ...news, steps: extended(before.steps, news.steps, steps), checks: extended(before.checks, news.checks, checks),
  };
}

/**
 * @param {Columns} before
 * @param {Columns} news
 * @param {number} at how many points of `before` stay
 * @returns {Columns}
 */
function extended(before, news, at) {
  const names = new Set([...Object.keys(before.values), ...Object.keys(news.values)]);
  const none = (/** @type {number} */ many) => Array.from({ length: many }, () => null);
  const values = [...names].map((name) => [
    name,
    [...(before.values[name]?.slice(0, at) ?? none(at)), ...(news.values[name] ?? none(news.steps.length))],
  ]);
  return {
    steps: [...before.steps.slice(0, at), ...news.steps],
    seconds: [...before.seconds.slice(0, at), ...news.seconds],
    values: Object.fromEntries(values),
  };
}

/**
 * The numbers of a run's existing points, for the next request.
 * @param {Series | undefined} series
 */
export const got = (series) =>
  series ? `${series.generation} ${series.steps.steps.length} ${series.checks.steps.length}` : "";

/**
 * A running mean, over fewer values at the start.
 * @param {(number | null)[]} values
 * @param {number} smoothing from 0 to 1
 */
export function smoothed(values, smoothing) {
  const weight = MAX_WEIGHT * smoothing ** 0.3;
  let sum = 0, share = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    share = share * weight + 1 - weight;
    return sum / share;
  });
}

/**
 * @param {Columns} columns
 * @param {View} view
 */
const across = ({ steps, seconds }, { hours }) => (hours ? seconds.map((second) => second / 3600) : steps);

/**
 * One column as lines: faint for measured and strong for smoothed values, or one strong line without smoothing.
 * @param {Series} series
 * @param {View} view
 * @param {string} name
 * @param {string} label
 * @returns {PlainLine[]}
 */
function measured({ steps }, view, name, label) {
  const values = steps.values[name];
  if (!values) return [];
  const places = values.flatMap((value, at) => (value === null ? [] : [at]));
  const xs = across(steps, view), known = places.map((at) => values[at]);
  const line = { label, xs: places.map((at) => xs[at]) };
  if (!view.smoothing) return [{ ...line, ys: known, look: "line" }];
  const smooth = smoothed(known, view.smoothing);
  return [{ ...line, label: "", ys: known, look: "faint" }, { ...line, ys: smooth, look: "line" }];
}

/**
 * The time at which a step was reached, between those of its neighbours.
 * @param {Columns} columns
 * @param {number} step
 */
function secondsAt({ steps, seconds }, step) {
  const at = steps.findIndex((other) => other >= step);
  return seconds[at < 0 ? seconds.length - 1 : at] ?? 0;
}

/** @type {Chart[]} */
export const CHARTS = [
  {
    key: "loss", title: "Loss", unit: "", tall: true, canBeLog: true,
    lines: (series, view) => {
      const lines = measured(series, view, "loss", "Loss"), checks = series.checks;
      if (!checks.steps.length) return lines;
      return [...lines,
        { label: "Held-out loss", xs: across(checks, view), ys: checks.values.loss ?? [], look: "points" }];
    },
  },
  {
    key: "rate", title: "Learning rate", unit: "", canBeLog: true,
    lines: (series, view) => Object.keys(series.steps.values)
      .filter((name) => name.split(" ")[0] === "rate")
      .flatMap((name) => measured(series, { ...view, smoothing: 0 }, name, name.slice(5) || "Learning rate")),
  },
  {
    key: "gradient", title: "Gradient norm", unit: "", canBeLog: true,
    lines: (series, view) => measured(series, view, "gradient", "Gradient norm"),
  },
  {
    key: "pace", title: "Seconds per step", unit: "s",
    lines: (series, view) => measured(series, view, "pace", "Seconds per step"),
  },
  {
    key: "memory", title: "Memory", unit: "GB",
    lines: (series, view) => measured(series, { ...view, smoothing: 0 }, "memory", "Memory"),
  },
  {
    key: "likeness", title: "Likeness to the training images", unit: "",
    lines: ({ likeness, steps }, { hours }) => likeness.length
      ? [{
        label: "Likeness", look: "points", ys: likeness.map(([, value]) => value),
        xs: likeness.map(([step]) => (hours ? secondsAt(steps, step) / 3600 : step)),
      }]
      : [],
  },
];

/**
 * The lines of a chart, of all runs.
 * @param {Chart} chart
 * @param {Map<string, Series>} runs
 * @param {View} view
 * @returns {Line[]}
 */
export function linesOf(chart, runs, view) {
  return [...runs].flatMap(([run, series], place) => {
    const lines = chart.lines(series, view), labels = [...new Set(lines.map(({ label }) => label).filter(Boolean))];
    // One run has a colour for each line, several have one for each run.
    const at = (/** @type {string} */ label) => Math.max(0, labels.indexOf(label));
    return lines.map((line) => ({ ...line, run, at: runs.size > 1 ? place : at(line.label) }));
  });
}
