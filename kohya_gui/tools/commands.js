// Commands as forms: collect the values, start the command, and show its processes until they end.
import { progressOf, say } from "../i18n/sentences.js";
import {
  all, around, fieldValue, find, hit, isField, make, makeBar, noteLongerLog, setValue, showMessage, sizeOf,
} from "../server/elements.js";
import { ask, messageOf, wait } from "../server/http.js";
import { countRequests } from "../server/late.js";

/**
 * @typedef {{ id: string, state: string, title: string, about: string, when: string, text: string, done: number,
 *   total: number, bytes: boolean, log: string, longer_log: string, error: string, problems: string[],
 *   warnings: string[] }}
 *   Job a process of a command
 */

/** @type {Record<string, string>} */
const STATES = {
  running: "Running",
  stopping: "Stopping",
  finished: "Finished",
  failed: "Failed",
  stopped: "Stopped",
  interrupted: "Interrupted",
};
/** @type {Record<string, string>} */
const KINDS = { finished: "good", failed: "bad", interrupted: "bad", running: "busy", stopping: "busy" };

/** @param {Job} job */
const busy = (job) => job.state === "running" || job.state === "stopping";

/**
 * The value of a field; a list of files as one `path=weight` per line.
 * @param {HTMLElement} field
 */
export function valueToSend(field) {
  if (isField(field)) return typeof fieldValue(field) === "string" ? field.value.trim() : fieldValue(field);
  return all(field, ".file").map((row) => {
    const [path, weight] = all(row, "input", HTMLInputElement).map((input) => input.value.trim());
    return path && `${path}=${weight || 1}`;
  }).filter(Boolean).join("\n");
}

/** @param {HTMLElement} form */
const values = (form) =>
  Object.fromEntries(all(form, "[data-field]").map((field) => [field.dataset.field, valueToSend(field)]));

/**
 * Keep an empty row at the end of a list of files.
 * @param {HTMLElement} list
 */
export function grow(list) {
  for (const path of all(list, ".file > input:first-of-type", HTMLInputElement)) path.title = path.value;
  const rows = all(list, ".file");
  if (!rows.at(-1)?.querySelector("input")?.value.trim()) return;
  const row = /** @type {HTMLElement} */ (rows[0].cloneNode(true));
  const [path, weight] = row.querySelectorAll("input");
  [path.value, path.title, weight.value] = ["", "", "1"];
  path.id = `${list.dataset.start}-${rows.length}`;
  list.append(row);
}

/**
 * Put files with their weights into an empty list.
 * @param {HTMLElement} list
 * @param {unknown} text as `valueToSend` returns it
 */
function putFiles(list, text) {
  if (typeof text !== "string") return;
  for (const line of text.split("\n").filter(Boolean)) {
    const at = line.lastIndexOf("="), inputs = all(list, ".file", HTMLElement).at(-1)?.querySelectorAll("input");
    if (inputs) [inputs[0].value, inputs[1].value] = [line.slice(0, at), line.slice(at + 1)];
    grow(list);
  }
}

/**
 * @param {Job} job
 * @param {boolean} open whether its output is shown at once
 */
function card(job, open) {
  const shown = job.bytes ? sizeOf : String;
  const lines = job.log
    .trim()
    .split("\n")
    .filter(
      (line) =>
        line &&
        !/^\S.* \(\d+\)$/.test(line) &&
        !job.problems.some((text) => line === `error: ${text}`) &&
        !job.warnings.some((text) => line === `warning: ${text}`));
  const last = job.error ? job.error.split("\n") : [];
  const kind = KINDS[job.state] ?? "";
  const doing = job.total ? progressOf(job.text, shown(job.done), shown(job.total)) : job.text || "Starting";
  return make("div", { className: `card job ${kind}`, "data-job": job.id, "data-state": job.state },
    make("div", { className: "line" },
      make("b", {}, job.title),
      make("small", {}, job.about ? say("{name} · {when}", { name: job.about, when: job.when }) : job.when),
      make("span", { className: "state" }, STATES[job.state] ?? job.state),
      busy(job) &&
        make("button", { type: "button", "data-stop": job.id }, job.state === "stopping" ? "End now" : "Stop")),
    busy(job) && make("p", { className: "quiet" }, doing),
    busy(job) && makeBar("div", job.total ? job.done / job.total : null, doing),
    last.length ? make("p", { className: "cause" }, last.join(" ")) : null,
    ...job.problems.map((text) => make("p", { className: "cause" }, text)),
    ...job.warnings.map((text) => make("p", { className: "quiet" }, text)),
    lines.some((line) => !line.startsWith("error:"))
      ? make("details", { open: open && !busy(job) },
          make("summary", {}, "Output"),
          ...noteLongerLog(job.longer_log),
          make("pre", {}, lines.join("\n")))
      : null);
}

