// Search all settings of a form: by label, option name or flag, their names in kohya_ss, help and choices. If nothing
// matches all words, the nearest settings are shown, even with missing or swapped letters.
import { say } from "../i18n/sentences.js";
import { all, around, find, hit, make } from "../server/elements.js";
import { familiesOf, family, fields, isFor } from "./inputs.js";
import { jump } from "./sections.js";

/** @typedef {import("./inputs.js").Field} Field */
/**
 * @typedef {{ field: Field, label: string, name: string, section: string, shown: string, help: string }} Entry a
 *   setting: `shown` is the section's title, `section` is searched
 */

const MAX_RESULTS = 12, MIN_SHARE = 0.6; // results shown at most; share of the typed letters that a near one must have
const MIN_ROOM = 160; // pixels needed above the bottom bar to show some results
// Searches of users whose training does not fit.
const LOW_MEMORY = "low vram oom cuda out of memory";
// Terms of other programs that users search for.
/** @type {Record<string, string>} */
const KNOWN_AS = {
  network_dim: "dimension",
  network_args: "lycoris extra arguments",
  network_module: "lycoris locon loha lokr dora adapter type",
  resolution: "max size",
  lr_warmup_steps: "lr percent of total",
  sdpa: "crossattention",
  xformers: "crossattention",
  flip_aug: "augmentation",
  color_aug: "augmentation",
  optimizer_args: "extra",
  lr_scheduler_args: "extra",
  optimizer_type: "optimizer",
  text_encoder_lr: "t5xxl clip",
  learning_rate: "lr",
  unet_lr: "lr",
  compile: "dynamo slow speed",
  compile_backend: "dynamo",
  compile_mode: "dynamo",
  num_processes: "multi gpu",
  blocks_to_swap: `offload ${LOW_MEMORY}`,
  gradient_checkpointing: LOW_MEMORY,
  cpu_offload_checkpointing: LOW_MEMORY,
  offload_modulation: `swap ${LOW_MEMORY}`,
  fp8_base: LOW_MEMORY,
  base_bits: LOW_MEMORY,
  cache_latents_to_disk: LOW_MEMORY,
  cache_text_encoder_outputs_to_disk: LOW_MEMORY,
  train_data_dir: "dataset pictures image folder containing training images subfolders",
  reg_data_dir: "images",
  pretrained_model_name_or_path: "checkpoint",
  max_train_epochs: "epoch",
  clip_skip: "layer",
  keep_tokens: "n",
  logging_dir: "tensorboard directory",
  output_dir: "directory for trained model",
  output_name: "trained model",
  save_model_as: "trained",
  min_bucket_reso: "minimum resolution",
  max_bucket_reso: "maximum resolution",
  bucket_reso_steps: "resolution",
  bucket_no_upscale: "don t resolution",
  gradient_accumulation_steps: "accumulate",
  full_fp16: "training experimental",
  full_bf16: "training experimental",
  save_state: "training",
  resume: "from saved training state",
  max_data_loader_n_workers: "number of threads num dataloader",
};
/** @type {Entry[]} */
let hits = [];
let at = -1; // index of the marked result
/** @type {Element | null} what had the focus before a key opened the search */
let origin = null;

/**
 * @param {string} text
 * @returns {string[]}
 */
const tokens = (text) => text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];

/**
 * @param {Field} field
 * @returns {Entry}
 */
function entryOf(field) {
  const box = around(field, ".field");
  const label = (box.querySelector("label span") ?? find(box, "label")).textContent.trim();
  const help = document.getElementById(`${field.id}-help`);
  const section = box.closest(".section")?.querySelector("h3")?.textContent ?? "";
  const options =
    field instanceof HTMLSelectElement ? field.options : field instanceof HTMLInputElement ? field.list?.options : null;
  const choices = [...(options ?? [])].map((choice) => choice.value).join(" ");
  return {
    field,
    label,
    name: field.dataset.option ?? field.dataset.launch ?? "",
    section: `${section} ${choices}`,
    shown: section,
    help: `${help?.dataset.help ?? ""} ${help?.textContent ?? ""}`,
  };
}

/**
 * How well a setting matches all words: 5 for its name, 1 for its help only, 0 for no match.
 * @param {Entry} entry
 * @param {string[]} words
 */
