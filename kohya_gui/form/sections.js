// The form's sections: fold them, and bring a field into view wherever it is folded away.
import { around, hit, one } from "../server/elements.js";

/**
 * @param {Element} button of a section
 * @param {boolean} [open] without it a section that is open is closed, and the other way round
 */
function fold(button, open = button.getAttribute("aria-expanded") !== "true") {
  const panel = one(document, `#${button.getAttribute("aria-controls")}`);
  button.setAttribute("aria-expanded", String(open));
  if (open) panel.removeAttribute("hidden");
  else panel.setAttribute("hidden", "until-found");
}

/**
 * Bring a field into view, and put the cursor there.
 * @param {string} id
 */
export function jump(id) {
  const field = document.getElementById(id);
  if (!field) return;
  field.closest(".field")?.classList.add("led"); // seen, also where it is rarely used
  field.closest("[data-shown-with]")?.removeAttribute("hidden");
  const section = field.closest(".section");
  if (section) fold(one(section, "button"), true);
  field.scrollIntoView({ block: "center" });
  field.focus({ preventScroll: true });
  const box = around(field, ".field");
  box.classList.remove("found");
  void box.offsetWidth; // or an animation that is still running would not begin again
  box.classList.add("found");
}

document.addEventListener("click", (event) => {
  const row = hit(event, ".fold");
  if (row) fold(one(row, "button"));
  const link = hit(event, ".jump");
  if (link?.dataset.field) jump(link.dataset.field);
});
// The browser's own search opens what it finds.
document.addEventListener("beforematch", ({ target }) => {
  const button = target instanceof Element && document.querySelector(`[aria-controls="${target.id}"]`);
  if (button) fold(button, true);
}, true);
