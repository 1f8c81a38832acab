// Copies of a form before each change, for Undo and Redo, the newest last.

const LENGTH = 60; // copies kept at most

/**
 * @template {{ family: string, kept: [string, string | boolean][] }} Copy
 * @typedef {{ done: Copy[], undone: Copy[], typing: string }} History `typing` is the id of the field that is being
 *   typed in: all of that is one change
 */

/** @returns {History<any>} */
export const nothing = () => ({ done: [], undone: [], typing: "" });

/**
 * Whether two copies have the same values.
 * @param {{ family: string, kept: [string, string | boolean][] }} a
 * @param {{ family: string, kept: [string, string | boolean][] }} b
 */
const areEqual = (a, b) => a.family === b.family && JSON.stringify(a.kept) === JSON.stringify(b.kept);

/**
 * Remember a form before a change of another kind than typing.
 * @template {{ family: string, kept: [string, string | boolean][] }} Copy
 * @param {History<Copy>} history
 * @param {Copy} before
 */
export function remember(history, before) {
  history.done = [...history.done, before].slice(-LENGTH);
  Object.assign(history, { undone: [], typing: "" });
}

/**
 * Remember a form before the user types into a field.
 * @template {{ family: string, kept: [string, string | boolean][] }} Copy
 * @param {History<Copy>} history
 * @param {string} id of the field
 * @param {Copy} before
 */
export function type(history, id, before) {
  if (history.typing === id) return;
  remember(history, before);
  history.typing = id;
}

/**
 * Take a step back or forward. Returns the copy to restore; null if there is none.
 * @template {{ family: string, kept: [string, string | boolean][] }} Copy
 * @param {History<Copy>} history
 * @param {"done" | "undone"} from
 * @param {(target: Copy) => Copy} current makes a copy of the form as it is now, with what the target has
 */
export function step(history, from, current) {
  history.typing = "";
  for (;;) {
    const target = history[from].pop();
    if (!target) return null;
    const now = current(target);
    if (areEqual(now, target) && !("opened" in target)) continue; // the user has reverted the typing by hand
    history[from === "done" ? "undone" : "done"].push(now);
    return target;
  }
}
