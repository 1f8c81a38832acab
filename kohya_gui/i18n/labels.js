// Names of options in sentences, replaced by the labels of their fields where the page has one.

/**
 * @typedef {{ text: string, isShared: boolean, wordOf: (value: string) => string }} Label in English; `isShared` if
 *   another field has the same label; `wordOf` gives a value as its field shows it
 */
/**
 * @typedef {{ element: Element | null, used: string[] }} Near where a sentence is shown, and the names
 *   replaced in it
 */

// With or without the dashes of a flag. A part of a path, a file name or a longer word is no option. Names without
// underscores are recognised only if they are not ordinary words.
const NAME =
  /(?<![\w{./-])(?:--)?([a-z][a-z0-9]*(?:_[a-z0-9]+)+|fsdp|sdpa|xformers|lowram|highvram|t5xxl|qwen3)(?![\w}/]|\.\w)/g;
const WITH_VALUE = /(?<![\w{./-])([a-z][a-z0-9]*(?:_[a-z0-9]+)+)( = [\w.+-]*\w)/g;
// An option name that may be an ordinary word, in a place where only an option can be.
const WORD = /^([a-z][a-z0-9]*)(?=[:：])/;
const CODE = /(`[^`]*`)/; // a command, which stays as it is

const VALUE = /^( ?(?:=|is) )([\w.+-]*\w)/; // the value of an option, behind its name

/** @type {(name: string, near: Element | null) => Label | null} */
let find = () => null;
/** @type {(value: string, near: Element | null) => string} */
let findChoice = () => "";

/**
 * Register the functions that find an option's label, and the words of a choice of any option.
 * @param {(name: string, near: Element | null) => Label | null} finder
 * @param {(value: string, near: Element | null) => string} choiceFinder
 */
export const nameOptions = (finder, choiceFinder) => void ([find, findChoice] = [finder, choiceFinder]);

/**
 * The page's label of an option, followed by the option's name if several fields have that label.
 * @param {string} name
 * @param {Near} near
 * @param {(text: string) => string} translated
 * @param {boolean} [isOfFile] whether the name is in a file, where the user has to find it
 */
export function labelOf(name, near, translated, isOfFile = false) {
  const label = find(name, near.element);
  if (!label) return name;
  near.used.push(name);
  return translated(label.text) + (label.isShared || isOfFile ? ` (${name})` : "");
}

/**
 * A value of an option as its field shows it; a value that is no choice stays.
 * @param {string} name
 * @param {string} value
 * @param {Near} near
 * @param {(text: string) => string} translated
 */
export const wordOf = (name, value, near, translated) => {
  const word = find(name, near.element)?.wordOf(value) ?? value;
  return word === value ? value : translated(word);
};

/**
 * A text that follows an option's name, with the value that it begins with in words: "= inner is the same".
 * @param {string} name
 * @param {string} text
 * @param {Near} near
 * @param {(text: string) => string} translated
 */
export const withWord = (name, text, near, translated) =>
  text.replace(VALUE, (_, sign, value) => `${sign}${wordOf(name, value, near, translated)}`);

/**
 * A template with option names replaced by labels, and their values by words.
 * @param {string} template
 * @param {Near} near
 * @param {(text: string) => string} translated
 */
export function labelled(template, near, translated) {
  const put = (/** @type {string} */ whole, /** @type {string} */ name) => {
    const before = near.used.length, label = labelOf(name, near, translated);
    if (near.used.length > before) return label;
    const word = findChoice(name, near.element);
    if (word) near.used.push(name);
    return word ? translated(word) : whole;
  };
  const putValue = (/** @type {string} */ _, /** @type {string} */ name, /** @type {string} */ value) =>
    name + withWord(name, value, near, translated);
  return template
    .split(CODE)
    .map((part, at) =>
      at % 2 ? part : part.replace(WITH_VALUE, putValue).replace(NAME, put).replace(at ? /$^/ : WORD, put))
    .join("");
}
