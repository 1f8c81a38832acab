// The buttons of a printed command: copy it, and save the config that it uses.
import { around, find, hit, make, withAllowButton } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";

/** @param {HTMLElement} button */
async function copy(button) {
  const command = find(around(button, ":has(pre)"), "pre");
  try {
    await navigator.clipboard.writeText(command.textContent);
  } catch {
    // Over plain HTTP from another computer there is no clipboard: select the text instead.
    getSelection()?.selectAllChildren(command);
    return;
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/**
 * Save the config that a printed command uses, and confirm it in place of the button.
 * @param {HTMLButtonElement} button
 */
async function keep(button) {
  const { path, script } = button.dataset;
  const toml = [...around(button, ".message").querySelectorAll("pre")].at(-1)?.textContent;
  const place = button.parentElement;
  button.disabled = true;
  try {
    const { said: sentence } = await ask("keep", { path, script, toml });
    place?.replaceChildren(sentence);
  } catch (error) {
    button.disabled = false;
    const answer = place?.querySelector("b") ?? place?.appendChild(make("b"));
    answer?.replaceChildren(...withAllowButton(messageOf(error)));
  }
}

document.addEventListener("click", (event) => {
  const copier = hit(event, ".copy");
  if (copier) copy(copier);
  const keeper = hit(event, ".keep", HTMLButtonElement);
  if (keeper) keep(keeper);
});
