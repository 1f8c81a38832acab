// Path fields show the ends of their paths while they are not edited: in a narrow one the file's name would be cut off.
import { hit } from "./elements.js";
import { inputOf } from "./picker.js";

/** @type {WeakMap<HTMLInputElement, string>} the value whose end a field shows */
const shown = new WeakMap();

/** @param {HTMLInputElement} input */
function showEnd(input) {
  if (input === document.activeElement) return;
  input.style.textOverflow = input.value ? "clip" : ""; // an ellipsis would stand in place of the end
  input.scrollLeft = input.scrollWidth;
  shown.set(input, input.value);
}

const resized = new ResizeObserver((entries) => { // also when a field becomes visible
  for (const { target } of entries) if (target instanceof HTMLInputElement) showEnd(target);
});

const buttons = document.getElementsByClassName("pick"); // live, so that new fields need no query of the page
let isDue = false;

/** Show the ends of values that any script has set since. */
function showNew() {
  isDue = false;
  for (const button of buttons) {
    const input = inputOf(button);
    if (!(input instanceof HTMLInputElement) || shown.get(input) === input.value) continue;
    if (!shown.has(input)) resized.observe(input);
    shown.set(input, input.value);
    showEnd(input);
  }
}

function showSoon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(showNew);
}

new MutationObserver(showSoon).observe(document.body, { childList: true, subtree: true });
for (const type of ["input", "change"]) document.addEventListener(type, showSoon);
document.addEventListener("focusout", (event) => {
  const input = hit(event, "input");
  if (input instanceof HTMLInputElement && shown.has(input)) setTimeout(() => showEnd(input)); // it shows its beginning
});
