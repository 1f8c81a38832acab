// How sentences were made that something is put into: by their template, the key of their translations, and arguments.

/** @typedef {{ text: string, template: string, plural?: string, arguments: Record<string, string | Sentence>, option?: string, place?: string }} Sentence as Text.as_json and Problem.as_json in problems.py */

const MOST = 4000; // sentences that are remembered, the newest
/** @type {Map<string, Sentence>} by what they say in English */
const known = new Map();

const key = (/** @type {string} */ text) => text.trim().replace(/\s+/g, " ");

/**
 * Remember sentences that the server has made.
 * @param {Sentence[]} sentences
 */
export function remember(sentences) {
  for (const sentence of sentences) {
    known.delete(key(sentence.text));
    known.set(key(sentence.text), sentence);
  }
  for (const text of [...known.keys()].slice(0, Math.max(0, known.size - MOST))) known.delete(text);
}

/**
 * A sentence in English, of which is remembered how it was made.
 * @param {string} template with {name} for the argument of that name
 * @param {Record<string, string | number>} given
 * @param {string} plural the template for any `count` but one
 */
export function say(template, given, plural = "") {
  const filled = Object.fromEntries(Object.entries(given).map(([name, value]) => [name, String(value)]));
  const sentence = { text: "", template, plural, arguments: filled };
  sentence.text = form(sentence).replace(/\{(\w+)\}/g, (place, name) => filled[name] ?? place);
  remember([sentence]);
  return sentence.text;
}

/**
 * The template of a sentence for its number.
 * @param {Sentence} sentence
 */
const form = ({ template, plural, arguments: given }) => (plural && given.count !== "1" ? plural : template);

/**
 * How far a piece of work is: "captioning 3 / 8".
 * @param {string} work
 * @param {number | string} done
 * @param {number | string} total
 */
export const progressOf = (work, done, total) => say("{work} {done} / {total}", { work, done, total });

/**
 * "1 image", "2,000 images".
 * @param {number} n
 * @param {string} noun
 */
export const count = (n, noun) => say(`{count} ${noun}`, { count: n.toLocaleString("en") }, `{count} ${noun}s`);

/** @typedef {{ words: Record<string, string>, language: string }} Catalogue the lines of a language, by English template */

/**
 * A text in a language: a sentence that is known by how it was made, another by its own line. What has none stays.
 * @param {string} text
 * @param {Catalogue} catalogue
 * @returns {string}
 */
export function translate(text, catalogue) {
  const sentence = known.get(key(text));
  return sentence ? render(sentence, catalogue) : line(text, catalogue.words) ?? text;
}

/**
 * A sentence in a language, with all that is put into it, and the option's name that a problem begins with.
 * @param {Sentence} sentence
 * @param {Catalogue} catalogue
 * @returns {string}
 */
export function render(sentence, catalogue) {
  const { text, arguments: given, option = "", place = "" } = sentence, template = form(sentence);
  const isSigns = !/\p{L}/u.test(template.replace(/\{\w+\}/g, ""));
  const bare = template.replace(/^:\s*/, ""), capital = bare.charAt(0).toUpperCase() + bare.slice(1);
  const signs = isSigns ? withSigns(template, catalogue.language) : null;
  const other = line(bare, catalogue.words) ?? line(capital, catalogue.words) ?? signs;
  if (other === null) return text;
  const said = other.replace(/\{(\w+)\}/g, (as, name) => {
    const value = given[name] ?? as;
    return typeof value === "string" ? translate(value, catalogue) : render(value, catalogue);
  });
  if (!option) return said;
  return `${place}${translate(option, catalogue)}${/^[=（]/.test(said) ? " " : "："}${said}`;
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
 * @param {string} language
 */
const withSigns = (template, language) =>
  language === "en" ? template : template.replaceAll(", ", "、").replaceAll("; ", "；");