/**
 * Whether the processes' images are shown below their list, which must then not push them down.
 * @param {HTMLElement} where
 */
const isAbove = (where) => where.matches(".sampling *");

/** @type {WeakMap<HTMLElement, string>} */
const shownJobs = new WeakMap(); // content of a card

/**
 * The cards of processes. Unchanged cards keep their element, and so focus and folds.
 * @param {HTMLElement} where
 * @param {Job[]} jobs
 */
function cardsOf(where, jobs) {
  const before = new Map(all(where, "[data-job]").map((element) => [element.dataset.job, element]));
  return jobs.map((job, at) => {
    const open = at === 0 && !(isAbove(where) && job.state === "finished");
    const known = before.get(job.id), shown = JSON.stringify([job, open]);
    if (known && shownJobs.get(known) === shown) return known;
    const element = card(job, open), fold = element.querySelector("details");
    const isSame = known?.dataset.state === job.state;
    if (fold && isSame) fold.open = known.querySelector("details[open]") !== null;
    if (isSame && busy(job)) update(known, element);
    const kept = isSame && busy(job) ? known : element;
    shownJobs.set(kept, shown);
    return kept;
  });
}

/**
 * Show in the card of an active process what a newer card of it shows. Its buttons and folds stay the same elements:
 * they keep the focus, and a press that has begun on them is not lost.
 * @param {HTMLElement} before
 * @param {HTMLElement} element in the same state
 */
function update(before, element) {
  const isFold = (/** @type {Element} */ child) => child.matches("details");
  const [, ...parts] = before.children, [, ...newParts] = element.children;
  const newFold = newParts.find(isFold), fold = newFold ? (parts.find(isFold) ?? null) : null;
  for (const part of parts) if (part !== fold) part.remove();
  for (const part of newParts) if (part !== newFold || !fold) before.insertBefore(part, fold);
  if (!fold || !newFold) return;
  for (const part of [...fold.children].slice(1)) part.remove();
  fold.append(...[...newFold.children].slice(1));
}

/**
 * Set the children of an element without moving those that it has already.
 * @param {HTMLElement} where
 * @param {HTMLElement[]} children
 */
function fill(where, children) {
  for (const element of [...where.children]) if (!children.some((child) => child === element)) element.remove();
  children.forEach((child, at) => {
    if (where.children[at] !== child) where.insertBefore(child, where.children[at] ?? null);
  });
}

/**
 * Show the cards of processes; above images, those that have ended before the newest one in a fold.
 * @param {HTMLElement} where
 * @param {Job[]} jobs
 */
function show(where, jobs) {
  const focused = where.contains(document.activeElement) ? document.activeElement : null;
  const id = focused?.closest("[data-job]")?.getAttribute("data-job");
  const cards = cardsOf(where, jobs);
  const isEarlier = (/** @type {number} */ at) => isAbove(where) && at > 0 && !busy(jobs[at]);
  const earlier = cards.filter((_, at) => isEarlier(at)), newest = cards.filter((_, at) => !isEarlier(at));
  const fold = /** @type {HTMLElement | null} */ (where.querySelector(":scope > .earlier")) ??
    make("details", { className: "earlier" }, make("summary", {}, "Earlier"));
  fill(fold, [find(fold, "summary"), ...earlier]);
  fill(where, [...newest, ...(earlier.length ? [fold] : [])]);
  const card = cards.find(({ dataset }) => dataset.job === id);
  if (card && !focused?.isConnected) focusIn(card, focused?.matches("summary") ?? false);
}

/**
 * Give a card the focus that the one before it had.
 * @param {HTMLElement} element
 * @param {boolean} onFold
 */
function focusIn(element, onFold) {
  const fold = onFold && element.querySelector("summary");
  element.tabIndex = -1;
  (fold || element).focus({ preventScroll: true });
}

/**
 * Have screen readers say what has become of a process.
 * @param {HTMLElement} place
 * @param {Job} job
 */
function announce(place, { title, state, error }) {
  place.replaceChildren(
    make("span", {}, title), ": ", make("span", {}, STATES[state] ?? state), " ", make("span", {}, error || ""));
}

/**
 * Show the last processes of a command, and follow the active ones.
 * @param {HTMLElement} where
 * @param {string} command
 * @param {(job: Job) => void} ended called for each process that ends
 * @param {(job: Job) => void} [changed] called for each active process at every poll
 */
