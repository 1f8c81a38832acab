// The values, for each family, of fields that several families share. Switching families loses nothing: a family
// chosen again has its old values, and typed or loaded values carry over to a family chosen for the first time.

/** @typedef {string | boolean} Value */
/** @typedef {Record<string, Value>} Held by a field's id */
/**
 * @typedef {{ id: string, value: Value, first: Value, isTouched: boolean, isProposed: boolean }} Shared a field that
 *   several families have. `first` is its initial value; a value that the form proposes for a family (a name) does
 *   not carry over
 */
/**
 * @typedef {object} Memory of one form
 * @property {Record<string, Held>} left the values of each family's fields when another was chosen
 * @property {Record<string, string[]>} own the fields of each family that were typed or loaded there, whatever
 *   their values
 * @property {Record<string, Held>} brought the values carried over from another family
 * @property {Held} carried the values to carry over to the next family
 * @property {string[]} loaded the families whose form is a loaded config: all of its values belong to that config
 */

/** @returns {Memory} */
export const nothing = () => ({ left: {}, own: {}, brought: {}, carried: {}, loaded: [] });

/**
 * Keep the values of a family's fields before another family is chosen.
 * @param {Memory} memory
 * @param {string} family
 * @param {Shared[]} fields
 */
export function leave(memory, family, fields) {
  const { carried, brought: { [family]: brought = {} } } = memory, ownIds = new Set(memory.own[family]);
  for (const { id, value, isTouched, isProposed } of fields) {
    if (brought[id] === value) continue;
    if (isProposed || (!isTouched && !ownIds.has(id))) delete carried[id];
    else {
      ownIds.add(id);
      carried[id] = value;
    }
  }
  memory.own[family] = [...ownIds];
  memory.left[family] = Object.fromEntries(fields.map(({ id, value }) => [id, value]));
}

/**
 * The values of a family's fields when it is chosen.
 * @param {Memory} memory
 * @param {string} family
 * @param {Shared[]} fields
 * @returns {Held}
 */
export function arrive(memory, family, fields) {
  const left = memory.left[family] ?? {};
  const ownIds = new Set(memory.loaded.includes(family) ? Object.keys(left) : memory.own[family]);
  const coming = fields.filter(({ id }) => !(ownIds.has(id) && id in left) && id in memory.carried);
  memory.brought[family] = Object.fromEntries(coming.map(({ id }) => [id, memory.carried[id]]));
  return Object.fromEntries(fields.map(({ id, first }) => [id, memory.brought[family][id] ?? left[id] ?? first]));
}

/**
 * Start a family's form over, with a preset or a config.
 * @param {Memory} memory
 * @param {string} family
 * @param {string[]} [loaded] the fields that the config names; without them it starts with a preset
 */
export function beginAnew(memory, family, loaded) {
  memory.own[family] = loaded ?? [];
  memory.brought[family] = {};
  memory.loaded = memory.loaded.filter((name) => name !== family);
  if (loaded) memory.loaded.push(family);
}

/**
 * Record that a value was chosen for a family, even if it is the initial one.
 * @param {Memory} memory
 * @param {string} family
 * @param {string} id of the field
 */
export function choose(memory, family, id) {
  memory.own[family] = [...new Set(memory.own[family]).add(id)];
}

/**
 * Record that a field is back at its initial value.
 * @param {Memory} memory
 * @param {string} family
 * @param {string} id
 */
export function forget(memory, family, id) {
  memory.own[family] = (memory.own[family] ?? []).filter((other) => other !== id);
  delete memory.brought[family]?.[id];
}
