// The page of one run, or of several whose charts lie over each other.
import { count, say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { find, make, makeButton } from "../server/elements.js";
import { address, ask, messageOf } from "../server/http.js";
import { RunCharts } from "./charts.js";
import { Differences } from "./differences.js";
import { nameAmong } from "./format.js";
import { Gallery } from "./gallery.js";
import { Note } from "./note.js";
import { knownRuns } from "./table.js";

/**
 * @typedef {{ parts: Record<string, string>, shown: string, name: string, active: boolean, note: string,
 *   sample: string, here: boolean }} Answer
 */

const BESIDE = ["numbers", "usage", "history"];
const IDLE = 5; // polls between two requests of an ended run

export class RunPage {
  /**
   * @param {HTMLElement} room
   * @param {string[]} runs
   */
  constructor(room, runs) {
    this.runs = runs;
    this.marks = "";
    this.looks = 0;
    this.isActive = true;
    this.isAsking = false;
    this.charts = new RunCharts(room, runs, () => knownRuns().map(({ id, name }) => ({ id, name })));
    this.settings = new Differences(runs);
    this.galleries = runs.map((run) => new Gallery(run));
    this.note = new Note(runs[0]);
    this.lost = make("p", { className: "lost", role: "alert", hidden: true });
    this.title = make("h2", { className: "title", tabIndex: -1 });
    this.element = make("div", { className: runs.length > 1 ? "run-body several" : "run-body" },
      make("nav", { "aria-label": translated("Where you are") }, make("a", { href: "#runs", className: "back" },
        translated("All runs")), make("span", { className: "slash" }, "/"), this.title),
      this.lost, ...(runs.length > 1 ? this.several() : this.alone()));
  }

  /** The view of one run. */
  alone() {
    const part = (/** @type {string} */ name) => make("div", { "data-part": name });
    this.log = make("details", { className: "log" }, make("summary", {}, translated("Log")),
      make("div", { "data-part": "log", tabIndex: 0, role: "group", "aria-label": translated("Log") }));
    this.log.addEventListener("toggle", () => this.update(true));
    this.does = make("div", { className: "does" });
    const top = make("section", { className: "run-top card" }, part("head"), make("div", { className: "acting" },
      part("acts"), this.does));
    const side = make("aside", { className: "beside", "aria-label": translated("About this run") }, this.note.element,
      ...BESIDE.map((name) => make("div", { className: "card padded", "data-card": name }, part(name))));
    return [top, make("div", { className: "columns" }, make("div", { className: "main" }, this.galleries[0].element,
      this.charts.element, this.settings.element, this.log), side)];
  }

  /** The view of several runs. */
  several() {
    return [this.charts.element, this.settings.element, ...this.galleries.map(({ element }) => element)];
  }

  /** Request everything; throws an error if the run does not exist. */
  async begin() {
    await this.look();
    void this.settings.load();
    void this.charts.update();
  }

  /**
   * Request changes, less often for an ended run.
   * @param {boolean} [now]
   */
  async update(now = false) {
    if (this.isAsking || (!now && !this.isActive && ++this.looks % IDLE)) return;
    this.isAsking = true;
    try {
      await this.look();
      this.lost.hidden = true;
      if (this.isActive || now) await this.charts.update();
    } catch (error) {
      this.lost.hidden = false;
      this.lost.textContent = messageOf(error);
    } finally {
      this.isAsking = false;
    }
  }

  async look() {
    const wasActive = this.isActive;
    if (this.runs.length > 1) await this.lookAtAll();
    else this.show(await ask("run", { run: this.runs[0], shown: this.marks, log: Boolean(this.log?.open) }));
    if (wasActive && !this.isActive) void this.charts.update(); // the last points
  }

  async lookAtAll() {
    const answers = await Promise.all(this.runs.map((run) => ask("run", { run, shown: "" })));
    this.isActive = answers.some(({ active }) => active);
    this.title.textContent = count(this.runs.length, "run");
    const names = new Map(answers.map(({ name }, at) => [this.runs[at], name]));
    answers.forEach((answer, at) => {
      const shown = nameAmong(this.runs[at], this.runs, (id) => names.get(id) ?? id);
      const name = make("span", { className: "own" }, shown);
      this.galleries[at].element.setAttribute("aria-label", say("Samples of {name}", { name: shown }));
      this.galleries[at].title.replaceChildren(translated("Samples"), " · ", name);
      void this.galleries[at].update(answer.sample);
    });
  }

  /** @param {Answer} answer */
  show(answer) {
    for (const [name, markup] of Object.entries(answer.parts)) this.put(name, markup);
    this.marks = answer.shown;
    this.isActive = answer.active;
    this.title.replaceChildren(make("span", { className: "own" }, answer.name));
    this.note.show(answer.note);
    void this.galleries[0].update(answer.sample);
    if (!this.does?.children.length) {
      const file = address("run-export", { run: this.runs[0] });
      this.does?.append(make("a", { className: "button", href: file, download: "" }, translated("Export")));
      if (answer.here) this.does?.append(makeButton(translated("Open the run's folder"), () => this.openFolder()));
    }
  }

  /**
   * @param {string} name
   * @param {string} markup that the server has rendered
   */
  put(name, markup) {
    const part = find(this.element, `[data-part=${name}]`);
    const follows = name === "log" && part.scrollHeight - part.scrollTop - part.clientHeight < 20;
    const focused = document.activeElement instanceof HTMLElement && part.contains(document.activeElement);
    const act = focused ? /** @type {HTMLElement} */ (document.activeElement).dataset.act : "";
    part.innerHTML = markup;
    if (follows) part.scrollTop = part.scrollHeight; // unless the user has scrolled up
    const same = act ? (part.querySelector(`[data-act="${act}"]`) ?? part.querySelector("button")) : null;
    if (same instanceof HTMLElement) same.focus({ preventScroll: true });
    const card = part.closest("[data-card]");
    if (card instanceof HTMLElement) card.hidden = !markup;
  }

  async openFolder() {
    const answer = find(this.element, ".acts .answer");
    try {
      answer.textContent = (await ask("run-folder", { run: this.runs[0] })).said;
      answer.classList.remove("bad");
    } catch (error) {
      answer.textContent = messageOf(error);
      answer.classList.add("bad");
    }
  }

  remove() {
    void this.note.store();
    this.charts.remove();
    this.element.remove();
  }
}
