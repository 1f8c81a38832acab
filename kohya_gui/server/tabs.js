// The row of tabs: opens tabs by title, and keeps the open tab in view on narrow screens.
import { translated } from "../i18n/words.js";
import { all, hit } from "./elements.js";
import { wait } from "./http.js";

/**
 * Open a tab, and wait for its contents, which are loaded when it is first opened.
 * @param {string} title
 * @param {() => unknown} isThere
 */
export async function openTab(title, isThere) {
  const titles = [title, translated(title)];
  all(document, 'button[role="tab"]').find((button) => titles.includes(button.textContent.trim()))?.click();
  for (let i = 0; i < 100 && !isThere(); i++) await wait(50);
}

const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

// The usual keys for moving between tabs.
document.addEventListener("keydown", (event) => {
  const tab = hit(event, 'button[role="tab"]'), step = STEPS[/** @type {keyof typeof STEPS} */ (event.key)];
  if (!tab || step === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  const row = all(tab.closest('[role="tablist"]') ?? document, 'button[role="tab"]').filter((other) =>
    other.checkVisibility());
  const at = row.indexOf(tab);
  const next = Number.isFinite(step) ? (at + step + row.length) % row.length : step < 0 ? 0 : row.length - 1;
  row[next]?.click();
  row[next]?.focus();
});
document.addEventListener("click", (event) => {
  hit(event, 'button[role="tab"]')?.scrollIntoView({ block: "nearest", inline: "center" });
});
