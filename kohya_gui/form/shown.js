// Fields that apply only to certain values of another option, and are hidden otherwise.
import { all, isField } from "../server/elements.js";
import { family, fieldOf } from "./inputs.js";
import { onSettled, untouched } from "./page.js";

/**
 * Show the fields that apply to the current choice, and all that differ from their initial values.
 * @param {HTMLFormElement} where a form
 * @param {Element} part of it, or one that will be inserted
 */
export function reveal(where, part) {
  for (const box of all(part, "[data-shown-with]")) {
    const conditions = (box.dataset.shownWith ?? "").split(";").map((condition) => condition.split("="));
    const fits = conditions.some(([option, values]) => values.split(" ").includes(fieldOf(where, option)?.value ?? ""));
    const [field] = all(box, "input, select, textarea").filter(isField);
    const holds = field.dataset.option
      ? !untouched(/** @type {import("./inputs.js").Field} */ (field), family(where))
      : Boolean(field.value);
    box.hidden = !holds && !fits;
  }
}

onSettled((where) => reveal(where, where));
