// A note about a run: plain text, stored when the field is left.
import { translated } from "../i18n/words.js";
import { make } from "../server/elements.js";
import { call, messageOf, pathOfRun } from "../server/http.js";

const PAUSE = 1200; // milliseconds without typing after which the note is stored

export class Note {
  /** @param {string} run */
  constructor(run) {
    this.run = run;
    this.stored = "";
    this.field = make("textarea", {
      "aria-label": translated("Note about this run"), rows: 4, maxLength: 20_000,
      placeholder: translated("What you tried, and how it turned out"),
    });
    this.said = make("small", { role: "status" });
    this.element = make("section", { className: "run-note card" },
      make("div", { className: "section-head" }, make("h3", {}, translated("Note")), this.said), this.field);
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    this.field.addEventListener("input", () => {
      this.say("");
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.store(), PAUSE);
    });
    this.field.addEventListener("change", () => this.store());
  }

  get isTyping() {
    return this.field.value.trim() !== this.stored.trim();
  }

  /** @param {string} note as the server has it */
  show(note) {
    if (this.isTyping || note === this.stored) return; // keep what is typed here
    this.stored = note;
    this.field.value = note;
  }

  async store() {
    clearTimeout(this.timer);
    if (!this.isTyping) return;
    const text = this.field.value;
    try {
      const { note } = await call(pathOfRun(this.run, "note"), { text, before: this.stored });
      this.stored = note;
      if (!this.isTyping) this.say(translated("Saved"));
    } catch (error) {
      this.say(messageOf(error), true);
    }
  }

  /**
   * @param {string} text
   * @param {boolean} [bad]
   */
  say(text, bad = false) {
    this.said.textContent = text;
    this.said.classList.toggle("bad", bad);
  }
}
