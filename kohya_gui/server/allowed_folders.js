// The button in a message that lets the page use a folder.
import { hit, make } from "./elements.js";
import { ask, messageOf } from "./http.js";

// What asks for something that can be refused for want of a folder.
const ASKING = ".bar .row button, .begin button:not(.opens), .bar .keep, .bar .probe, [data-do], [data-go], .lab button";

/** @type {HTMLButtonElement | undefined} */
let pressed;

/**
 * Let the page use a folder; when nothing else is asked in the same place, what was refused is done again.
 * @param {HTMLButtonElement} button
 */
async function allow(button) {
  const place = button.closest(".message") ?? button.parentElement;
  button.disabled = true;
  try {
    const { said } = await ask("allow", { folder: button.dataset.allow });
    button.replaceWith(make("b", { className: "allowed" }, said));
  } catch (error) {
    button.after(make("b", {}, messageOf(error)));
    return;
  }
  if (!place || place.querySelector(".allow:not(:disabled)")) return;
  if (place.closest("dialog")) place.dispatchEvent(new Event("kohya:allowed", { bubbles: true }));
  // Probe is hidden behind its answer, but its bar is not.
  else if (pressed?.isConnected && (pressed.closest(".bar") ?? pressed).checkVisibility()) pressed.click();
}

document.addEventListener("click", (event) => {
  const button = hit(event, "button", HTMLButtonElement);
  if (button?.matches(".allow")) allow(button);
  else if (button?.matches(ASKING)) pressed = button;
}, true);
