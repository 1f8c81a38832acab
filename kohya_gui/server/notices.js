// Notices about the whole page, below its bar: an address that leads nowhere, an unreachable server.
import { make } from "./elements.js";

/**
 * Show a notice, in place of the last one of its kind.
 * @param {string} kind
 * @param {(import("./elements.js").Child)[]} children none takes it away
 */
export function notify(kind, ...children) {
  const place = document.querySelector("#top .notices"), before = place?.querySelector(`[data-kind="${kind}"]`);
  if (!children.length) return void before?.remove();
  if (before?.textContent === children.map((child) => (child instanceof Node ? child.textContent : child)).join(""))
    return;
  before?.remove();
  place?.append(make("div", { className: "message bad", "data-kind": kind }, children));
}
