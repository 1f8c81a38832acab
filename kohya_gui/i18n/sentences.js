// The templates and arguments of sentences, by which they are translated.

/**
 * @typedef {{ text: string, template: string, plural?: string, arguments: Record<string, string | Sentence>,
 *   option?: string, place?: string, isOption?: boolean }} Sentence
 *   as Message.as_json, OptionName.as_json and Problem.as_json in problems.py
 */

const MAX_SENTENCES = 4000; // sentences remembered at most, the newest
/** @type {Map<string, Sentence>} by what they say in English */
const sentencesByText = new Map();

const key = (/** @type {string} */ text) => text.trim().replace(/\s+/g, " ");

/**
 * Remember sentences from the server.
 * @param {Sentence[]} sentences
 */
export function remember(sentences) {
  for (const sentence of sentences) {
    sentencesByText.delete(key(sentence.text));
    sentencesByText.set(key(sentence.text), sentence);
  }
  const excess = Math.max(0, sentencesByText.size - MAX_SENTENCES);
  for (const text of [...sentencesByText.keys()].slice(0, excess)) sentencesByText.delete(text); // the oldest
}

/**
 * Make a sentence in English, and remember its template and arguments.
 * @param {string} template with {name} for the argument of that name
 * @param {Record<string, string | number>} values
 * @param {string} plural the template for every `count` except one
 */
export function say(template, values, plural = "") {
  const filled = Object.fromEntries(Object.entries(values).map(([name, value]) => [name, String(value)]));
  const sentence = { text: "", template, plural, arguments: filled };
  sentence.text = form(sentence).replace(/\{(\w+)\}/g, (place, name) => filled[name] ?? place);
  remember([sentence]);
  return sentence.text;
}

/**
 * Make a sentence about an option, whose name a form's label replaces.
 * @param {string} template with {option} for its name
 * @param {string} option
 * @param {Record<string, string>} values
 */
export function sayOption(template, option, values) {
  const name = { text: option, template: option, arguments: {}, isOption: true };
  const filled = { option: name, ...values };
  const parts = /** @type {Record<string, string>} */ ({ option, ...values });
  const text = template.replace(/\{(\w+)\}/g, (place, part) => parts[part] ?? place);
  remember([{ text, template, arguments: filled }]);
  return text;
}

/**
 * The template of a sentence for its number.
 * @param {Sentence} sentence
 */
export const form = ({ template, plural, arguments: values }) => (plural && values.count !== "1" ? plural : template);

/**
 * The progress of a job: "captioning 3 / 8".
 * @param {string} work
 * @param {number | string} done
 * @param {number | string} total
 */
export const progressOf = (work, done, total) => say("{work} {done} / {total}", { work, done, total });

/**
 * The template and arguments of a sentence, if known.
 * @param {string} text
 */
export const sentenceOf = (text) => sentencesByText.get(key(text));

/**
 * "1 image", "2,000 images".
 * @param {number} n
 * @param {string} noun
 */
export const count = (n, noun) => say(`{count} ${noun}`, { count: n.toLocaleString("en") }, `{count} ${noun}s`);
