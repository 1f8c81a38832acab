// Fields that apply only to certain values of another option or to a purpose, and are hidden otherwise.
import { all, isField } from "../server/elements.js";
import { family, fieldOf } from "./inputs.js";
import { markRequired } from "./marks.js";
import { onSettled, startOf, untouched } from "./page.js";

const REFERENCES = "control_directory"; // inputs of an edit besides its images

/**
 * Show the fields that apply to the current choice, and all that differ from their initial values.
 * @param {HTMLFormElement} where a form
 * @param {Element} part of it, or one that will be inserted
 */
export function reveal(where, part) {
  const purpose = startOf(where, family(where)).purpose ?? "";
  const held = (/** @type {string} */ name) => name === "purpose" ? purpose : fieldOf(where, name)?.value ?? "";
  for (const box of all(part, "[data-shown-with]")) {
    const conditions = (box.dataset.shownWith ?? "").split(";").map((condition) => condition.split("="));
    const fits = conditions.some(([option, values]) => values.split(" ").includes(held(option)));
    const [field] = all(box, "input, select, textarea").filter(isField);
    const holds = field.dataset.option
      ? !untouched(/** @type {import("./inputs.js").Field} */ (field), family(where))
      : Boolean(field.value);
    box.hidden = !holds && !fits;
    if (field.dataset.option === REFERENCES) markRequired(field, purpose === "edit");
  }
}

onSettled((where) => reveal(where, where));
