"use strict";
// The page in the reader's language: English is what the page is made in, and a table from the server is put over it.
window.kohyaWords = (() => {
  const LANGUAGES = { en: "English", zh: "中文", ja: "日本語" };
  // Code, and names of the user's folders, files and trainings, which may well be words of the tables.
  const SKIPPED = "code, pre, style, script, textarea, datalist, .differences td, .who b, .about > b, .name, .preview small, .picker li > span, span.own";
  const LONGEST = 400;
  const ATTRIBUTES = ["placeholder", "aria-label", "title"];
  const store = (value) => {
    try {
      if (value === undefined) return localStorage.getItem("kohya-language");
      localStorage.setItem("kohya-language", value);
    } catch {} // a browser that keeps nothing asks for its own language each time
    return null;
  };
  const asked = [store(), ...navigator.languages].filter(Boolean).map((name) => name.slice(0, 2).toLowerCase());
  let language = asked.find((name) => name in LANGUAGES) ?? "en";
  let words = {}, patterns = [];
  const english = new WeakMap(); // node -> what it said before, and what it was made to say, by attribute or "data"

  /** A text in the reader's language; what no table has stays as it is. Parts of a pattern are looked up, too. */
  const of = (text) => found(text) ?? (/^[A-Z][a-z]/.test(text) ? found(text[0].toLowerCase() + text.slice(1)) : null) ?? text;

  function found(text) {
    if (Object.hasOwn(words, text)) return words[text];
    if (text.length > LONGEST) return null; // what a file or a training says, and long to look through
    for (const [shape, to, named] of patterns) {
      const parts = shape.exec(text);
      if (!parts) continue;
      const said = to.replace(/\{(\d+)\}/g, (_, at) => of(parts[at] ?? ""));
      return named && parts[1] !== undefined ? `${of(parts[1])}${/^[=（]/.test(said) ? " " : "："}${said}` : said;
    }
    return null;
  }

  /** What an element of one text says in English. */
  function said(element) {
    const known = english.get(element.firstChild)?.data;
    return known && known.shown === element.textContent ? known.from : element.textContent;
  }

  function put(node, key, now, write) {
    const known = english.get(node) ?? {};
    const from = known[key] && known[key].shown === now ? known[key].from : now;
    const core = from.trim();
    if (!core) return;
    const other = of(core.replace(/\s+/g, " "));
    const behind = key === "data" && other !== core && node.previousSibling?.nodeName === "CODE" && !/^[：（=]/.test(other);
    const shown = behind ? `：${other}` : from.replace(core, () => other);
    english.set(node, { ...known, [key]: { from, shown } });
    if (shown !== now) write(shown);
  }

  function translate(root) {
    if (root.nodeType === Node.TEXT_NODE) return text(root);
    if (root.nodeType !== Node.ELEMENT_NODE || root.closest("script, style")) return;
    for (const element of [root, ...root.querySelectorAll("[placeholder], [aria-label], [title]")]) attributes(element);
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) text(walker.currentNode);
  }

  function text(node) {
    const box = node.parentElement;
    // A choice that is a value stays as it is.
    if (box?.matches("option") && (box.value.endsWith(node.data.trim()) || !box.hasAttribute("value"))) return;
    if (box && !box.closest(SKIPPED)) put(node, "data", node.data, (to) => (node.data = to));
  }

  function attributes(element) {
    for (const name of ATTRIBUTES)
      if (element.hasAttribute(name)) put(element, name, element.getAttribute(name), (to) => element.setAttribute(name, to));
  }

  const observer = new MutationObserver((changes) => {
    addSwitch();
    if (language === "en" && !started) return;
    for (const { type, target, addedNodes } of changes) {
      if (type === "characterData") text(target);
      else if (type === "attributes") attributes(target);
      else addedNodes.forEach(translate);
    }
  });
  let started = false;

  async function use(name) {
    const table = name === "en" ? { words: {}, patterns: [] } : await window.kohyaAsk.ask("words", { language: name });
    language = name;
    words = table.words;
    patterns = table.patterns.map(([shape, to, named]) => [new RegExp(shape, "s"), to, named]);
    started = true;
    document.documentElement.lang = name;
    translate(document.body);
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

  function begin() {
    observer.observe(document.body, { childList: true, subtree: true, characterData: true, attributes: true, attributeFilter: ATTRIBUTES });
    addSwitch();
    if (language !== "en") use(language).catch(() => {}); // without a table the page stays English
  }

  // Scripts come onto the page before its body or long after it.
  if (document.body) begin();
  else document.addEventListener("DOMContentLoaded", begin);
  return { of, said };
})();
