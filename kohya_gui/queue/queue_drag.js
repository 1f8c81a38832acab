// Moves entries of the queue by the mouse, a pen or a finger: only by their handles, so that a page still scrolls.
import { all, hit } from "../server/elements.js";

/** @typedef {{ entry: HTMLElement, id: string, others: HTMLElement[], place: number, pointer: number }} Drag */

/** @type {Drag | null} */
let drag = null;

export const isDragging = () => drag !== null;

/**
 * Let waiting entries be dragged.
 * @param {HTMLElement} where
 * @param {(id: string, to: number) => unknown} drop gets an entry's id and its new place, 1 for the first
 */
export function dragBy(where, drop) {
  where.addEventListener("pointerdown", (event) => {
    const handle = hit(event, ".handle"), entry = handle?.closest(".entry");
    if (!handle || !(entry instanceof HTMLElement) || event.button !== 0) return;
    event.preventDefault();
    const waiting = all(where, ".entry[data-state=waiting]"), at = waiting.indexOf(entry);
    handle.setPointerCapture(event.pointerId);
    entry.classList.add("dragged");
    drag = {
      entry, id: entry.dataset.id ?? "", others: waiting.filter((other) => other !== entry), place: at,
      pointer: event.pointerId,
    };
  });
  where.addEventListener("pointermove", (event) => {
    if (!drag || event.pointerId !== drag.pointer) return;
    const { entry, others } = drag;
    const middle = (/** @type {HTMLElement} */ other) => {
      const box = other.getBoundingClientRect();
      return box.top + box.height / 2;
    };
    const before = others.findIndex((other) => event.clientY < middle(other));
    const place = before < 0 ? others.length : before;
    if (place === drag.place) return;
    drag.place = place;
    const held = entry.querySelector(".handle");
    if (before < 0) others[others.length - 1].after(entry);
    else others[before].before(entry);
    held?.setPointerCapture(event.pointerId); // a moved element loses the pointer capture
  });
  const end = (/** @type {PointerEvent} */ event) => {
    if (!drag || event.pointerId !== drag.pointer) return;
    const { entry, id, place } = drag;
    entry.classList.remove("dragged");
    drag = null;
    drop(id, place + 1);
  };
  where.addEventListener("pointerup", end);
  where.addEventListener("pointercancel", end);
}
