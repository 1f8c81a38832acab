// Sentences in the user's language: the translated template, filled with its arguments, with labels for options.
import { labelled, labelOf, withWord, wordOf } from "./labels.js";
import { form, sentenceOf } from "./sentences.js";

/** @typedef {import("./sentences.js").Sentence} Sentence */
/** @typedef {import("./labels.js").Near} Near */
/**
 * @typedef {{ words: Record<string, string>, language: string }} Catalogue the translations of a language, by English
 * template
 */

const FLAG = "--"; // the `place` of an option on a command line
const EDGE = "\uE000"; // around an argument, until the spaces beside it are settled
const WIDE = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}ー、。：；（）「」]/u; // signs that no space sets apart
const NAMES = new Set(["key", "keys", "variant", "baseline"]); // arguments that no language has other words for

/**
 * Translate a text: a known sentence by its template, any other text by its own entry. Others stay in English.
 * @param {string} text
 * @param {Catalogue} catalogue
 * @param {Near} near
 * @returns {string}
 */
export function translate(text, catalogue, near) {
  const sentence = sentenceOf(text);
  return sentence ? render(sentence, catalogue, near) : line(text, catalogue.words) ?? text;
}

/**
 * The translation of a template; a capitalised one falls back to its lower-case entry.
 * @param {string} template
 * @param {Record<string, string>} words
 */
function line(template, words) {
  if (Object.hasOwn(words, template)) return words[template];
  const lower = /^[A-Z][a-z]/.test(template) ? template[0].toLowerCase() + template.slice(1) : "";
  return Object.hasOwn(words, lower) ? words[lower] : null;
}

/**
 * A list without words of its own, with the punctuation of Chinese and Japanese.
 * @param {string} template
 */
const withSigns = (template) => template.replaceAll(", ", "、").replaceAll("; ", "；");

/**
 * The translation of a sentence's template, or null.
 * @param {string} template
 * @param {Catalogue} catalogue
 */
function lineOf(template, { words, language }) {
  const bare = template.replace(/^:\s*/, ""), capital = bare.charAt(0).toUpperCase() + bare.slice(1);
  const isSigns = !/\p{L}/u.test(template.replace(/\{\w+\}/g, ""));
  return line(bare, words) ?? line(capital, words) ?? (isSigns && language !== "en" ? withSigns(bare) : null);
}

/**
 * A sentence without the marks of its arguments, and without the spaces that set off Latin ones where one is not Latin.
 * @param {string} marked
 */
function settled(marked) {
  const spaced = marked.replace(/ (?=\uE000)|(?<=\uE000) /g, (space, /** @type {number} */ at) => {
    const [before, after] = [marked.slice(0, at), marked.slice(at + 1)].map((part) => part.replaceAll(EDGE, ""));
    return WIDE.test(before.slice(-1)) && WIDE.test(after.charAt(0)) ? "" : space;
  });
  return spaced.replaceAll(EDGE, "");
}

/**
 * Render a sentence with its arguments, and with the option that a problem starts with. Options get their labels.
 * @param {Sentence} sentence
 * @param {Catalogue} catalogue
 * @param {Near} near
 * @returns {string}
 */
export function render(sentence, catalogue, near) {
  const { text, arguments: values, option = "", place = "", isOption = false } = sentence, template = form(sentence);
  const label = (/** @type {string} */ words) => translate(words, catalogue, near), before = near.used.length;
  if (isOption) return labelOf(text, near, label);
  const localTemplate = lineOf(template, catalogue);
  const worded = option ? withWord(option, localTemplate ?? template, near, label) : localTemplate ?? template;
  const argument = (/** @type {string} */ as, /** @type {string} */ name) => {
    const value = values[name] ?? as;
    if (typeof value !== "string") return render(value, catalogue, near);
    if (NAMES.has(name)) return value;
    if (name === "value" && typeof values.option === "object") return wordOf(values.option.text, value, near, label);
    return value.trim() === text.trim() ? value : label(value); // the sentence consists of its argument only
  };
  const filled = settled(
    labelled(worded, near, label).replace(/\{(\w+)\}/g, (as, name) => EDGE + argument(as, name) + EDGE));
  const name = option && nameOf(option, place, catalogue, near);
  if (localTemplate === null || catalogue.language === "en")
    return near.used.length > before ? inEnglishForm({ text, template, place }, name, filled) : text;
  return option ? `${place}${name}${/^[=（]/.test(filled) ? " " : "："}${filled}` : filled;
}

/**
 * What a problem starts with: an option by its label, or the label of a field that is no option.
 * @param {string} option
 * @param {string} place
 * @param {Catalogue} catalogue
 * @param {Near} near
 */
function nameOf(option, place, catalogue, near) {
  if (place === FLAG) return option;
  const name = labelOf(option, near, (words) => translate(words, catalogue, near), place !== "");
  return name === option && !place ? lineOf(option, catalogue) ?? option : name;
}

/**
 * A sentence in the form that problems.py gives it.
 * @param {Pick<Sentence, "text" | "template" | "place">} sentence
 * @param {string} name of the option that it starts with
 * @param {string} filled
 */
function inEnglishForm({ text, template, place }, name, filled) {
  const whole = name ? `${place}${name}${template.startsWith(":") ? "" : " "}${filled}` : filled;
  return /^\p{Lu}/u.test(text) ? whole.charAt(0).toUpperCase() + whole.slice(1) : whole;
}
