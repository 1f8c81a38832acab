// Marks at a field: that it differs from what the form began with, and that it has to be filled in.
import { say } from "../i18n/sentences.js";
import { around, make, one } from "../server/elements.js";

/**
 * Mark a field that differs from what the form began with, and give it a button that puts it back.
 * @param {Element} field
 * @param {boolean} differs
 */
export function markChanged(field, differs) {
  const box = around(field, ".field"), back = box.querySelector(".reset");
  if (box.classList.toggle("changed", differs) === Boolean(back)) return;
  back?.remove();
  if (!differs) return;
  const label = one(box, "label");
  const text = (label.querySelector("span") ?? label).textContent;
  label.after(make("button", { type: "button", className: "reset", title: "Back to what the form began with", "aria-label": say("Back to what the form began with: {label}", { label: text ?? "" }) }));
}

/**
 * Say whether a field has to be filled in.
 * @param {Element} field
 * @param {boolean} wanted
 */
export function markRequired(field, wanted) {
  around(field, ".field").classList.toggle("required", wanted);
  field.setAttribute("aria-required", String(wanted));
}
