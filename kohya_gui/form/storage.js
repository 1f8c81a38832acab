// The browser's copy of a form until its tab is closed.

/**
 * The browser's storage until the tab is closed: stores `text`, or returns the stored one.
 * @param {string} key
 * @param {string} [text]
 */
export function store(key, text) {
  try {
    if (text === undefined) return sessionStorage.getItem(key);
    sessionStorage.setItem(key, text);
  } catch {} // without storage the form is only lost on reload
  return null;
}

/**
 * The last loaded file of kohya_ss, including keys that have no field here.
 * @param {string} tab
 */
export const base = (tab) => store(`${tab}-base`) ?? "{}";

/**
 * The path in the config field, and the opened config: current, or from before a reload.
 * @param {string} tab
 * @param {{ path: string, opened: string }} [file] replaces them
 * @returns {{ path: string, opened: string }}
 */
export const configFile = (tab, file) =>
  JSON.parse(store(`${tab}-config`, file && JSON.stringify(file)) ?? '{ "path": "", "opened": "" }');

/**
 * The text of the last loaded config, whose comments Save keeps; with `text`, it is replaced.
 * @param {string} tab
 * @param {string} [text]
 */
export const source = (tab, text) => store(`${tab}-source`, text) ?? "";
