// Names of options in sentences. Where the page has a field for an option, the field's label takes the place of the name.

/** @typedef {{ text: string, isShared: boolean }} Label in English; `isShared` says that another field is called the same */
/** @typedef {{ element: Element | null, used: string[] }} Near where a sentence is shown, and the names that were replaced in it */

// With a sign for flags in front, or without. A part of a path, of a file's name or of a longer word is no option.
// Names without underscores are recognised only where they are no words of a language.
const NAME = /(?<![\w{./-])(?:--)?([a-z][a-z0-9]*(?:_[a-z0-9]+)+|fsdp|sdpa|xformers|lowram|highvram|t5xxl|qwen3)(?![\w}/]|\.\w)/g;
const WORD = /^([a-z][a-z0-9]*)(?=[:：])/; // a name that may be any word, where nothing but an option can stand
const CODE = /(`[^`]*`)/; // a command, which is typed as it stands

/** @type {(name: string, near: Element | null) => Label | null} */
let find = () => null;

/**
 * Let a form say what it calls an option.
 * @param {(name: string, near: Element | null) => Label | null} finder
 */
export const nameOptions = (finder) => void (find = finder);

/**
 * What the page calls an option, with the option's name behind a label that several have.
 * @param {string} name
 * @param {Near} near
 * @param {(text: string) => string} translated
 * @param {boolean} [isOfFile] whether the name stands in a file, where one has to find it
 */
export function labelOf(name, near, translated, isOfFile = false) {
  const label = find(name, near.element);
  if (!label) return name;
  near.used.push(name);
  return translated(label.text) + (label.isShared || isOfFile ? ` (${name})` : "");
}

/**
 * A template in which options are called as the page does.
 * @param {string} template
 * @param {Near} near
 * @param {(text: string) => string} translated
 */
export function labelled(template, near, translated) {
  const put = (/** @type {string} */ whole, /** @type {string} */ name) => {
    const before = near.used.length, label = labelOf(name, near, translated);
    return near.used.length > before ? label : whole;
  };
  return template.split(CODE).map((part, at) => (at % 2 ? part : part.replace(NAME, put).replace(at ? /$^/ : WORD, put))).join("");
}
