// Fields that mean something with certain values of another option only, and are hidden with the others.
import { all, isField } from "../server/elements.js";
import { family, fieldOf } from "./inputs.js";
import { onSettled, untouched } from "./page.js";

/**
 * Show what means something with what is chosen, and whatever holds a value that the form did not begin with.
 * @param {HTMLFormElement} where a form
 * @param {Element} part of it, or what will be one
 */
export function reveal(where, part) {
  for (const box of all(part, "[data-shown-with]")) {
    const conditions = (box.dataset.shownWith ?? "").split(";").map((one) => one.split("="));
    const fits = conditions.some(([option, values]) => values.split(" ").includes(fieldOf(where, option)?.value ?? ""));
    const [field] = all(box, "input, select, textarea").filter(isField);
    const holds = field.dataset.option ? !untouched(/** @type {import("./inputs.js").Field} */ (field), family(where)) : Boolean(field.value);
    box.hidden = !holds && !fits;
  }
}

onSettled((where) => reveal(where, where));
