// The row of tabs: opened by their titles, and on a narrow screen scrolled so that the open tab is in view.
import { translated } from "../i18n/words.js";
import { all, hit } from "./elements.js";
import { wait } from "./http.js";

/**
 * Open a tab, and wait until what is in it is there, which comes when a tab is opened for the first time.
 * @param {string} title
 * @param {() => unknown} there
 */
export async function openTab(title, there) {
  const titles = [title, translated(title)];
  all(document, 'button[role="tab"]').find((button) => titles.includes(button.textContent.trim()))?.click();
  for (let i = 0; i < 100 && !there(); i++) await wait(50);
}

document.addEventListener("click", (event) => {
  hit(event, 'button[role="tab"]')?.scrollIntoView({ block: "nearest", inline: "center" });
});
