// The form as TOML text in a dialog: written by the server with its comments, checked while it is edited.
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { all, around, make, makeButton, withAllowButton } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { countRequests } from "../server/late.js";
import { sentOf, tellError } from "./messages.js";
import { formOf } from "./page.js";
import { source } from "./storage.js";
import { show } from "./tab.js";

/** @typedef {{ verdict: "ok" | "hint" | "bad", text: string, line: number }} Finding `line` is 0 if it is about none */

const PAUSE = 350; // milliseconds without typing before the text is checked
const SIGNS = { ok: "✓", hint: "!", bad: "✗" };

/** The dialog; one for the whole page, built on first use. */
class TextEditor {
  tab = "";
  written = ""; // the form's text at the start
  begin = countRequests();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  timer;

  area = make("textarea", {
    className: "text", spellcheck: false, autocomplete: "off", wrap: "off", "aria-label": "Settings as TOML",
    "aria-describedby": "text-state",
  });
  numbers = make("div", { className: "numbers", "aria-hidden": "true" });
  state = make("p", { id: "text-state", className: "state", role: "status" });
  note = make("p", { className: "note" });
  list = make("ul", { className: "findings" });
  apply = makeButton("Apply", () => this.take(), { className: "take" });
  /** @type {HTMLElement} */
  question = make("p", { className: "question", hidden: true, role: "alert" },
    make("span", {}, "These edits are not in the form yet."),
    makeButton("Discard the edits", () => this.dialog.close()),
    makeButton("Keep editing", () => this.keep()));
  /** @type {HTMLDialogElement} */
  dialog = make("dialog", { className: "text-editor", "aria-labelledby": "text-title" },
    make("div", { className: "head" }, make("h2", { id: "text-title" }, "Edit as text"), this.state),
    make("div", { className: "sides" },
      make("div", { className: "paper" }, this.numbers, this.area),
      make("div", { className: "aside" }, this.note, this.list)),
    this.question,
    make("div", { className: "foot" },
      makeButton("Check the text", () => this.check()),
      makeButton("Cancel", () => this.leave()),
      this.apply));

  constructor() {
    this.area.addEventListener("input", () => this.edited());
    this.area.addEventListener("scroll", () => (this.numbers.scrollTop = this.area.scrollTop));
    this.dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      this.leave();
    });
    this.dialog.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.apply.disabled) void this.take();
    });
    document.body.append(this.dialog);
  }

  /**
   * Open the text of a tab's form.
   * @param {string} tab
   */
  async open(tab) {
    const isNewest = this.begin();
    const { text, note } = await ask("text_of", { tab, sent: sentOf(tab), source: source(tab) });
    if (!isNewest()) return;
    this.tab = tab;
    this.written = this.area.value = text;
    this.note.textContent = note;
    this.keep();
    this.list.replaceChildren();
    this.dialog.showModal();
    this.area.focus();
    this.area.setSelectionRange(0, 0);
    this.area.scrollTop = 0;
    this.writeNumbers();
    void this.look();
  }

  keep() {
    this.question.hidden = true;
    if (this.dialog.open) this.area.focus();
  }

  leave() {
    if (this.area.value === this.written) return this.dialog.close();
    this.question.hidden = false;
    all(this.question, "button")[1].focus();
  }

  edited() {
    this.question.hidden = true;
    this.begin(); // an answer about the text before would be out of date
    this.writeNumbers();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), PAUSE);
  }

  /** Write the numbers of the lines. */
  writeNumbers() {
    const lines = this.area.value.split("\n").length;
    if (this.numbers.childElementCount === lines) return;
    this.numbers.replaceChildren(...Array.from({ length: lines }, (_, at) => make("span", {}, String(at + 1))));
    this.numbers.scrollTop = this.area.scrollTop;
  }

  /**
   * Have the server check the text, and show the problems unless the text has changed meanwhile.
   * @param {"text_look" | "text_check"} name
   */
  async request(name) {
    const isNewest = this.begin(), { tab } = this;
    try {
      const answer = await ask(name, { tab, sent: sentOf(tab), text: this.area.value });
      if (isNewest()) this.show(answer.findings, Boolean(answer.unreadable));
    } catch (error) {
      if (!isNewest()) return;
      this.state.textContent = "";
      const text = make("span", {}, ...withAllowButton(messageOf(error)));
      this.list.replaceChildren(make("li", { className: "bad" }, text));
    }
  }

  look = () => this.request("text_look");

  check() {
    clearTimeout(this.timer);
    this.state.textContent = `${translated("Checking the settings")} …`;
    return this.request("text_check");
  }

  /**
   * @param {Finding[]} findings
   * @param {boolean} isUnreadable whether the text is no config, so that the form cannot take it
   */
  show(findings, isUnreadable) {
    const problems = findings.filter(({ verdict }) => verdict === "bad");
    this.apply.disabled = isUnreadable;
    this.state.textContent = problems.length
      ? say("{count} problem to fix", { count: problems.length }, "{count} problems to fix")
      : "No problems found";
    this.state.classList.toggle("bad", problems.length > 0);
    this.area.setAttribute("aria-invalid", String(problems.length > 0));
    const lines = new Set(problems.map(({ line }) => line));
    [...this.numbers.children].forEach((number, at) => number.classList.toggle("bad", lines.has(at + 1)));
    this.list.replaceChildren(
      ...findings.map(({ verdict, text, line }) =>
        make("li", { className: verdict },
          make("i", { "aria-hidden": "true" }, SIGNS[verdict]),
          make("div", {},
            line > 0 && makeButton(say("Line {line}", { line }), () => this.jump(line), { className: "line" }),
            make("span", {}, ...withAllowButton(text))))));
  }

  /**
   * Select a line of the text.
   * @param {number} line
   */
  jump(line) {
    const rows = this.area.value.split("\n"), start = rows.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    this.area.focus();
    this.area.setSelectionRange(start, start + (rows[line - 1] ?? "").length);
    const height = this.area.scrollHeight / rows.length;
    this.area.scrollTop = Math.max(0, (line - 4) * height);
  }

  /** Put the text into the form. */
  async take() {
    const { tab } = this, training = around(formOf(tab), ".training"), { opened = "" } = training.dataset;
    try {
      const answer = await ask("text_take", { tab, sent: sentOf(tab), text: this.area.value, opened });
      this.dialog.close();
      show(training, answer, "");
    } catch (error) {
      this.show([{ verdict: "bad", text: messageOf(error), line: 0 }], false);
    }
  }
}

/** @type {TextEditor | undefined} */
let editor;

/**
 * Open the form of a tab as text.
 * @param {string} tab
 */
export async function editText(tab) {
  editor ??= new TextEditor();
  try {
    await editor.open(tab);
  } catch (error) {
    tellError(tab, error);
  }
}