export function watcher(where, command, ended, changed = () => {}) {
  const begin = countRequests();
  /** @type {Set<string>} */
  const working = new Set();
  /** @type {Map<string, string>} */
  const announced = new Map(); // the states of active processes
  const spoken = make("p", { className: "unseen", role: "status" });
  where.before(spoken);
  async function look(begun = "") {
    if (begun) working.add(begun); // it may have ended before the first poll
    const isNewest = begin();
    for (;;) {
      /** @type {Job[]} */
      let jobs;
      try {
        jobs = (await ask("command_list", { command })).jobs;
      } catch {
        if (!isNewest()) return;
        await wait(3000);
        continue;
      }
      if (!isNewest()) return;
      show(where, jobs);
      for (const job of jobs) {
        if ((busy(job) || working.has(job.id)) && announced.get(job.id) !== job.state) announce(spoken, job);
        announced.set(job.id, job.state);
        if (busy(job)) {
          working.add(job.id);
          changed(job);
        } else if (working.delete(job.id)) ended(job);
      }
      if (!working.size || !where.isConnected) return;
      await wait(700);
    }
  }
  where.addEventListener("click", async (event) => {
    const button = hit(event, "[data-stop]", HTMLButtonElement);
    if (!button) return;
    // The next button there ends the process at once: a key that is pressed twice may not reach it.
    if (button === document.activeElement) focusIn(around(button, "[data-job]"), false);
    button.disabled = true;
    await ask("command_stop", { id: button.dataset.stop }).catch(() => {});
    look();
  });
  return look;
}

/**
 * Let a list of ready texts fill an editable field.
 * @param {HTMLSelectElement} list
 * @param {HTMLInputElement} field
 */
function bindTexts(list, field) {
  list.prepend(make("option", { value: "", hidden: true }, "Your own"));
  const choose = () =>
    void (list.value = [...list.options].some(({ value }) => value === field.value) ? field.value : "");
  list.addEventListener("change", () => setValue(field, list.value));
  field.addEventListener("input", choose);
  choose();
}

/**
 * Restore the values the next time the page is opened in this browser.
 * @param {HTMLElement} block
 * @param {HTMLElement[]} forms
 */
function keep(block, forms) {
  const key = `command-${block.dataset.command}`;
  /** @type {Record<string, any>} */
  let stored = {};
  try {
    stored = { ...JSON.parse(localStorage.getItem(key) ?? "{}") };
  } catch {} // without storage the browser only forgets
  for (const form of forms)
    for (const field of all(form, "[data-field]").filter(isField))
      if (field.id in stored) setValue(field, stored[field.id]);
  const lists = forms.flatMap((form) => all(form, ".files[data-field]"));
  for (const list of lists) putFiles(list, stored[list.id]);
  const which = all(block, "input[type=radio]", HTMLInputElement).find(({ value }) => value === stored.which);
  which?.click();
  for (const list of all(block, "[data-fills]", HTMLSelectElement))
    find(block, `#${list.dataset.fills}`, HTMLInputElement).dispatchEvent(new Event("input"));
  block.addEventListener("change", () => {
    const entries = forms
      .flatMap((form) => all(form, "[data-field]").filter(isField))
      .map((field) => [field.id, fieldValue(field)]);
    entries.push(...lists.map((list) => [list.id, valueToSend(list)]));
    const chosen = all(block, "input[type=radio]", HTMLInputElement).find(({ checked }) => checked);
    try {
      localStorage.setItem(key, JSON.stringify({ ...Object.fromEntries(entries), which: chosen?.value ?? "" }));
    } catch {}
  });
}

/**
 * Set up a block of forms.
 * @param {Element} element
 * @param {() => Record<string, unknown>} [more] values without a field
 * @param {(job: Job) => void} [ended] called for each process that ends
 */
export function mount(element, more = () => ({}), ended = () => {}) {
  const block = find(element, ".commands"), command = block.dataset.command ?? "";
  const scope = around(block, ".inside, .tools");
  const answer = find(scope, ".said-of");
  const look = watcher(find(scope, ".jobs"), command, ended);
  const forms = all(block, ".command");
  block.addEventListener("change", ({ target }) => {
    if (isField(target) && target.name === `${command}-which`)
      for (const form of forms) form.hidden = form.dataset.name !== target.value;
  });
  block.addEventListener("input", (event) => {
    const list = hit(event, ".files");
    if (list) grow(list);
  });
  for (const list of all(block, "[data-fills]", HTMLSelectElement))
    bindTexts(list, find(block, `#${list.dataset.fills}`, HTMLInputElement));
  keep(block, forms);
  const go = find(scope, "[data-go]", HTMLButtonElement);
  go.addEventListener("click", async () => {
    const form = forms.find((candidate) => !candidate.hidden) ?? forms[0];
    go.disabled = true;
    try {
      const { id } = await ask("command_begin", {
        command, name: form.dataset.name, values: { ...values(form), ...more() },
      });
      showMessage(answer, "good", "");
      look(id);
    } catch (error) {
      showMessage(answer, "bad", messageOf(error));
    }
    go.disabled = false;
  });
  look();
}
