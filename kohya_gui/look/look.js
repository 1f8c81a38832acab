// Light or dark, by the system or by the switch; and the link that skips the header.
import { find, hit } from "../server/elements.js";

const KEY = "kohya-colours";
const system = matchMedia("(prefers-color-scheme: dark)");

/** @returns {string} "light", "dark", or "" for the system's */
function chosen() {
  try {
    return localStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

const isDark = () => (chosen() ? chosen() === "dark" : system.matches);

/** Gradio sets the class of the body by the system alone, so this is called for each of its changes, too. */
function apply() {
  for (const element of [document.documentElement, document.body])
    if (element.classList.contains("dark") !== isDark()) element.classList.toggle("dark", isDark());
}

new MutationObserver(apply).observe(document.body, { attributes: true, attributeFilter: ["class"] });
system.addEventListener("change", apply);
addEventListener("storage", ({ key }) => key === KEY && apply()); // chosen in another window
apply();

/** @param {string} colours */
function choose(colours) {
  try {
    localStorage.setItem(KEY, colours);
  } catch {} // without storage the choice cannot be kept, and the system's colours stay
  apply();
}

/** Show the choice in the switch. */
export function mountHeader() {
  find(document, "#top .colours", HTMLSelectElement).value = chosen();
}

document.addEventListener("change", (event) => {
  const list = hit(event, "#top .colours", HTMLSelectElement);
  if (list) choose(list.value);
});
document.addEventListener("click", (event) => {
  if (!hit(event, ".skip", HTMLAnchorElement)) return;
  event.preventDefault(); // its target is no address of a room
  const panels = [...document.querySelectorAll('[role="tabpanel"]')].filter((panel) => panel.checkVisibility());
  const content = /** @type {HTMLElement | undefined} */ (panels.at(-1)); // the innermost
  content?.setAttribute("tabindex", "-1");
  content?.focus();
});
