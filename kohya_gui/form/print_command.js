// The buttons of a printed command: copy it, and write the config that it reads.
import { around, hit, make, one, withAllowButton } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";

/** @param {HTMLElement} button */
async function copy(button) {
  const command = one(around(button, ":has(pre)"), "pre");
  try {
    await navigator.clipboard.writeText(command.textContent);
  } catch {
    // Pages reached over plain HTTP from another computer have no clipboard: select the text instead.
    getSelection()?.selectAllChildren(command);
    return;
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/**
 * Write the config that a printed command reads into its file, and say so in the button's place.
 * @param {HTMLButtonElement} button
 */
async function keep(button) {
  const { path, script } = button.dataset;
  const toml = [...around(button, ".message").querySelectorAll("pre")].at(-1)?.textContent;
  const place = button.parentElement;
  button.disabled = true;
  try {
    const { said } = await ask("keep", { path, script, toml });
    place?.replaceChildren(said);
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
