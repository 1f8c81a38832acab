// A sample of a strip opens large, compared with the one before: in the panel and in the tab Try it.
import { all, find, hit } from "../server/elements.js";
import { goneNote, openViewer } from "../runs/viewer.js";

/**
 * @param {HTMLElement} strip below its prompt
 * @returns {import("../runs/viewer.js").Row}
 */
function rowOf(strip) {
  const shots = all(strip, ".sample").map((sample) => ({
    position: Number(sample.dataset.step ?? [...strip.children].indexOf(sample)),
    title: [find(sample, "span").textContent, sample.title].filter(Boolean).join(", "),
    address: sample.dataset.large ?? "",
  }));
  if (strip.closest(".samples")) shots.reverse(); // the panel has the newest first
  return { prompt: strip.previousElementSibling?.textContent ?? "", shots };
}

document.addEventListener("click", (event) => {
  const sample = hit(event, ".sample"), board = sample?.closest("section");
  if (!sample || !board) return;
  const rows = all(board, ".strip").map(rowOf).filter(({ shots }) => shots.length);
  const address = sample.dataset.large ?? "";
  const sameNow = () => all(document, ".sample").find(({ dataset }) => dataset.large === address);
  openViewer(() => rows, address, true, () => sameNow()?.focus()); // the panel may have replaced it
});
// Replace a deleted image by a note, and remove an original that is missing or that the page may not read.
document.addEventListener("kohya:lost", (event) => {
  const { target, detail } = /** @type {CustomEvent<import("../server/images.js").Lost>} */ (event);
  const sample = target instanceof HTMLImageElement ? target.closest(".sample") : null;
  if (sample?.matches(".original")) sample.remove();
  else sample?.replaceWith(goneNote(detail)); // in its place, as columns are steps or files
});
