// Rows of image folders: built from the server's description, parsed back, each with its count for a training.
import { count, say } from "../i18n/sentences.js";
import { all, find, isField, make, setValue } from "../server/elements.js";

/** @typedef {Record<string, string>} Texts by option */
/**
 * @typedef {{ at: number | null, texts: Texts, shown?: Texts, source?: string, images?: number | null }} Row a folder
 */
/** @typedef {{ at: number | null, texts: Texts, shown?: Texts, rows: Row[] }} Group a data set */
/**
 * @typedef {{ dataset: number, source: string, images: number, seen: number, captioned: number, held: number }} Counted
 *   of a folder
 */
/**
 * @typedef {{ rows: Counted[], images: number, seen: number, buckets: number, steps_per_epoch: number, learned: number,
 *   steps: number, epochs: number, problems: string[], warnings: string[] }} Count
 */

const MAX_NOTES = 5;

/**
 * @param {Element} box
 * @param {Group} group
 * @param {number} number
 * @param {number} groups
 */
export function groupOf(box, group, number, groups) {
  const element = copyOf(box, "group", ".group");
  element.dataset.at = JSON.stringify(group.at);
  find(element, "summary b").textContent = groups > 1 ? say("Data set {number}", { number: number + 1 }) : "";
  const of = (/** @type {string} */ name) => group.texts[name] || group.shown?.[name] || "";
  find(element, "summary span").textContent = say("{resolution} px, batches of {batch}", {
    resolution: of("resolution").replaceAll(",", " × ").replaceAll(";", ", "),
    batch: of("batch_size"),
  });
  find(element, ".of-set").hidden = !of("resolution");
  fillIn(find(element, ".of-set"), group.texts, group.shown);
  find(element, "ol").replaceChildren(...group.rows.map((row) => rowOf(box, row)));
  return element;
}

/**
 * @param {Element} box
 * @param {Row} row
 */
export function rowOf(box, row) {
  const element = copyOf(box, "row", "li");
  element.dataset.at = JSON.stringify(row.at);
  element.dataset.source = row.source ?? "";
  fillIn(element, row.texts, row.shown);
  element.classList.toggle("reg", row.texts.is_reg === "true");
  if (typeof row.images === "number") find(element, ".numbers").textContent = count(row.images, "image");
  return element;
}

/**
 * @param {Element} box
 * @param {string} name of the template
 * @param {string} selector
 */
function copyOf(box, name, selector) {
  const { content } = find(box, `template.${name}`, HTMLTemplateElement);
  return /** @type {HTMLElement} */ (document.importNode(find(content, selector), true));
}

/**
 * Fill in fields, with the values that apply when they are empty as placeholders.
 * @param {Element} where
 * @param {Texts} texts
 * @param {Texts} [shown]
 */
function fillIn(where, texts, shown = {}) {
  for (const field of all(where, "[data-set]").filter(isField)) {
    const name = field.dataset.set ?? "";
    setValue(field, texts[name] ?? "");
    if (field instanceof HTMLSelectElement)
      field.options[0].textContent = shown[name] === "true" ? "inherited: yes" : "inherited: no";
    else if (field instanceof HTMLInputElement) field.placeholder = shown[name] ?? "";
  }
}

/**
 * @param {Element} where
 * @returns {Texts}
 */
export const textsOf = (where) =>
  Object.fromEntries(
    all(where, "[data-set]")
      .filter(isField)
      .map((field) => [field.dataset.set ?? "", field.value.trim()])
      .filter(([, text]) => text));

/**
 * The contents of the rows, without folders that have no name yet.
 * @param {Element} box
 * @returns {Group[]}
 */
export function groupsOf(box) {
  return all(box, ".groups > .group")
    .map((group) => ({
      at: JSON.parse(group.dataset.at ?? "null"),
      texts: textsOf(find(group, ".of-set")),
      rows: all(group, "li")
        .map((row) => ({ at: JSON.parse(row.dataset.at ?? "null"), texts: textsOf(row) }))
        .filter(({ texts }) => texts.image_dir || texts.metadata_file),
    }))
    .filter(({ rows }) => rows.length);
}

/**
 * @param {Element} box
 * @param {Count | null} counted
 */
export function showCount(box, counted) {
  const sum = find(box, ".sum"), notes = find(box, ".notes");
  sum.textContent = counted?.seen
    ? say("{pictures} per epoch, {each}; {steps} are {epochs}", {
        pictures: count(counted.seen, "image"),
        each: count(counted.steps_per_epoch, "step"),
        steps: count(counted.steps, "step"),
        epochs: count(counted.epochs, "epoch"),
      })
    : "";
  box.setAttribute("data-images", String(counted?.learned ?? 0));
  document.dispatchEvent(new CustomEvent("kohya:counted", { detail: box }));
  const messages = counted ? [...counted.problems, ...counted.warnings] : [];
  notes.replaceChildren(...messages.slice(0, MAX_NOTES).map((text) => make("li", {}, text)));
  if (!counted) return;
  for (const [dataset, group] of all(box, ".groups > .group").entries()) {
    for (const row of all(group, "li")) {
      const folderCount = counted.rows.find((each) => each.dataset === dataset && each.source === row.dataset.source);
      if (!folderCount) continue;
      const { images, seen, captioned, held } = folderCount, percent = counted.seen ? (100 * seen) / counted.seen : 0;
      const parts = [
        count(images, "image"),
        say("{captioned} with a caption", { captioned: captioned.toLocaleString("en") }),
        say("{percent}% of an epoch", { percent: percent >= 10 ? Math.round(percent) : percent.toFixed(1) }),
      ];
      if (row.classList.contains("reg")) parts.push("regularisation");
      if (held) parts.push(say("{count} held out for validation", { count: held.toLocaleString("en") }));
      find(row, ".numbers").replaceChildren(...parts.map((text) => make("span", {}, text)));
      find(row, ".share").hidden = false;
      find(row, ".share i").style.width = `${percent}%`;
    }
  }
}
