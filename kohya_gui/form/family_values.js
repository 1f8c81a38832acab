// What the fields that several families share hold for each of them. A look at another family changes nothing: a family
// that is chosen again has what it was left with, and what was typed or loaded goes along to one that is new.

/** @typedef {string | boolean} Value */
/** @typedef {Record<string, Value>} Held by a field's id */
/** @typedef {{ id: string, value: Value, first: Value, isTouched: boolean, isProposed: boolean }} Shared a field that several families have; `first` is what it begins with, and what the form itself proposes for a family (a name) is for no other */
/**
 * @typedef {object} Memory of one form
 * @property {Record<string, Held>} left what the fields of each family held when another was chosen
 * @property {Record<string, string[]>} own the fields of each family that were typed or loaded there, whatever they hold
 * @property {Record<string, Held>} brought what came along from another family
 * @property {Held} carried what goes along to the next family
 * @property {string[]} loaded the families whose form is a config: all that it holds is of that config
 */

/** @returns {Memory} */
export const nothing = () => ({ left: {}, own: {}, brought: {}, carried: {}, loaded: [] });

/**
 * Keep what a family's fields hold before another is chosen.
 * @param {Memory} memory
 * @param {string} family
 * @param {Shared[]} fields
 */
export function leave(memory, family, fields) {
  const { carried, brought: { [family]: brought = {} } } = memory, own = new Set(memory.own[family]);
  for (const { id, value, isTouched, isProposed } of fields) {
    if (brought[id] === value) continue;
    if (isProposed || (!isTouched && !own.has(id))) delete carried[id];
    else {
      own.add(id);
      carried[id] = value;
    }
  }
  memory.own[family] = [...own];
  memory.left[family] = Object.fromEntries(fields.map(({ id, value }) => [id, value]));
}

/**
 * What the fields of a family hold when it is chosen.
 * @param {Memory} memory
 * @param {string} family
 * @param {Shared[]} fields
 * @returns {Held}
 */
export function arrive(memory, family, fields) {
  const left = memory.left[family] ?? {}, own = new Set(memory.loaded.includes(family) ? Object.keys(left) : memory.own[family]);
  const coming = fields.filter(({ id }) => !(own.has(id) && id in left) && id in memory.carried);
  memory.brought[family] = Object.fromEntries(coming.map(({ id }) => [id, memory.carried[id]]));
  return Object.fromEntries(fields.map(({ id, first }) => [id, memory.brought[family][id] ?? left[id] ?? first]));
}

/**
 * A family's form begins anew, with a preset or a config.
 * @param {Memory} memory
 * @param {string} family
 * @param {string[]} [loaded] the fields that the config names; without them it begins with a preset
 */
export function beginAnew(memory, family, loaded) {
  memory.own[family] = loaded ?? [];
  memory.brought[family] = {};
  memory.loaded = memory.loaded.filter((name) => name !== family);
  if (loaded) memory.loaded.push(family);
}

/**
 * A value was chosen for a family, also where it is what the form begins with.
 * @param {Memory} memory
 * @param {string} family
 * @param {string} id of the field
 */
export function choose(memory, family, id) {
  memory.own[family] = [...new Set(memory.own[family]).add(id)];
}

/**
 * A field is back at what the form begins with.
 * @param {Memory} memory
 * @param {string} family
 * @param {string} id
 */
export function forget(memory, family, id) {
  memory.own[family] = (memory.own[family] ?? []).filter((other) => other !== id);
  delete memory.brought[family]?.[id];
}
