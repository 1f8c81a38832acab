// The file picker: a dialog that lists the files and folders that the server allows. Typing filters, arrows move, Enter
// opens or takes, Backspace goes up, Escape closes.
import { around, hit, isField, make, makeButton, sizeOf, withAllowButton } from "./elements.js";
import { ask, messageOf } from "./http.js";
import { countRequests, noteSubject } from "./late.js";

/** @typedef {import("./elements.js").Field} Field */
/** @typedef {"file" | "files" | "folder" | "new"} Kind of "files" one is added; "new" is one that does not exist yet */
/** @typedef {{ name: string, folder: boolean, size: number }} Entry */
/** @typedef {{ name: string, path: string }} Place */
/**
 * @typedef {{ folder: string, up: string, separator: string, places: Place[], entries: Entry[], more: number }} Listing
 */

const TITLES = {
  file: "Choose a file", files: "Choose a file", folder: "Choose a folder", new: "Where to write the file",
};
const TAKES = { file: "Choose", files: "Choose", folder: "Choose this folder", new: "Use this name" };

/** @type {Listing} */
const NOTHING = { folder: "", up: "", separator: "/", places: [], entries: [], more: 0 };

/**
 * @param {HTMLInputElement} input
 * @param {() => unknown} act
 */
function onEnter(input, act) {
  // Not as onkeydown: returning false from such a handler would block every key.
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    act();
  });
}

/** The dialog; one for the whole page, built on first use. */
class Picker {
  places = make("div", { className: "places" });
  path = make("input", { className: "where", spellcheck: false, "aria-label": "Folder" });
  up = make("button", { type: "button", className: "up", "aria-label": "Folder above", title: "Folder above" });
  filter = make("input", {
    placeholder: "Type to filter", spellcheck: false, role: "combobox", autocomplete: "off",
    "aria-label": "Filter", "aria-expanded": "true", "aria-controls": "pick-list",
  });
  list = make("ul", { id: "pick-list", role: "listbox", "aria-label": "Folders and files" });
  note = make("p", { className: "note", role: "status" });
  name = make("input", { className: "name", spellcheck: false, "aria-label": "Name of the new file" });
  take = makeButton("", () => this.choose(), { className: "take" });
  title = make("h2", { id: "pick-title" });
  /** @type {HTMLDialogElement} */
  dialog = make("dialog", { className: "picker", "aria-labelledby": "pick-title" },
    make("div", { className: "head" }, this.title, this.places),
    make("div", { className: "path" }, this.up, this.path),
    this.filter,
    this.list,
    this.note,
    make("div", { className: "foot" },
      this.name,
      this.take,
      makeButton("Cancel", () => this.dialog.close(), { className: "cancel" })));

  /** @type {Field | null} */
  input = null;
  /** @type {Kind} */
  kind = "file";
  endings = "";
  listing = NOTHING;
  at = -1; // index of the marked entry
  begin = countRequests();
  asked = ""; // the folder requested last, shown once its listing arrives
  uses = 0; // the number of times the dialog was opened
  /** @type {Promise<unknown>} */
  opening = Promise.resolve(); // presses wait for its listing, which may be late
  refused = ""; // a refused folder that the user may allow

  constructor() {
    this.up.onclick = () => void this.goUp();
    this.filter.oninput = () => this.open(this.asked, this.filter.value);
    onEnter(this.path, () => this.open(this.path.value));
    onEnter(this.name, () => this.choose());
    this.filter.onkeydown = (event) => this.move(event);
    this.list.onclick = (event) => {
      const row = hit(event, "li");
      if (row) this.enter(Number(row.dataset.at));
    };
    this.dialog.addEventListener("click", ({ target }) => target === this.dialog && this.dialog.close());
    this.dialog.addEventListener("kohya:allowed", () => this.open(this.refused));
    this.dialog.onclose = () => this.input?.focus();
    document.body.append(this.dialog);
  }

  /** @param {KeyboardEvent} event */
  move(event) {
    const last = this.listing.entries.length - 1;
    /** @type {Record<string, number>} */
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    if (step && (Number.isFinite(step) || !this.filter.value)) this.mark(Math.max(0, Math.min(last, this.at + step)));
    else if (event.key === "Enter") void this.enterMarked();
    else if (event.key === "Backspace" && !this.filter.value) void this.goUp();
    else return;
    event.preventDefault();
  }

  /** @param {number} at */
  mark(at) {
    this.list.children[this.at]?.setAttribute("aria-selected", "false");
    this.at = at;
    const row = this.list.children[at];
    if (row) {
      row.setAttribute("aria-selected", "true");
      row.scrollIntoView({ block: "nearest" });
      this.filter.setAttribute("aria-activedescendant", row.id);
    } else this.filter.removeAttribute("aria-activedescendant");
  }

  /** @param {string} name of an entry in the current folder */
  pathOf(name) {
    const { folder, separator } = this.listing;
    return folder + (folder.endsWith(separator) ? "" : separator) + name;
  }

  /** @param {number} at */
  enter(at) {
    const entry = this.listing.entries[at];
    if (!entry) return;
    if (entry.folder) this.open(this.pathOf(entry.name));
    else if (this.kind === "new") this.name.value = entry.name;
    else this.finish(this.pathOf(entry.name));
  }

