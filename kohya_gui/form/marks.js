// Marks at a field: that it was changed, and that it is required.
import { say } from "../i18n/sentences.js";
import { around, find, make } from "../server/elements.js";

/**
 * Mark a field that differs from its initial value, and give it a button that resets it.
 * @param {Element} field
 * @param {boolean} differs
 */
export function markChanged(field, differs) {
  const box = around(field, ".field"), back = box.querySelector(".reset");
  if (box.classList.toggle("changed", differs) === Boolean(back)) return;
  back?.remove();
  if (!differs) return;
  const label = find(box, "label");
  const text = (label.querySelector("span") ?? label).textContent;
  label.after(
    make("button", {
      type: "button",
      className: "reset",
      title: "Back to what the form began with",
      "aria-label": say("Back to what the form began with: {label}", { label: text ?? "" }),
    }));
}

/**
 * Mark whether a field is required.
 * @param {Element} field
 * @param {boolean} isRequired
 */
export function markRequired(field, isRequired) {
  around(field, ".field").classList.toggle("required", isRequired);
  field.setAttribute("aria-required", String(isRequired));
}
