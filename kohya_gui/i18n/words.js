// The page in the reader's language: English is what the page is made in, and a catalogue from the server is put over it.
import { ask } from "../server/http.js";
import { translate } from "./render.js";
import { remember, sentenceOf } from "./sentences.js";

/** @typedef {import("./labels.js").Near} Near */
/** @typedef {{ from: string, shown: string }} Original what a node said in English, and what it was made to say */

/** @type {Record<string, string>} */
const LANGUAGES = { en: "English", zh: "中文", ja: "日本語" };
// Code, and names of the user's folders, files and trainings, which may well be words of the catalogues.
const SKIPPED = "code, pre, style, script, textarea, datalist, .differences td, .who b, .about > b, .name, .preview small, .picker li > span, span.own";
const ATTRIBUTES = ["placeholder", "aria-label", "title"];
const TEXTS = "data-texts"; // how the sentences in an element were made

/** @param {string} [value] without it what was kept is read */
const store = (value) => {
  try {
    if (value === undefined) return localStorage.getItem("kohya-language");
    localStorage.setItem("kohya-language", value);
  } catch {} // a browser that keeps nothing asks for its own language each time
  return null;
};
const asked = [store() ?? "", ...navigator.languages].map((name) => name.slice(0, 2).toLowerCase());
let language = asked.find((name) => name in LANGUAGES) ?? "en";
/** @type {Record<string, string>} */
let words = {};
/** @type {WeakMap<Node, Record<string, Original>>} by attribute, or "data" */
const originals = new WeakMap();

const MOST = 4000; // translations that scripts wrote, the newest
/** @type {Map<string, string>} what a script wrote in the reader's language -> English, for when another is chosen */
const written = new Map();

/**
 * A text in the reader's language, for a script that writes it; what no catalogue has stays as it is.
 * @param {string} text
 * @returns {string}
 */
export function translated(text) {
  const shown = translation(text, { element: null, used: [] });
  if (shown === text) return shown;
  written.delete(shown);
  written.set(shown, text);
  for (const oldest of [...written.keys()].slice(0, Math.max(0, written.size - MOST))) written.delete(oldest);
  return shown;
}

/**
 * @param {string} text
 * @param {Near} near
 */
const translation = (text, near) => translate(text, { words, language }, near);

/**
 * What an element of one text says in English.
 * @param {Element} element
 */
export function inEnglish(element) {
  const known = element.firstChild && originals.get(element.firstChild)?.data;
  return known && known.shown === element.textContent ? known.from : element.textContent;
}

/**
 * Show a text of a node in the reader's language.
 * @param {Element | Text} node
 * @param {string} key an attribute, or "data" for a text node's own
 * @param {string} now what it says
 * @param {(text: string) => void} write
 */
function put(node, key, now, write) {
  const known = originals.get(node) ?? {};
  const bare = now.trim();
  if (!bare) return;
  const from = known[key] && known[key].shown === now ? known[key].from : now.replace(bare, () => written.get(bare) ?? bare);
  const core = from.trim();
  const element = node instanceof Element ? node : node.parentElement, near = { element, used: /** @type {string[]} */ ([]) };
  const other = translation(core.replace(/\s+/g, " "), near);
  if (key === "data" && element instanceof HTMLElement && near.used.length && !element.title) element.title = [...new Set(near.used)].join(", ");
  const behind = key === "data" && language !== "en" && other !== core && node.previousSibling?.nodeName === "CODE" && !/^[：（=]/.test(other);
  const shown = behind ? `：${other}` : from.replace(core, () => other);
  originals.set(node, { ...known, [key]: { from, shown } });
  if (shown !== now) write(shown);
}

/** @param {Node} root */
function translateAll(root) {
  if (root instanceof Text) return void translateText(root);
  if (!(root instanceof Element) || root.closest("script, style")) return;
  for (const element of [root, ...root.querySelectorAll(`[${TEXTS}]`)]) remember(JSON.parse(element.getAttribute(TEXTS) ?? "[]"));
  if (!isPlain()) for (const element of [root, ...root.querySelectorAll("[placeholder], [aria-label], [title]")]) translateAttributes(element);
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) translateText(/** @type {Text} */ (walker.currentNode));
}

/** @param {Text} node */
function translateText(node) {
  const box = node.parentElement;
  if (isPlain() && !sentenceOf(node.data)) return;
  // A choice that is a value stays as it is.
  if (box instanceof HTMLOptionElement && (box.value.endsWith(node.data.trim()) || !box.hasAttribute("value"))) return;
  if (box && !box.closest(SKIPPED)) put(node, "data", node.data, (to) => (node.data = to));
}

/** @param {Element} element */
function translateAttributes(element) {
  for (const name of ATTRIBUTES)
    if (element.hasAttribute(name)) put(element, name, element.getAttribute(name) ?? "", (to) => element.setAttribute(name, to));
}

const observer = new MutationObserver((changes) => {
  addSwitch();
  for (const { type, target, attributeName, addedNodes } of changes) {
    if (type === "characterData") translateText(/** @type {Text} */ (target));
    else if (attributeName === TEXTS) translateAll(target); // its text node may have been changed before
    else if (type === "attributes" && !isPlain()) translateAttributes(/** @type {Element} */ (target));
    else if (type === "childList") addedNodes.forEach(translateAll);
  }
});
let started = false;

/** Whether the page is in English and always was: only names of options in its sentences are replaced then. */
const isPlain = () => language === "en" && !started;

/** @param {string} name */
async function use(name) {
  words = name === "en" ? {} : (await ask("words", { language: name })).words;
  [language, started] = [name, true];
  document.documentElement.lang = name;
  translateAll(document.body);
}

function addSwitch() {
  const header = document.querySelector("#top header");
  if (!header || header.querySelector(".language")) return;
  const list = document.createElement("select");
  list.className = "language";
  list.setAttribute("aria-label", "Language");
  for (const [name, title] of Object.entries(LANGUAGES)) list.append(new Option(title, name, false, name === language));
  list.onchange = () => {
    store(list.value);
    use(list.value).catch(() => (list.value = language));
  };
  header.append(list);
}

observer.observe(document.body, { childList: true, subtree: true, characterData: true, attributes: true, attributeFilter: [...ATTRIBUTES, TEXTS] });
addSwitch();
if (language !== "en") use(language).catch(() => {}); // without a table the page stays English
