// Messages beside the buttons of a form.
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { all, around, find, make, withAllowButton } from "../server/elements.js";
import { messageOf } from "../server/http.js";
import * as form from "./page.js";

/**
 * The form of a tab as JSON, for the server.
 * @param {string} tab
 */
export const sentOf = (tab) => JSON.stringify(form.held(form.formOf(tab)));

/**
 * The form of a tab as JSON, for a request whose answer replaces the last message.
 * @param {string} tab
 * @param {string} [busy] what to show meanwhile
 */
export function read(tab, busy = "") {
  const where = form.formOf(tab);
  form.nextTurn(tab);
  const bar = where.closest(".training")?.querySelector(".bar");
  bar?.querySelector(".told")?.replaceChildren();
  bar?.classList.remove("own", "away");
  bar?.classList.toggle("newer", !busy); // show its answer at once, while an earlier check still runs
  for (const field of where.querySelectorAll(".mended")) field.classList.remove("mended");
  if (busy) showBusy(tab, busy);
  return sentOf(tab);
}

/** @param {string} tab */
const barOf = (tab) => find(around(form.formOf(tab), ".training"), ".bar");

/**
 * Show that something is in progress, or without a text that it is done.
 * @param {string} tab
 * @param {string} [busy]
 */
export function showBusy(tab, busy = "") {
  const bar = barOf(tab);
  bar.toggleAttribute("data-busy", Boolean(busy));
  find(bar, ".doing").textContent = busy && `${translated(busy)} …`;
}

/**
 * Show a message beside the buttons in place of the last one; without parts, remove it.
 * @param {string} tab
 * @param {"good" | "bad" | "plain"} kind
 * @param {(Node | string)[]} parts
 */
export function tell(tab, kind, ...parts) {
  const bar = barOf(tab);
  const place = bar.querySelector(".told") ?? make("div", { className: "told" });
  if (!place.isConnected) bar.prepend(place);
  bar.classList.toggle("own", parts.length > 0);
  bar.classList.remove("away");
  const away = make("button", { type: "button", className: "away", "aria-label": "Close" }, "✕");
  place.replaceChildren(
    ...(parts.length
      ? [make("div", { className: `message ${kind}`, role: kind === "bad" ? "alert" : "status" }, ...parts, away)]
      : []));
}

/**
 * @param {string} tab
 * @param {unknown} error
 */
export const tellError = (tab, error) =>
  tell(tab, "bad", ...messageOf(error).split("\n").map((line) => make("p", {}, ...withAllowButton(line))));

const nameOf = (/** @type {string} */ sent) => String(JSON.parse(sent).values.output_name || "last");

/**
 * Report a form that was not queued after another one has taken its place. The note stays until it is closed or that
 * form is queued, as buttons pressed meanwhile are about other forms.
 * @param {string} tab
 * @param {string} sent
 * @param {string} message the answer to it, as HTML
 */
export function tellUnqueued(tab, sent, message) {
  const bar = barOf(tab);
  const why = make("div", { innerHTML: message });
  for (const part of all(why, "button:not(.jump), .offer, style")) part.remove(); // they belong to the submitted form
  settleUnqueued(tab, sent);
  const name = nameOf(sent), words = make("p", {}, make("b", {}, say("{name} is not in the queue:", { name })));
  const away = make("button", { type: "button", className: "away", "aria-label": "Close" }, "✕");
  const kept = bar.querySelector(":scope > .kept") ?? make("div", { className: "kept" });
  if (!kept.isConnected) bar.prepend(kept);
  kept.append(
    make("div", { className: "message bad unqueued", role: "alert", "data-name": name }, words, why, away));
}

/**
 * Remove the note that a form is not in the queue, as it is now.
 * @param {string} tab
 * @param {string} sent
 */
export function settleUnqueued(tab, sent) {
  const bar = barOf(tab);
  for (const note of all(bar, ".unqueued")) if (note.dataset.name === nameOf(sent)) note.remove();
}

/**
 * Hide a report on another family's settings.
 * @param {HTMLFormElement} where
 */
export function putAway(where) {
  const bar = find(around(where, ".training"), ".bar");
  bar.classList.toggle("away", bar.querySelector(".message.bad, .findings") !== null);
}

document.addEventListener("change", ({ target }) => {
  if (target instanceof HTMLInputElement && target.name === "family" && target.form) putAway(target.form);
});
