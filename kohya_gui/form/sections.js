// The form's sections: fold them, and bring a field into view wherever it is.
import { around, find, hit } from "../server/elements.js";

/**
 * @param {Element} button of a section
 * @param {boolean} [open] without it, the section is toggled
 */
function fold(button, open = button.getAttribute("aria-expanded") !== "true") {
  const panel = find(document, `#${button.getAttribute("aria-controls")}`);
  button.setAttribute("aria-expanded", String(open));
  if (open) panel.removeAttribute("hidden");
  else panel.setAttribute("hidden", "until-found");
}

/**
 * Bring a field into view, and focus it.
 * @param {string} id
 */
export function jump(id) {
  const field = document.getElementById(id);
  if (!field) return;
  field.closest(".field")?.classList.add("led"); // visible even if rarely used
  field.closest("[data-shown-with]")?.removeAttribute("hidden");
  const section = field.closest(".section");
  if (section) fold(find(section, "button"), true);
  field.scrollIntoView({ block: "center" });
  field.focus({ preventScroll: true });
  const box = around(field, ".field");
  box.classList.remove("found");
  void box.offsetWidth; // otherwise a running animation would not restart
  box.classList.add("found");
}

document.addEventListener("click", (event) => {
  const row = hit(event, ".fold");
  if (row) fold(find(row, "button"));
  const link = hit(event, ".jump");
  if (link?.dataset.field) jump(link.dataset.field);
});
// The browser's own search opens the sections with its results.
document.addEventListener("beforematch", ({ target }) => {
  const button = target instanceof Element && document.querySelector(`[aria-controls="${target.id}"]`);
  if (button) fold(button, true);
}, true);