function rank(entry, words) {
  const label = entry.label.toLowerCase(), name = entry.name.toLowerCase();
  const searchable = `${label} ${name} ${KNOWN_AS[name] ?? ""}`;
  if (!words.every((word) => `${searchable} ${entry.section} ${entry.help}`.toLowerCase().includes(word))) return 0;
  const whole = words.join(" ");
  if (label === whole || name === words.join("_")) return 5;
  if (label.startsWith(whole) || name.startsWith(words.join("_"))) return 4;
  if (words.every((word) => searchable.includes(word))) return 3;
  return words.every((word) => `${searchable} ${entry.section.toLowerCase()}`.includes(word)) ? 2 : 1;
}

/**
 * The share of the words' letters found in a setting's names or, for less, in its help.
 * @param {Entry} entry
 * @param {string[]} words
 */
function nearness(entry, words) {
  const names = tokens(`${entry.label} ${entry.name} ${KNOWN_AS[entry.name] ?? ""}`), help = entry.help.toLowerCase();
  const worth = (/** @type {string} */ word) => {
    if (names.some((name) => name.includes(word))) return 1;
    if (names.some((name) => isNear(word, name))) return 0.9;
    return word.length > 3 && help.includes(word) ? 0.5 : 0;
  };
  const all = words.reduce((sum, word) => sum + word.length, 0);
  const share = words.reduce((sum, word) => sum + word.length * worth(word), 0) / all;
  return share < MIN_SHARE ? 0 : share;
}

/**
 * Whether two words differ by one letter that is added, missing, replaced or swapped; by two if they are long.
 * @param {string} first
 * @param {string} second
 */
function isNear(first, second) {
  const maxDifferences = first.length < 4 ? 0 : first.length < 7 ? 1 : 2;
  if (!maxDifferences || Math.abs(first.length - second.length) > maxDifferences) return false;
  // The rows of the optimal string alignment distance: the last one, and the one before it for swapped letters.
  /** @type {number[]} */
  let before = [], last = Array.from({ length: second.length + 1 }, (_, i) => i);
  for (let i = 1; i <= first.length; i++) {
    const row = [i];
    for (let j = 1; j <= second.length; j++) {
      row[j] = Math.min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (first[i - 1] === second[j - 1] ? 0 : 1));
      if (i > 1 && j > 1 && first[i - 1] === second[j - 2] && first[i - 2] === second[j - 1])
        row[j] = Math.min(row[j], before[j - 2] + 1);
    }
    [before, last] = [last, row];
  }
  return last[second.length] <= maxDifferences;
}

/** @param {HTMLInputElement} input */
function search(input) {
  const where = around(input, "form.settings"), name = family(/** @type {HTMLFormElement} */ (where));
  const words = tokens(input.value);
  const entries = words.length ? fields(where).map(entryOf) : [];
  const visible = entries.filter((entry) => isShown(entry.field, name));
  hits = best(visible, (entry) => rank(entry, words));
  const elsewhere = hits.length
    ? []
    : best(entries, (entry) => (visible.includes(entry) || !titles(entry.field) ? 0 : rank(entry, words)));
  if (!hits.length) hits = best(visible, (entry) => nearness(entry, words));
  render(input, words.length > 0, elsewhere[0]);
}

/**
 * The entries with the highest ranks; of equal ones, those at the top of the form first, and rarely used ones last.
 * @param {Entry[]} entries
 * @param {(entry: Entry) => number} rankOf
 */
function best(entries, rankOf) {
  const ranked = entries.map((entry) => ({ ...entry, rank: rankOf(entry) })).filter((entry) => entry.rank);
  const onTop = (/** @type {Entry} */ { field }) => Number(Boolean(field.closest(".basics")));
  const isRare = (/** @type {Entry} */ { field }) => Number(around(field, ".field").classList.contains("advanced"));
  ranked.sort((a, b) =>
    b.rank - a.rank || onTop(b) - onTop(a) || isRare(a) - isRare(b) || a.label.length - b.label.length);
  return ranked.slice(0, MAX_RESULTS);
}

/**
 * Whether a family has this setting and it applies there; otherwise it is hidden.
 * @param {Field} field
 * @param {string} name
 */
const isShown = (field, name) => isFor(field, name) && [field.closest(".field"), field.closest(".section")]
  .map((box) => [...(box?.classList ?? [])].filter((className) => className.startsWith("only-")))
  .every((only) => !only.length || only.includes(`only-${name}`));

