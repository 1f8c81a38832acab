// The button in a message that allows a folder.
import { all, hit, make } from "./elements.js";
import { ask, messageOf } from "./http.js";

// Buttons whose request may be refused because a folder is not allowed.
const ASKING =
  ".bar .row button, .begin button:not(.opens), .bar .keep, .bar .probe, [data-do], [data-go], .lab button";

/** @type {HTMLButtonElement | undefined} */
let pressed;

/** @type {Map<string, { said: string, when: number }>} the folders that were allowed on this page */
const allowed = new Map();

/**
 * Mark folders in an answer that were allowed before it arrived.
 * @param {HTMLElement} place
 * @param {number} since when the request was sent
 * @returns {boolean} whether nothing else has to be allowed, so that the request can be repeated
 */
export function markAllowed(place, since) {
  let marked = false;
  for (const button of all(place, ".allow")) {
    const allowance = allowed.get(button.dataset.allow ?? "");
    if (!allowance || allowance.when < since) continue;
    button.replaceWith(make("b", { className: "allowed" }, allowance.said));
    marked = true;
  }
  return marked && !place.querySelector(".allow");
}

/**
 * Allow a folder; if the same message needs nothing else, repeat the refused request.
 * @param {HTMLButtonElement} button
 */
async function allow(button) {
  const { allow: folder = "" } = button.dataset;
  /** @type {Element | null} */
  let place;
  button.disabled = true;
  try {
    const { said: sentence } = await ask("allow", { folder });
    allowed.set(folder, { said: sentence, when: performance.now() });
    // An answer that arrived meanwhile shows the button again.
    const shown = button.isConnected
      ? button
      : (all(document, ".allow").find(({ dataset }) => dataset.allow === folder) ?? button);
    place = shown.closest(".message") ?? shown.parentElement;
    shown.replaceWith(make("b", { className: "allowed" }, sentence));
  } catch (error) {
    button.after(make("b", {}, messageOf(error)));
    return;
  }
  if (!place || place.querySelector(".allow:not(:disabled)")) return;
  if (place.matches("dialog *, .field > small")) place.dispatchEvent(new Event("kohya:allowed", { bubbles: true }));
  // Probe's button may be hidden behind its answer; its bar is not.
  else if (pressed?.isConnected && (pressed.closest(".bar") ?? pressed).checkVisibility()) pressed.click();
}

document.addEventListener("click", (event) => {
  const button = hit(event, "button", HTMLButtonElement);
  if (button?.matches(".allow")) allow(button);
  else if (button?.matches(ASKING)) pressed = button;
}, true);
