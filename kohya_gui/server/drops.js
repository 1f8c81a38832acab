// Files dropped anywhere on the page go to the visible part; otherwise the browser would leave the page.
import { all, hit, make, makeButton } from "./elements.js";
import { messageOf } from "./http.js";
import { notify } from "./notices.js";
import { foldersOf } from "./uploads.js";

/** @typedef {import("./uploads.js").Folder} Folder */
/** @typedef {(place: HTMLElement, folders: Folder[], event: Event) => unknown} Take */

const KIND = "drop";
/** @type {[string, Take][]} */
const takers = [];
let isOfPage = false; // whether a part of the page is dragged: browsers offer its images as files, too

/**
 * Let the visible element that matches take dropped files.
 * @param {string} where
 * @param {Take} take
 */
export const takeDrops = (where, take) => void takers.push([where, take]);

/**
 * Whether files are dragged, and not text or a part of the page.
 * @param {Event} event
 */
export const hasFiles = (event) =>
  !isOfPage && event instanceof DragEvent && Boolean(event.dataTransfer?.types.includes("Files"));

/** @param {string} text an empty one takes the last one away */
function tell(text) {
  const close = makeButton("✕", () => tell(""), { "aria-label": "Close" });
  notify(KIND, ...(text ? [make("p", {}, text), close] : []));
}

/**
 * Refuse files dropped while a window is open: they would go to the page behind it, whose answer is hidden.
 * @param {Element} dialog
 */
function refuse(dialog) {
  const text = "Close this window first: dropped files go to the page behind it.";
  const answer = make("div", { className: "message bad no-drop", role: "alert" }, make("p", {}, text));
  dialog.querySelector(".no-drop")?.remove();
  dialog.append(answer);
  dialog.addEventListener("close", () => answer.remove(), { once: true });
}

/** @param {DragEvent} event */
async function drop(event) {
  const dialog = document.querySelector("dialog:modal");
  if (dialog) return refuse(dialog);
  for (const sheet of all(document, ":popover-open")) sheet.hidePopover(); // it would cover the answer
  /** @type {Folder[]} */
  let folders;
  try {
    folders = await foldersOf(/** @type {DataTransfer} */ (event.dataTransfer));
  } catch (error) {
    return tell(messageOf(error));
  }
  for (const [where, take] of takers) {
    const place = hit(event, where) ?? all(document, where).find((element) => element.checkVisibility());
    if (!place) continue;
    tell("");
    return void take(place, folders, event);
  }
  tell("Drop images and captions in Data or in Train, configs in Train. Choose models and LoRA files with Browse.");
}

document.addEventListener("dragstart", () => void (isOfPage = true));
// No event ends a drag whose element is gone, but the pointer moves only after it.
for (const type of ["dragend", "pointermove", "pointerdown"])
  document.addEventListener(type, () => void (isOfPage = false));
for (const type of ["dragover", "drop"]) {
  document.addEventListener(type, (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    if (type === "drop") void drop(/** @type {DragEvent} */ (event));
  });
}