/**
 * The titles of the families that have a setting.
 * @param {Field} field
 */
const titles = (field) => familiesOf(field).filter((name) => isShown(field, name))
  .map((name) => find(field.form, `[name=family][value="${name}"] + span`).textContent).join(", ");

/** @param {HTMLInputElement} input */
const listOf = (input) => find(document, `#${input.getAttribute("aria-controls")}`);

/**
 * @param {HTMLInputElement} input
 * @param {boolean} hasQuery whether there are words to search for
 * @param {Entry | undefined} elsewhere a setting that only another family has
 */
function render(input, hasQuery, elsewhere) {
  const list = listOf(input);
  at = hits.length ? 0 : -1;
  list.hidden = !hasQuery;
  input.setAttribute("aria-expanded", String(hasQuery));
  list.replaceChildren(
    ...hits.map((entry, number) =>
      make("li",
        { id: `${list.id}-${number}`, role: "option", "data-at": number, "aria-selected": String(number === at) },
        make("b", {}, entry.label),
        make("code", {}, entry.name),
        make("small", {}, entry.shown))));
  if (elsewhere)
    list.prepend(
      make("li", { role: "presentation" },
        say("Only found for {families}: {label}", { families: titles(elsewhere.field), label: elsewhere.label })));
  if (hasQuery && !hits.length && !elsewhere) list.append(make("li", { role: "presentation" }, "No setting matches."));
  input.setAttribute("aria-activedescendant", at >= 0 ? `${list.id}-${at}` : "");
  const bar = find(around(input, ".training"), ".bar").getBoundingClientRect();
  if (hasQuery && list.getBoundingClientRect().top + MIN_ROOM > bar.top) input.scrollIntoView({ block: "start" });
}

/**
 * @param {HTMLInputElement} input
 * @param {number} to
 */
function mark(input, to) {
  const list = listOf(input), rows = all(list, "[role=option]");
  rows[at]?.setAttribute("aria-selected", "false");
  at = (to + hits.length) % hits.length;
  rows[at].setAttribute("aria-selected", "true");
  rows[at].scrollIntoView({ block: "nearest" });
  input.setAttribute("aria-activedescendant", `${list.id}-${at}`);
}

/**
 * @param {HTMLInputElement} input
 * @param {number} number
 */
function take(input, number) {
  const entry = hits[number];
  if (!entry) return; // keep the search text for corrections
  close(input);
  input.value = "";
  jump(entry.field.id);
}

/** @param {HTMLInputElement} input */
function close(input) {
  hits = [];
  listOf(input).hidden = true;
  input.setAttribute("aria-expanded", "false");
}

/**
 * Return the focus to the element that had it before the search.
 * @param {HTMLInputElement} input
 * @param {HTMLElement} to
 */
function leave(input, to) {
  origin = null;
  if (to === document.body) input.blur();
  else to.focus();
}

/** @param {Event} event */
const searchOf = (event) => hit(event, ".search input", HTMLInputElement);

document.addEventListener("input", (event) => {
  const input = searchOf(event);
  if (input) search(input);
});
document.addEventListener("focusout", (event) => {
  const input = searchOf(event);
  if (input) setTimeout(() => document.activeElement !== input && close(input), 150);
});
document.addEventListener("keydown", (event) => {
  const { key } = event, input = searchOf(event);
  if (input) {
    if (key === "ArrowDown" && hits.length) mark(input, at + 1);
    else if (key === "ArrowUp" && hits.length) mark(input, at - 1);
    else if (key === "Enter") take(input, at);
    else if (key !== "Escape") return;
    else if (!listOf(input).hidden) close(input);
    else if (origin instanceof HTMLElement && origin.isConnected) leave(input, origin);
    else return;
    event.preventDefault();
  } else if (
    key === "/" &&
    !event.ctrlKey &&
    !event.metaKey &&
    !hit(event, "input, textarea, select, [contenteditable]")
  ) {
    const first = all(document, ".search input").find((field) => field.checkVisibility());
    if (!first) return;
    event.preventDefault();
    origin = document.activeElement;
    first.focus();
  }
});
document.addEventListener("pointerdown", (event) => {
  const row = hit(event, ".search li[data-at]");
  if (!row) return;
  event.preventDefault();
  take(find(around(row, ".search"), "input", HTMLInputElement), Number(row.dataset.at));
});
