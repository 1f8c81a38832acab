// The dialog for base models: those on this computer, and downloads with all required parts.
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { all, find, hit, make, makeButton, showMessage, sizeOf } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { countRequests, noteSubject } from "../server/late.js";
import { family, fields, isFor, tabOf } from "../form/inputs.js";
import { apply, formOf } from "../form/page.js";
import { watcher } from "../tools/commands.js";
import { Licence, link } from "./licence.js";

/**
 * @typedef {{ path: string, name: string, size: number, words: string, options?: Record<string, string | boolean> }}
 *   Found
 */
/** @typedef {{ option: string, what: string, name: string, size: number }} Wanted */
/** @typedef {{ title: string, options: Record<string, string | boolean>, files: Wanted[] }} Offer */
/**
 * @typedef {{ title: string, folder: string, free: number, bases: Found[], parts: Record<string, Found[]>,
 *   offers: Offer[], repository: string, labels: Record<string, string>, busy: string }} Known
 */
/** @typedef {import("./licence.js").Plan} Plan */

const BASE = "pretrained_model_name_or_path", OTHER = "other", GET = "get:";

/** The dialog; one for the whole page, built on first use. */
class Models {
  title = make("h2", { id: "models-title" });
  model = make("select", { id: "models-model" });
  repository = make("input", {
    id: "models-repository", placeholder: "owner/name", spellcheck: false, autocomplete: "off",
  });
  file = make("select", { id: "models-file" });
  // Beside its field, as the message below is cleared at every new look-up of models or files.
  lookUpSaid = make("div", { className: "answer", "aria-live": "polite" });
  other = make("div", { className: "field", hidden: true },
    make("label", { for: "models-repository" }, "Hugging Face id"),
    this.repository,
    makeButton("Look", () => this.lookUp(), { className: "look" }),
    this.lookUpSaid,
    this.file);
  whole = make("div", { className: "gate", hidden: true }); // about a repository that trainings download themselves
  parts = make("div", { className: "parts" });
  folder = make("input", { id: "models-folder", spellcheck: false, autocomplete: "off" });
  room = make("p", { className: "room", role: "status" });
  licence = new Licence(() => this.keep());
  said = make("div", { className: "answer", "aria-live": "polite" });
  jobs = make("div", { className: "jobs" });
  go = makeButton("", () => this.act(), { className: "take", disabled: true });
  into = make("div", { className: "field into" },
    make("label", { for: "models-folder" }, "Download into"),
    this.folder,
    make("button", {
      type: "button", className: "pick", "data-pick": "folder", "data-endings": "", title: "Browse",
      "aria-label": "Browse",
    }));
  /** @type {HTMLDialogElement} */
  dialog = make("dialog", { className: "picker models", "aria-labelledby": "models-title" },
    this.title,
    make("div", { className: "inside" },
      make("div", { className: "field" }, make("label", { for: "models-model" }, "Model"), this.model),
      this.whole,
      this.other,
      this.parts,
      this.into,
      this.room,
      this.licence.element,
      this.said,
      this.jobs),
    make("div", { className: "foot" },
      this.go,
      makeButton("Close", () => this.dialog.close(), { className: "cancel" })));

  tab = "";
  family = "";
  /** @type {Known | null} */
  known = null;
  /** @type {Wanted[]} what was found in the repository that was typed */
  typed = [];
  /** @type {Plan | null} what the hub says of the files to download */
  plan = null;
  begin = countRequests();
  beginListing = countRequests();
  /** @type {Record<string, string | boolean> | null} what goes into the form when the download has ended */
  after = null;
  look = watcher(this.jobs, "models", (job) => this.ended(job));

