// The user's texts in Try it, by model, kept in this browser for the next visit.
const KEY = "sampling-written", MAX_MODELS = 20;

/** @typedef {Record<string, string>} Written texts by the id of their field */

/** @returns {Record<string, Written>} the model used last at the end */
function stored() {
  try {
    return { ...JSON.parse(localStorage.getItem(KEY) ?? "{}") };
  } catch {
    return {}; // without storage the browser only forgets
  }
}

/**
 * The stored texts for a model.
 * @param {string} model
 * @returns {Written}
 */
export function writtenFor(model) {
  const entries = Object.entries({ ...stored()[model] });
  return Object.fromEntries(entries.filter(([, value]) => value && typeof value === "string"));
}

/**
 * Store the texts for a model; an empty field gets proposals again.
 * @param {string} model
 * @param {import("../server/elements.js").Field[]} fields
 */
export function keepWritten(model, fields) {
  const { [model]: before, ...others } = stored();
  const now = { ...before, ...Object.fromEntries(fields.map(({ id, value }) => [id, value])) };
  const models = [...Object.entries(others).slice(1 - MAX_MODELS), [model, now]];
  try {
    localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(models)));
  } catch {}
}
