// The Lab: starts measurements and shows their results.
import { read } from "../form/messages.js";
import * as form from "../form/page.js";
import { progressOf, say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { all, find, finder, make, makeBar, makeButton, noteLongerLog, showMessage } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { countRequests, keepOrder } from "../server/late.js";
import { go } from "../server/addresses.js";

/**
 * @typedef {{ id: string, kind: string, title: string, state: string, mood: string, busy: boolean, took: string,
 *   folder: string, error: string, log: string, longer_log: string, body: any,
 *   doing: { text: string, done: number, total: number } }} Job
 *   a measurement; the shape of its body depends on its kind
 */
/**
 * @typedef {{ name: string, isVariant: boolean, share: number, far: number, best: boolean, p50: string, p90: string,
 *   speed: string, memory: string, mfu: string, compiled: string }} Row
 */

const PERIOD = 1200, RESTING = 6000; // milliseconds between requests while a measurement runs, and otherwise
/** @type {HTMLElement | undefined} */
let place;
let shown = "", looked = 0, busy = false, pickedJob = "", target = "";
const beginLook = keepOrder(), beginAct = countRequests();
/** @type {[string, string][]} id and title of each training tab */
let tabs = [];

const part = finder(() => place ?? document);
const answer = () => part(".answer");
const chosen = () => part("#lab-model", HTMLSelectElement).value;

/** @param {Element} element */
export function mount(element) {
  place = find(element, ".lab");
  shown = "";
  part("form").addEventListener("submit", (event) => event.preventDefault());
  for (const button of all(place, "[data-lab]"))
    button.addEventListener("click", () => start(button.dataset.lab ?? ""));
  const picker = part("#lab-job", HTMLSelectElement);
  picker.addEventListener("change", () => {
    pickedJob = picker.value;
    look();
  });
  part("#lab-model").addEventListener("change", settle);
  settle();
  look();
}

setInterval(() => {
  const visible = place?.isConnected && document.visibilityState === "visible" && place.checkVisibility();
  if (visible && Date.now() - looked >= (busy ? PERIOD : RESTING)) look();
}, 400);

/** Hide the batch size if a form is measured, which has its own. */
function settle() {
  part("#lab-batch", HTMLInputElement).disabled = tabs.some(([tab]) => tab === chosen());
}

async function look() {
  looked = Date.now();
  const take = beginLook();
  try {
    const measurements = await ask("lab", { job: pickedJob });
    if (take()) show(measurements);
  } catch (error) {
    if (take()) showMessage(answer(), "bad", messageOf(error));
  }
}

/** @param {string} kind */
async function start(kind) {
  const model = chosen(), size = part("#lab-batch", HTMLInputElement), batch = Number(size.value);
  const value = (/** @type {string} */ id) => /** @type {HTMLInputElement | HTMLSelectElement} */ (part(id)).value;
  await act("lab-start", {
    kind, model, sizes: value("#lab-sizes"), extent: value("#lab-extent"), ways: value("#lab-ways"),
    batch: Number.isInteger(batch) && batch > 0 ? batch : 0, clean: kind === "cache",
    ...(size.disabled ? { form: read(model) } : {}),
  });
}

/**
 * @param {string} name
 * @param {Record<string, unknown>} question
 */
async function act(name, question) {
  const isNewest = beginAct(), tell = (/** @type {"" | "bad"} */ kind, /** @type {string} */ text) =>
    void (isNewest() && showMessage(answer(), kind, text)); // keep the answer to a later press
  try {
    const { job } = await ask(name, question);
    tell("", "");
    pickedJob = job ?? pickedJob;
  } catch (error) {
    tell("bad", messageOf(error));
  }
  await look();
}

/**
 * Put the best settings found into the form of a training tab, and open it.
 * @param {string} job
 * @param {number} [number] of the finding
 */
async function apply(job, number = 0) {
  const tab = target;
  try {
    const { values, said: sentence } = await ask("lab-apply", { job, tab, number });
    await go(`train/${tab}`);
    form.apply(tab, values);
    showMessage(answer(), "good", sentence);
  } catch (error) {
    showMessage(answer(), "bad", messageOf(error));
  }
}

// ---- results

/** @param {{ jobs: Job[], tabs: [string, string][], shown: Job | null }} found */
function show({ jobs, tabs: trainingTabs, shown: job }) {
  tabs = trainingTabs;
  target ||= tabs[0][0];
  settle();
  busy = jobs.some((measurement) => measurement.busy);
  const now = JSON.stringify([jobs, job]);
  if (now === shown) return;
  shown = now;
  part(".found").hidden = !job;
  for (const button of all(place ?? document, "[data-lab]", HTMLButtonElement)) button.disabled = busy;
  if (!job) return;
  const picker = part("#lab-job");
  picker.replaceChildren(
    ...jobs.map(({ id, title }) => make("option", { value: id, selected: id === job.id }, title)));
  part(".which").hidden = jobs.length < 2;
  part(".now").replaceChildren(...head(job));
  part(".body").replaceChildren(...(job.body ? (RENDERERS[job.kind]?.(job.body, job) ?? []) : []));
}

/** @param {Job} job */
function head(job) {
  const { text, done, total } = job.doing;
  const stop = () => {
    showMessage(answer(), "plain", translated("Stopping"));
    act("lab-stop", { job: job.id });
  };
  const line = make("div", { className: "who" },
    make("span", { className: "state" }, translated(job.state)),
    make("strong", {}, translated(job.title)), // <b> is a name, which is not translated
    make("small", {}, job.took),
    job.busy && makeButton(translated("Stop"), stop, { className: "stop" }));
  /** @type {HTMLElement[]} */
  const parts = [make("div", { className: `run ${job.mood}` }, line)];
  if (job.busy) {
    parts.push(
      make("div", { className: "line" }, make("span", {}, text), make("span", {}, total ? `${done} / ${total}` : "")),
      makeBar("div", total ? done / total : null, total ? progressOf(text, done, total) : text));
  }
  if (job.error) parts.push(make("div", { className: "cause", role: "alert" }, make("ul", {}, lines(job.error))));
  if (job.log) parts.push(make("details", {}, make("summary", {}, translated("Log")),
    ...noteLongerLog(job.longer_log), make("pre", {}, job.log)));
  return parts;
}

/** @param {string} text */
const lines = (text) => text.split("\n").filter(Boolean).map((line) => make("li", {}, line));

/** The list of forms to apply results to; chosen once for all measurements. */
function targets() {
  const choices = make("select", { id: "lab-tab" },
    tabs.map(([id, title]) => make("option", { value: id, selected: id === target }, title)));
  choices.addEventListener("change", () => {
    target = choices.value;
  });
  return make("div", { className: "target" }, make("label", { for: "lab-tab" }, translated("Form")), choices);
}

/** @param {string[]} texts */
const heading = (texts) =>
  make("p", { className: "heading" },
    texts.flatMap((text, i) => /** @type {(Node | string)[]} */ (i ? [make("br"), text] : [make("b", {}, text)])));

/**
 * The verdict, and buttons that apply it to a form.
 * @param {string} verdict
 * @param {string} label
 * @param {Job} job
 */
const advice = (verdict, label, job) => make("div", { className: "advice" }, make("p", {}, verdict),
  ...(job.body.apply ? [targets(), makeButton(translated(label), () => apply(job.id), { className: "primary" })] : []));

/**
 * @param {{ heading: string[], verdict: string, groups: { title: string, rows: Row[] }[], notes: string[],
 *   about: [string, string][] }} body
 * @param {Job} job
 */
function bench(body, job) {
  /** @type {HTMLElement[]} */
  const parts = [heading(body.heading)];
  if (body.verdict) parts.push(advice(body.verdict, "Apply the best to my config", job));
  const columns = ["Speed", "Memory", "MFU", "Compiling"].filter((name) =>
    body.groups.some((group) => group.rows.some((row) => cell(row, name))));
  for (const group of body.groups) parts.push(chart(group, ["Variant", "Time", ...columns]));
  if (body.notes.length) parts.push(make("ul", { className: "notes" }, body.notes.map((note) => make("li", {}, note))));
  parts.push(make("details", {}, make("summary", {}, translated("What is compared")),
    make("dl", {}, body.about.flatMap(([name, about]) =>
      [make("dt", {}, make("code", {}, name)), make("dd", {}, about)]))));
  return [...parts, files(job)];
}

/**
 * A table whose second column is a bar: the median, and a thin line to the 90th percentile.
 * @param {{ title: string, rows: Row[] }} group
 * @param {string[]} columns
 */
function chart({ title, rows }, columns) {
  const body = rows.map((row) =>
    make("tr", { className: row.best ? "best" : "" },
      columns.map((name, i) => {
        if (i === 1)
          return make("td", { className: "timed" },
            bar(row),
            make("span", { className: "time", title: row.p90 && `p90 ${row.p90}` }, row.p50));
        const text = cell(row, name);
        return make(i ? "td" : "th", { "data-name": name, "data-label": name, title: i ? "" : row.name },
          i || !row.isVariant ? text : make("code", {}, text)); // the name of a variant is not translated
      })));
  return make("table", { className: "bars" },
    make("caption", {}, title),
    make("thead", {},
      make("tr", {},
        columns.map((name) => make("th", { scope: "col", "data-of": name }, translated(name))))),
    make("tbody", {}, body));
}

/**
 * @param {Row} row
 * @param {string} column
 */
function cell(row, column) {
  /** @type {Record<string, string>} */
  const cells = { Speed: row.speed, Memory: row.memory, MFU: row.mfu, Compiling: row.compiled };
  return cells[column] ?? row.name;
}

/** @param {Row} row */
function bar(row) {
  const solid = make("i"), thin = make("u");
  solid.style.width = `${100 * row.share}%`;
  thin.style.width = `${100 * row.far}%`;
  return make("span", { className: "bar", "aria-hidden": true }, thin, solid);
}

/**
 * @param {{ heading: string[], verdict: { text: string, options: string }[], kinds: { name: string, share: number }[],
 *   step: string, operations: string[][] }} body
 * @param {Job} job
 */
function profile(body, job) {
  const items = body.verdict.map((finding, i) =>
    make("li", {},
      make("p", {}, finding.text),
      finding.options && makeButton(say("Apply: {options}", { options: finding.options }), () => apply(job.id, i))));
  const rows = body.kinds.map((kind) => ({
    name: kind.name, share: kind.share, far: kind.share, best: false, p50: `${(100 * kind.share).toFixed(1)}%`,
    p90: "", isVariant: false, speed: "", memory: "", mfu: "", compiled: "",
  }));
  const choice = body.verdict.some((finding) => finding.options) ? targets() : null;
  return [heading(body.heading), make("p", { className: "step" }, body.step),
    make("ol", { className: "advice" }, items), ...(choice ? [choice] : []),
    chart({ title: translated("Where the time goes"), rows }, ["Kind", "Share"]),
    table(
      translated("The longest operations of a step"),
      ["Operation", "Kind", "Calls", "ms", "Share"],
      body.operations),
    files(job),
  ];
}

/**
 * @param {string} title
 * @param {string[]} columns
 * @param {string[][]} rows
 */
function table(title, columns, rows) {
  return make("div", { className: "wide" },
    make("table", { className: "plain" },
      make("caption", {}, title),
      make("thead", {},
        make("tr", {},
          columns.map((name) => make("th", { scope: "col" }, translated(name))))),
      make("tbody", {},
        rows.map((row) =>
          make("tr", {},
            row.map((text, i) => make("td", { className: i > 1 ? "number" : "" }, text)))))));
}

/** @param {Job} job */
const files = (job) => make("p", { className: "files" }, say("Files: {folder}", { folder: job.folder }));

/** @type {Record<string, string>} */
const MARKS = { ok: "✓", hint: "·", bad: "✗" };

/**
 * @param {{ findings: { verdict: string, topic: string, text: string }[], verdict: string }} body
 * @param {Job} job
 */
function doctor(body, job) {
  const entries = body.findings.map((finding) =>
    make("div", { className: finding.verdict },
      make("dt", {},
        make("span", { className: "mark", "aria-label": finding.verdict }, MARKS[finding.verdict] ?? "·"),
        finding.topic),
      make("dd", {}, finding.text)));
  const list = make("dl", { className: "findings" }, entries);
  return body.verdict ? [advice(translated(body.verdict), "Apply these settings to my config", job), list] : [list];
}

/** @param {{ verdict: string, rows: string[][] }} body */
function cache(body) {
  return [make("p", { className: "step" }, body.verdict),
    ...(body.rows.length ? [table(translated("Kept"), ["Made with", "Size", "Last used"], body.rows)] : [])];
}

/** @type {Record<string, (body: any, job: Job) => HTMLElement[]>} By the kind of a measurement. */
const RENDERERS = { bench, profile, doctor, cache };
