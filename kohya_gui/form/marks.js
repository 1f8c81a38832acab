// Marks at a field: that it was changed, that it is required, and that a message is about it.
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

/**
 * Remove from fields with another value the red border that the last message gave them.
 * @param {[string, string | boolean][]} before the values by the id of their field
 * @param {[string, string | boolean][]} now
 */
export function forgetMarks(before, now) {
  const old = new Map(before);
  for (const [id, value] of now)
    if (old.has(id) && old.get(id) !== value) document.getElementById(id)?.classList.add("mended");
}
