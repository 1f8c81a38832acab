// Find and make elements. Contents of files are always set as text, never as HTML.
import { say } from "../i18n/sentences.js";
import { folderToAllow } from "./http.js";

/** @typedef {Node | string | null | undefined | false} Child */

/**
 * An element with properties (data-*, aria-* and role as attributes) and children; null and false are skipped.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, unknown>} [properties]
 * @param {(Child | Child[])[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (/^(data-|aria-|role$|for$|list$)/.test(name)) element.setAttribute(name, String(value));
    else Object.assign(element, { [name]: value });
  }
  for (const child of children.flat())
    if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

/**
 * A progress bar; the text beside it has the same content.
 * @template {"div" | "span"} Tag
 * @param {Tag} tag
 * @param {number | null} share from 0 to 1; null if it is not known
 * @param {string} text for those who do not see the bar
 */
export function makeBar(tag, share, text) {
  const percent = 100 * Math.min(1, share ?? 0);
  return make(tag, {
    className: share === null ? "track waiting" : "track", role: "progressbar", "aria-label": "Progress",
    "aria-valuemin": "0", "aria-valuemax": "100",
    "aria-valuenow": share === null ? null : String(Math.round(percent)), "aria-valuetext": text,
  }, make("i", { style: `width:${percent}%` }));
}

/**
 * A button with its action.
 * @param {string} text
 * @param {() => unknown} press
 * @param {Record<string, unknown>} [properties]
 */
export function makeButton(text, press, properties = {}) {
  const button = make("button", { type: "button", ...properties }, text);
  button.addEventListener("click", () => void press());
  return button;
}

/**
 * The first element below `root` that matches. Throws an error if there is none, or if it is not a `type`.
 * @template {Element} [T=HTMLElement]
 * @param {ParentNode} root
 * @param {string} selector
 * @param {new () => T} [type]
 * @returns {T}
 */
export function find(root, selector, type) {
  const element = root.querySelector(selector);
  if (!(element instanceof (type ?? HTMLElement))) throw new Error(`${selector} is not on the page`);
  return /** @type {T} */ (element);
}

/**
 * `find` below what `root` returns at that time.
 * @param {() => ParentNode} root
 */
export const finder = (root) =>
  /**
   * @template {Element} [T=HTMLElement]
   * @param {string} selector
   * @param {new () => T} [type]
   */
  (selector, type) => find(root(), selector, type);

/**
 * All elements below `root` that match and are a `type`.
 * @template {Element} [T=HTMLElement]
 * @param {ParentNode} root
 * @param {string} selector
 * @param {new () => T} [type]
 * @returns {T[]}
 */
export function all(root, selector, type) {
  const elements = [...root.querySelectorAll(selector)].filter((element) => element instanceof (type ?? HTMLElement));
  return /** @type {T[]} */ (elements);
}

/**
 * The closest element around `inner` that matches. Throws an error if there is none.
 * @param {Element} inner
 * @param {string} selector
 * @returns {HTMLElement}
 */
export function around(inner, selector) {
  const element = inner.closest(selector);
  if (!(element instanceof HTMLElement)) throw new Error(`nothing around this is ${selector}`);
  return element;
}

/**
 * The closest matching element around an event's target, if there is one.
 * @template {Element} [T=HTMLElement]
 * @param {Event} event
 * @param {string} selector
 * @param {new () => T} [type]
 * @returns {T | null}
 */
export function hit({ target }, selector, type) {
  const element = target instanceof Element ? target.closest(selector) : null;
  return element instanceof (type ?? HTMLElement) ? /** @type {T} */ (element) : null;
}

/** @typedef {HTMLInputElement | HTMLSelectElement | HTMLTextAreaElement} Field */

/**
 * @param {unknown} element
 * @returns {element is Field}
 */
export const isField = (element) =>
  element instanceof HTMLInputElement || element instanceof HTMLSelectElement || element instanceof HTMLTextAreaElement;

/**
 * @param {Field} field
 * @returns {field is HTMLInputElement}
 */
export const isBox = (field) => field instanceof HTMLInputElement && field.type === "checkbox";

/**
 * The value of a field.
 * @param {Field} field
 */
export const fieldValue = (field) => (isBox(field) ? field.checked : field.value);

/**
 * Set the value of a field; texts such as "true" work for checkboxes.
 * @param {Field} field
 * @param {unknown} value
 */
export function setValue(field, value) {
  if (isBox(field)) field.checked = value === true || value === "true";
  else field.value = String(value ?? "");
}

/**
 * Show a message in the page's style.
 * @param {Element} place
 * @param {"good" | "bad" | "plain" | ""} kind
 * @param {string} text an empty one removes the message
 */
export function showMessage(place, kind, text) {
  const lines = text.split("\n").filter(Boolean);
  const body =
    lines.length > 1
      ? make("ul", {},
          lines.map((line) => make("li", {}, ...withAllowButton(line))))
      : make("p", {}, ...withAllowButton(lines[0] ?? ""));
  place.replaceChildren(
    ...(text ? [make("div", { className: `message ${kind}`, role: kind === "bad" ? "alert" : "status" }, body)] : []));
}

/**
 * A sentence and, if it asks to allow a folder or code, the button that does so (allowed_folders.js).
 * @param {string} line
 */
export function withAllowButton(line) {
  const folder = folderToAllow(line);
  return folder
    ? [
        line,
        " ",
        make("button", { type: "button", className: "allow", "data-allow": folder },
          folder.startsWith("code:") ? "Allow this code" : "Allow this folder"),
      ]
    : [line];
}

const LAYOUT_TIMEOUT = 3000; // milliseconds for late images to move what was scrolled to

/**
 * Scroll to an element, and again whenever images that load above it move it, until the user acts.
 * @param {Element} element
 */
export function scrollToSettled(element) {
  const observer = new ResizeObserver(() => element.scrollIntoView({ block: "start" }));
  const signal = AbortSignal.timeout(LAYOUT_TIMEOUT);
  signal.addEventListener("abort", () => observer.disconnect());
  for (const kind of ["wheel", "touchstart", "pointerdown", "keydown"])
    addEventListener(kind, () => observer.disconnect(), { once: true, signal });
  observer.observe(document.body); // which also reports once right away
}

/**
 * Save a file to the downloads.
 * @param {Blob} data
 * @param {string} name
 */
export function saveFile(data, name) {
  const link = make("a", { href: URL.createObjectURL(data), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/**
 * A size in words: 23.8 GB, 335 MB.
 * @param {number} bytes
 */
export function sizeOf(bytes) {
  for (const [unit, size] of /** @type {[string, number][]} */ ([["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]))
    if (bytes >= size) return `${(bytes / size).toFixed(1)} ${unit}`;
  return `${bytes} bytes`;
}

/**
 * Replace the choices of a list.
 * @param {HTMLElement} select
 * @param {string[][]} entries a key and the parts of its text for each
 * @param {string} value the key of the selected one
 */
export function fillSelect(select, entries, value) {
  select.replaceChildren(
    ...entries.map(([key, ...texts]) => make("option", { value: key, selected: key === value }, texts)));
}

/**
 * The sentence above the last lines of a log, if it has more.
 * @param {string} file "" if all lines are shown
 */
export const noteLongerLog = (file) =>
  file ? [make("p", { className: "quiet" }, say("Only the last lines are shown; all are in {file}.", { file }))] : [];
