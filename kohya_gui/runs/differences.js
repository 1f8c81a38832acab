// The settings in which a run differs from a preset or another run, or several runs from each other.
import { valueCell } from "../form/compare.js";
import { count, say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { make, makeButton } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { noteSubject } from "../server/late.js";

/** @typedef {{ titles: string[], rows: string[][] }} Found each row: name, label, and the values of all sides */

const MAX_ROWS = 14; // initially shown

export class Differences {
  /** @param {string[]} runs */
  constructor(runs) {
    this.runs = runs;
    this.other = make("select", { "aria-label": translated("Compare the settings with") });
    this.other.addEventListener("change", () => this.compare());
    this.answer = make("div", { className: "differences" });
    this.element = make("section", { className: "run-settings" },
      make("div", { className: "section-head" }, make("h3", {}, translated("Settings")),
        ...(runs.length > 1 ? [] : [make("label", {}, make("span", {}, translated("Compared with")), this.other)])),
      this.answer);
  }

  async load() {
    if (this.runs.length > 1) return this.compare();
    try {
      const { presets, runs, first } = await ask("run-choices", { run: this.runs[0] });
      const group = (/** @type {string} */ label, /** @type {string[][]} */ entries) => entries.length
        ? [make("optgroup", { label: translated(label) },
          entries.map(([key, text]) => make("option", { value: key }, text)))]
        : [];
      this.other.replaceChildren(...group("Presets", presets), ...group("Runs", runs));
      this.other.value = first;
      await this.compare();
    } catch (error) {
      this.fail(error);
    }
  }

  async compare() {
    const sides = [...(this.runs.length > 1 ? [] : [this.other.value]), ...this.runs.map((run) => `run:${run}`)];
    if (!sides[0]) return this.answer.replaceChildren(make("p", { className: "quiet" },
      translated("There is nothing to compare these settings with.")));
    const isChosen = noteSubject(() => this.other.value);
    try {
      const found = await ask("run-differences", { sides });
      if (isChosen()) this.show(found);
    } catch (error) {
      if (isChosen()) this.fail(error);
    }
  }

  /** @param {Found} found */
  show({ titles, rows }) {
    if (!rows.length)
      return this.answer.replaceChildren(make("p", { className: "quiet" }, translated("All settings are the same.")));
    const head = make("tr", {}, make("th", { scope: "col" }, translated("Setting")),
      ...titles.map((title) => make("th", { scope: "col", className: "side-title" }, title)));
    const body = rows.map(([name, label, ...values]) => make("tr", {},
      make("th", { scope: "row", title: name }, label),
      ...values.map((value) => valueCell(value, value === values[0] ? "" : "other"))));
    body.forEach((row, at) => (row.hidden = at >= MAX_ROWS));
    const cut = rows.length - MAX_ROWS, words = say("Show {count} more setting", { count: cut },
      "Show {count} more settings");
    const more = makeButton(words, () => {
      for (const row of body) row.hidden = false;
      more.remove();
    });
    more.hidden = cut <= 0;
    this.answer.replaceChildren(
      make("p", { className: "quiet" }, count(rows.length, "setting")), more,
      make("div", { className: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body))));
  }

  /** @param {unknown} error */
  fail(error) {
    this.answer.replaceChildren(make("p", { className: "bad", role: "alert" }, messageOf(error)));
  }
}
