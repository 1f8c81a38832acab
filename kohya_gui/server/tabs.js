// Rows of tabs: the usual keys, and the open tab stays in view on narrow screens.
import { all, hit } from "./elements.js";

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