  /** Wait for the last listing. Returns whether the dialog is still open, and for the same field. */
  async isListed() {
    const isSameUse = noteSubject(() => this.uses);
    let opening;
    do await (opening = this.opening);
    while (opening !== this.opening);
    return this.dialog.open && isSameUse();
  }

  async goUp() {
    if ((await this.isListed()) && this.listing.up) this.open(this.listing.up);
  }

  async enterMarked() {
    if (!(await this.isListed())) return;
    if (this.at >= 0) this.enter(this.at);
    else await this.choose();
  }

  async choose() {
    if (!(await this.isListed()) || !this.listing.folder) return;
    const ending = this.endings.split(" ")[0], name = this.name.value.trim();
    if (this.kind === "folder") this.finish(this.listing.folder);
    else if (this.kind === "new" && name)
      this.finish(this.pathOf(ending && !name.includes(".") ? name + ending : name));
    else if (this.kind !== "new" && this.at >= 0) this.enter(this.at);
  }

  /** @param {string} path */
  finish(path) {
    if (this.input) this.input.value = this.kind === "files" ? added(this.input.value, path) : path;
    for (const type of ["input", "change"]) this.input?.dispatchEvent(new Event(type, { bubbles: true }));
    this.dialog.close();
  }

  /**
   * @param {string} folder
   * @param {string} [filter]
   */
  open(folder, filter = "") {
    if (!filter) this.filter.value = "";
    this.asked = folder;
    this.opening = this.load(folder, filter);
    return this.opening;
  }

  /**
   * Show a folder. Returns whether no other one was requested meanwhile.
   * @param {string} folder
   * @param {string} filter
   */
  async load(folder, filter) {
    const isNewest = this.begin(), typed = this.path.value;
    try {
      const listing = await ask("list", { folder, filter, kind: this.kind, endings: this.endings });
      if (!isNewest()) return false;
      this.asked = listing.folder;
      this.show(listing);
      if (this.path.value === typed) this.path.value = listing.folder; // else another one is being typed
    } catch (error) {
      if (!isNewest()) return false;
      this.refused = folder;
      this.asked = this.listing.folder;
      if (!this.asked && folder && !(await this.load("", ""))) return false;
      this.note.replaceChildren(...withAllowButton(messageOf(error)));
    }
    return true;
  }

  /** @param {Listing} listing */
  show(listing) {
    [this.listing, this.at] = [listing, -1];
    this.up.disabled = !listing.up;
    this.places.replaceChildren(
      ...listing.places.map(({ name, path }) => makeButton(name, () => this.open(path), { title: path })));
    this.list.replaceChildren(
      ...listing.entries.map((entry, at) =>
        make("li",
          {
            id: `pick-${at}`, role: "option", "data-at": at, "aria-selected": "false",
            className: entry.folder ? "folder" : "file",
          },
          make("span", {}, entry.name),
          entry.folder ? null : make("small", {}, sizeOf(entry.size)))));
    const empty = this.filter.value
      ? "Nothing in this folder matches."
      : this.kind === "folder"
        ? "This folder contains no folders."
        : "This folder contains no matching files.";
    this.note.textContent = listing.more
      ? `${listing.more} more: type a part of the name.`
      : listing.entries.length
        ? ""
        : empty;
    if (listing.entries.length && (this.filter.value || this.kind.startsWith("file"))) this.mark(0);
  }
}

/**
 * A list of files with one more, quoted if it contains blanks.
 * @param {string} files
 * @param {string} path
 */
const added = (files, path) => [files.trim(), /\s/.test(path) ? `"${path}"` : path].filter(Boolean).join(" ");

/** @type {Picker | undefined} */
let picker;

/**
 * Open the picker for a text field.
 * @param {Field} input
 * @param {Kind} [kind]
 * @param {string} [endings] of the files to list, separated by blanks
 */
export function pick(input, kind = "file", endings = "") {
  picker ??= new Picker();
  Object.assign(picker, { input, kind, endings, listing: NOTHING, at: -1, uses: picker.uses + 1 });
  picker.title.textContent = TITLES[kind];
  picker.take.textContent = TAKES[kind];
  picker.name.hidden = kind !== "new";
  picker.name.value = kind === "new" ? input.value.split(/[\\/]/).pop() ?? "" : "";
  picker.note.textContent = picker.path.value = "";
  picker.list.replaceChildren();
  picker.dialog.showModal();
  picker.filter.focus();
  picker.open(kind === "files" ? "" : input.value.trim());
}

/**
 * The field that a button fills.
 * @param {Element} button
 */
export function inputOf(button) {
  const beside = button.getAttribute("data-beside");
  return beside
    ? around(button, ".row").querySelector(beside)
    : button.parentElement?.querySelector("input:not([type]), input[type=text], textarea");
}

document.addEventListener("click", (event) => {
  const button = hit(event, "button.pick");
  if (!button) return;
  const { pick: kind, endings } = button.dataset, input = inputOf(button);
  if (isField(input)) pick(input, /** @type {Kind} */ (kind), endings);
});
