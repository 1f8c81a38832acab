// The page in the user's language: it is written in English and translated in the browser, by the server's catalogue.
import { ask } from "../server/http.js";
import { countRequests } from "../server/late.js";
import { translate } from "./render.js";
import { remember, sentenceOf } from "./sentences.js";

/** @typedef {import("./labels.js").Near} Near */
/** @typedef {{ from: string, shown: string }} Original a node's text in English, and its translation */

/** @type {Record<string, string>} */
const LANGUAGES = { en: "English", zh: "中文", ja: "日本語" };
// Code, and names of the user's folders, files and trainings, which may match entries of a catalogue.
const SKIPPED =
  "code, pre, style, script, textarea, .differences td:not(.word), .who b, .about > b, .name, .preview small, " +
  ".picker li > span, span.own";
/** @type {Record<string, string>} titles of tabs that mean something else than the same word on a button */
const TAB_TITLES = { Train: "Train (room)" };
const ATTRIBUTES = ["placeholder", "aria-label", "aria-valuetext", "title", "alt", "data-label"];
const TEXTS = "data-texts"; // templates and arguments of the sentences in an element

/** @param {string} [value] without it, the stored language is returned */
const store = (value) => {
  try {
    if (value === undefined) return localStorage.getItem("kohya-language");
    localStorage.setItem("kohya-language", value);
  } catch {} // without storage the browser's own language is used each time
  return null;
};
const preferred = [store() ?? "", ...navigator.languages].map((name) => name.slice(0, 2).toLowerCase());
let language = preferred.find((name) => name in LANGUAGES) ?? "en";
/** @type {Record<string, string>} */
let words = {};
/** @type {WeakMap<Node, Record<string, Original>>} by attribute, or "data" */
const originals = new WeakMap();

const MAX_WRITTEN = 4000; // translations by scripts remembered at most, the newest
/** @type {Map<string, string>} a translation written by a script -> English, for a change of language */
const written = new Map();

/**
 * Translate a text that a script writes; a text without a translation stays in English.
 * @param {string} text
 * @returns {string}
 */
export function translated(text) {
  const shown = translation(text, { element: null, used: [] });
  if (shown === text) return shown;
  written.delete(shown);
  written.set(shown, text);
  for (const oldest of [...written.keys()].slice(0, Math.max(0, written.size - MAX_WRITTEN))) written.delete(oldest);
  return shown;
}

/**
 * @param {string} text
 * @param {Near} near
 */
const translation = (text, near) => translate(text, { words, language }, near);

/**
 * The English text of an element with a single text.
 * @param {Element} element
 */
export function inEnglish(element) {
  const original = element.firstChild && originals.get(element.firstChild)?.data;
  return original && original.shown === element.textContent ? original.from : element.textContent;
}

/**
 * The text of the catalogue for a tab's title, if it is not the title itself.
 * @param {string} text
 * @param {Element | null} element
 */
const asTitle = (text, element) =>
  language !== "en" && element?.matches('[role="tab"]') ? TAB_TITLES[text] : undefined;

/**
 * Show a node's text in the user's language.
 * @param {Element | Text} node
 * @param {string} key an attribute, or "data" for a text node's own
 * @param {string} now its current text
 * @param {(text: string) => void} write
 */
function put(node, key, now, write) {
  const nodeOriginals = originals.get(node) ?? {};
  const bare = now.trim();
  if (!bare) return;
  const original = nodeOriginals[key]; // out of date if a script has written another text since
  const from = original?.shown === now ? original.from : now.replace(bare, () => written.get(bare) ?? bare);
  const core = from.trim();
  const element = node instanceof Element ? node : node.parentElement;
  const near = { element, used: /** @type {string[]} */ ([]) };
  const other = translation(asTitle(core, element) ?? core.replace(/\s+/g, " "), near);
  if (key === "data" && element instanceof HTMLElement && near.used.length && !element.title)
    element.title = [...new Set(near.used)].join(", ");
  const behind =
    key === "data" &&
    language !== "en" &&
    other !== core &&
    node.previousSibling instanceof HTMLElement &&
    node.previousSibling.matches("code, .jump") &&
    !/^[：（=]/.test(other);
  const shown = behind ? `：${other}` : from.replace(core, () => other);
  originals.set(node, { ...nodeOriginals, [key]: { from, shown } });
  if (shown !== now) write(shown);
}

/** @param {Node} root */
function translateAll(root) {
  if (root instanceof Text) return void translateText(root);
  if (!(root instanceof Element) || root.closest("script, style")) return;
  for (const element of [root, ...root.querySelectorAll(`[${TEXTS}]`)])
    remember(JSON.parse(element.getAttribute(TEXTS) ?? "[]"));
  if (!isPlain())
    for (const element of [root, ...root.querySelectorAll(ATTRIBUTES.map((name) => `[${name}]`).join())])
      translateAttributes(element);
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) translateText(/** @type {Text} */ (walker.currentNode));
}

/** @param {Text} node */
function translateText(node) {
  const box = node.parentElement;
  if (isPlain() && !sentenceOf(node.data)) return;
  // A choice whose text is its value is not translated.
  if (box instanceof HTMLOptionElement && (box.value.endsWith(node.data.trim()) || !box.hasAttribute("value"))) return;
  if (box && !box.closest(SKIPPED)) put(node, "data", node.data, (to) => (node.data = to));
}

/** @param {Element} element */
function translateAttributes(element) {
  for (const name of ATTRIBUTES)
    if (element.hasAttribute(name))
      put(element, name, element.getAttribute(name) ?? "", (to) => element.setAttribute(name, to));
}

const observer = new MutationObserver((changes) => {
  addSwitch();
  for (const { type, target, attributeName, addedNodes } of changes) {
    if (type === "characterData") translateText(/** @type {Text} */ (target));
    else if (attributeName === TEXTS) translateAll(target); // its text node may have changed before it
    else if (type === "attributes" && !isPlain()) translateAttributes(/** @type {Element} */ (target));
    else if (type === "childList") addedNodes.forEach(translateAll);
  }
});
let started = false;

/** Whether the page has been in English since it was loaded: then only option names in sentences are replaced. */
const isPlain = () => language === "en" && !started;

const begin = countRequests();

/** @param {string} name */
async function use(name) {
  const isNewest = begin(), catalogue = name === "en" ? {} : (await ask("words", { language: name })).words;
  if (!isNewest()) return;
  [words, language, started] = [catalogue, name, true];
  document.documentElement.lang = name;
  translateAll(document.body);
}

function addSwitch() {
  const header = document.querySelector("#top .switches");
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

observer.observe(document.body, {
  childList: true,
  subtree: true,
  characterData: true,
  attributes: true,
  attributeFilter: [...ATTRIBUTES, TEXTS],
});
addSwitch();
if (language !== "en") use(language).catch(() => {}); // without a catalogue the page stays in English
