// Sentences in the reader's language: the line of a template, filled with what was put into it, options by their labels.
import { labelled, labelOf } from "./labels.js";
import { form, sentenceOf } from "./sentences.js";

/** @typedef {import("./sentences.js").Sentence} Sentence */
/** @typedef {import("./labels.js").Near} Near */
/** @typedef {{ words: Record<string, string>, language: string }} Catalogue the lines of a language, by English template */

const FLAG = "--"; // the place of an option of a command line
const KEYS = new Set(["key", "keys"]); // arguments that are names in a file, which no language has other words for

/**
 * A text in a language: a sentence that is known by how it was made, another by its own line. What has none stays.
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
 * The line of a template; one with a capital letter in front is that without, where there is no other.
 * @param {string} template
 * @param {Record<string, string>} words
 */
function line(template, words) {
  if (Object.hasOwn(words, template)) return words[template];
  const lower = /^[A-Z][a-z]/.test(template) ? template[0].toLowerCase() + template.slice(1) : "";
  return Object.hasOwn(words, lower) ? words[lower] : null;
}

/**
 * A list without words of its own, with the signs between its parts that Chinese and Japanese have.
 * @param {string} template
 */
const withSigns = (template) => template.replaceAll(", ", "、").replaceAll("; ", "；");

/**
 * The line of a sentence in a language, null where it has none.
 * @param {string} template
 * @param {Catalogue} catalogue
 */
function lineOf(template, { words, language }) {
  const bare = template.replace(/^:\s*/, ""), capital = bare.charAt(0).toUpperCase() + bare.slice(1);
  const isSigns = !/\p{L}/u.test(template.replace(/\{\w+\}/g, ""));
  return line(bare, words) ?? line(capital, words) ?? (isSigns && language !== "en" ? withSigns(bare) : null);
}

/**
 * A sentence with all that is put into it, and the option that a problem begins with. Options are called as their fields.
 * @param {Sentence} sentence
 * @param {Catalogue} catalogue
 * @param {Near} near
 * @returns {string}
 */
export function render(sentence, catalogue, near) {
  const { text, arguments: given, option = "", place = "", isOption = false } = sentence, template = form(sentence);
  const label = (/** @type {string} */ words) => translate(words, catalogue, near), before = near.used.length;
  if (isOption) return labelOf(text, near, label);
  const other = lineOf(template, catalogue);
  const said = labelled(other ?? template, near, label).replace(/\{(\w+)\}/g, (as, name) => {
    const value = given[name] ?? as;
    if (typeof value !== "string") return render(value, catalogue, near);
    return KEYS.has(name) || value.trim() === text.trim() ? value : label(value); // of a sentence that is its argument alone
  });
  const name = option && (place === FLAG ? option : labelOf(option, near, label, place !== ""));
  if (other === null || catalogue.language === "en")
    return near.used.length > before ? inEnglishForm({ text, template, place }, name, said) : text;
  return option ? `${place}${name}${/^[=（]/.test(said) ? " " : "："}${said}` : said;
}

/**
 * A sentence as problems.py makes it.
 * @param {Pick<Sentence, "text" | "template" | "place">} sentence
 * @param {string} name of the option that it begins with
 * @param {string} said
 */
function inEnglishForm({ text, template, place }, name, said) {
  const whole = name ? `${place}${name}${template.startsWith(":") ? "" : " "}${said}` : said;
  return /^\p{Lu}/u.test(text) ? whole.charAt(0).toUpperCase() + whole.slice(1) : whole;
}