  constructor() {
    this.model.onchange = () => this.choose();
    this.file.onchange = () => this.choose();
    this.folder.onchange = () => this.load(this.folder.value);
    this.parts.addEventListener("change", () => this.settle());
    this.repository.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      void this.lookUp();
    });
    this.repository.addEventListener("input", () => showMessage(this.lookUpSaid, "", ""));
    this.dialog.addEventListener("click", ({ target }) => target === this.dialog && this.dialog.close());
    this.dialog.addEventListener("kohya:allowed", () => this.load(this.folder.value));
    document.body.append(this.dialog);
  }

  /** @param {string} tab */
  open(tab) {
    [this.tab, this.family, this.known, this.after] = [tab, family(formOf(tab)), null, null];
    this.title.textContent = "Base model";
    this.whole.hidden = true;
    this.go.disabled = true;
    this.model.replaceChildren();
    this.parts.replaceChildren();
    this.repository.value = "";
    this.typed = [];
    showMessage(this.lookUpSaid, "", ""); // about another model
    this.dialog.showModal();
    void this.load("");
    void this.look();
  }

  /**
   * Fetch the list of models, and keep the choice.
   * @param {string} folder
   */
  async load(folder) {
    showMessage(this.said, "plain", this.known ? "" : "Looking for models on this computer");
    const named = String(this.field(BASE)?.value ?? ""), isNewest = this.beginListing();
    try {
      /** @type {Known} */
      const listing = await ask("models", { tab: this.tab, family: this.family, folder, named });
      if (!isNewest()) return;
      const chosen = this.model.value; // including a choice made during the request
      this.known = listing;
      showMessage(this.said, "", "");
      this.title.textContent = say("Base model: {title}", { title: listing.title });
      this.folder.value = listing.folder;
      this.showWhole(listing.repository);
      const localOptions = listing.bases.map((model) =>
        make("option", { value: model.path, title: model.path }, `${model.name} (${sizeOf(model.size)})`));
      const downloadOptions = listing.offers.map((offer, at) =>
        make("option", { value: GET + at }, `${offer.title} (${sizeOf(offer.files[0].size)})`));
      this.model.replaceChildren(
        localOptions.length ? make("optgroup", { label: translated("On this computer") }, localOptions) : "",
        make("optgroup", { label: translated("Download") },
          downloadOptions,
          make("option", { value: OTHER }, "Another model on Hugging Face")));
      const offered = [...this.model.options].map(({ value }) => value);
      this.model.value = [chosen, named].find((candidate) => candidate && offered.includes(candidate)) ?? offered[0];
      this.choose();
    } catch (error) {
      if (isNewest()) showMessage(this.said, "bad", messageOf(error));
    }
  }

  /** @param {string} option */
  field(option) {
    return fields(formOf(this.tab)).find((field) => field.dataset.option === option && isFor(field, this.family));
  }

  /** The offer of the chosen model: its own, or for a model on this computer the one with the same options. */
  offer() {
    if (!this.known) return null;
    const { offers } = this.known, chosen = this.model.value;
    if (chosen.startsWith(GET)) return offers[Number(chosen.slice(GET.length))];
    const base = this.base(), same = JSON.stringify(base?.options ?? {});
    return offers.find((candidate) => base && JSON.stringify(candidate.options) === same) ?? offers[0] ?? null;
  }

  /** The chosen model, if it is on this computer. */
  base() {
    return this.known?.bases.find((model) => model.path === this.model.value);
  }

  /** Show the parts of the chosen model: files on this computer first, then the download of each. */
  choose() {
    this.other.hidden = this.model.value !== OTHER;
    this.file.hidden = !this.typed.length;
    const offer = this.offer(), { parts = {}, labels = {} } = this.known ?? {};
    // Without downloads, only those parts that are on this computer.
    const rows = offer
      ? offer.files.filter(({ option }) => option !== BASE)
      : Object.keys(this.base() ? parts : {}).map((option) => ({ option, what: "", name: "", size: 0 }));
    this.parts.replaceChildren(
      ...rows.map((part) => {
        const files = parts[part.option] ?? [], id = `models-part-${part.option}`;
        const list = make("select", { id, "data-part": part.option },
          files.map((file) =>
            make("option", { value: file.path, title: file.path }, `✓ ${file.name} (${sizeOf(file.size)})`)),
          part.what
            ? make("option", { value: GET + part.what },
              say("Download {name} ({size})", { name: part.name, size: sizeOf(part.size) }))
            : "");
        const now = String(this.field(part.option)?.value ?? "");
        if (files.some((file) => file.path === now)) list.value = now;
        return make("div", { className: "field" },
          make("label", { for: id }, labels[part.option] ?? part.option),
          list);
      }));
    this.settle();
  }

  /** The files to download, by option. */
  wanted() {
    /** @type {Wanted[]} */
    const files = [];
    const offer = this.offer();
    if (this.model.value === OTHER) files.push(...this.typed.filter((file) => file.what === this.file.value));
    else if (!this.base()) files.push(...(offer?.files ?? []).filter(({ option }) => option === BASE));
    for (const list of this.parts.querySelectorAll("select"))
      if (list.value.startsWith(GET))
        files.push(...(offer?.files ?? []).filter(({ option }) => option === list.dataset.part));
    return files;
  }

  /** Show what will be downloaded and whether there is room; then ask the hub for exact sizes. */
  async settle() {
    const isNewest = this.begin(), files = this.wanted();
    this.plan = null;
    this.licence.element.hidden = true;
    showMessage(this.said, "", ""); // a message about another model
    this.show(files);
    if (!files.length) return;
    try {
      const plan = await ask("models_hub", { files: files.map(({ what }) => what), folder: this.folder.value });
      if (!isNewest()) return;
      this.plan = plan;
      this.show(files);
      if (!plan.closed.length) return;
      this.licence.show(plan);
      this.go.disabled = true;
    } catch (error) {
      if (isNewest()) showMessage(this.said, "bad", messageOf(error));
    }
  }

  /** Whether there is a choice for each part; models without downloads list only what is on this computer. */
  hasAllParts() {
    const shown = [BASE, ...all(this.parts, "select").map((list) => list.dataset.part)];
    return this.offer() !== null || Object.keys(this.known?.labels ?? {}).every((option) => shown.includes(option));
  }

  /** @param {Wanted[]} files */
  show(files) {
    const sizes = files.map(({ what, size }) => this.plan?.files.find((file) => file.what === what)?.left ?? size);
    const total = sizes.reduce((sum, size) => sum + size, 0), free = this.plan?.free ?? this.known?.free ?? 0;
    const complete = this.model.value !== OTHER || files.some(({ option }) => option === BASE);
    const parts = sizes.filter(Boolean).map(sizeOf);
    const sum = parts.length > 1 ? `${parts.join(" + ")} = ${sizeOf(total)}` : sizeOf(total);
    const facts = { sizes: sum, total: sizeOf(total), free: sizeOf(free) };
    const template =
      total > free
        ? "{sizes} to download, and only {free} free: choose another folder"
        : "{sizes} to download, {free} free";
    const settled = complete && this.hasAllParts() ? "All files are on this computer." : "";
    this.room.textContent = files.length && total ? say(template, facts) : settled;
    this.room.classList.toggle("bad", total > free);
    this.into.hidden = complete && !files.length;
    this.go.textContent = total ? say("Download {total}", facts) : "Use these files";
    this.go.disabled = !complete || total > free || !this.known || (files.length > 0 && !this.plan);
    if (this.plan) showMessage(this.said, "", "");
  }

  /**
   * Offer the repository of a model that is not published as single files.
   * @param {string} repository
   */
  showWhole(repository) {
    this.whole.hidden = !repository;
    if (!repository) return;
    this.whole.replaceChildren(
      make("h3", {}, repository),
      make("p", {},
        make("span", {}, "The training downloads all parts of this model. Accept its licence there first:"),
        " ",
        link(`https://huggingface.co/${repository}`)),
      makeButton("Use this model", () => this.use({ [BASE]: repository }), { className: "look" }));
  }

  async keep() {
    try {
      const said = await this.licence.storeToken();
      await this.settle();
      if (said && this.plan) showMessage(this.said, "good", said);
    } catch (error) {
      showMessage(this.said, "bad", messageOf(error));
    }
  }

  async lookUp() {
    const repository = this.repository.value, isSame = noteSubject(() => this.repository.value);
    try {
      /** @type {{ files: { what: string, name: string, size: number }[] }} */
      const { files } = await ask("models_hub", { repository, folder: this.folder.value });
      if (!isSame()) return; // the user is typing another one
      showMessage(this.lookUpSaid, "", "");
      this.typed = files.map((file) => ({ ...file, option: BASE }));
      this.file.replaceChildren(
        ...files.map((file) => make("option", { value: file.what }, `${file.name} (${sizeOf(file.size)})`)));
      this.choose();
    } catch (error) {
      if (!isSame()) return;
      this.typed = [];
      this.choose();
      showMessage(this.lookUpSaid, "bad", messageOf(error));
    }
  }

  /** The values for the form, with the paths of files that are still to be downloaded. */
  values() {
    /** @type {Record<string, string | boolean>} */
    const values = { ...(this.base()?.options ?? this.offer()?.options) };
    if (!this.base())
      // its title says everything that distinguishes it
      for (const name of (this.known?.offers ?? []).flatMap(({ options }) => Object.keys(options)))
        values[name] ??= this.field(name)?.dataset.default ?? "";
    const place = (/** @type {string} */ what) => this.plan?.files.find((file) => file.what === what)?.path ?? "";
    if (this.model.value === OTHER) for (const name of Object.keys(values)) delete values[name];
    values[BASE] = this.base()?.path ?? place(this.wanted()[0]?.what ?? "");
    for (const list of this.parts.querySelectorAll("select"))
      values[list.dataset.part ?? ""] = list.value.startsWith(GET) ? place(list.value.slice(GET.length)) : list.value;
    return values;
  }

  async act() {
    const plan = this.plan, values = this.values();
    if (!plan?.files.some(({ left }) => left)) return this.use(values);
    this.go.disabled = true;
    try {
      this.after = values;
      const { job } = await ask("models_get", {
        files: plan.files.filter(({ left }) => left).map(({ what }) => what),
        folder: this.folder.value,
      });
      showMessage(
        this.said,
        "plain",
        "The download continues when you close this window or the page; you can start it again.");
      void this.look(job);
    } catch (error) {
      this.after = null;
      this.go.disabled = false;
      showMessage(this.said, "bad", messageOf(error));
    }
  }

  /** @param {import("../tools/commands.js").Job} job */
  ended(job) {
    const values = this.after;
    this.after = null;
    if (job.state === "finished" && values) return this.use(values);
    if (this.known) void this.load(this.folder.value);
  }

  /** @param {Record<string, string | boolean>} values */
  use(values) {
    if (family(formOf(this.tab)) === this.family) apply(this.tab, values);
    this.dialog.close();
  }
}

/** @type {Models | undefined} */
let models;

document.addEventListener("click", (event) => {
  const button = hit(event, ".find-models");
  if (!button) return;
  models ??= new Models();
  models.open(tabOf(button));
  find(models.dialog, "select").focus();
});
