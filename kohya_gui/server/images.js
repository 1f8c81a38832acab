// Loads images again that failed because the server did not answer. One that it refuses gets the event "kohya:lost".
import { wait } from "./http.js";

/** @typedef {{ isGone: boolean }} Lost `isGone`: whether the server has no such file any more */

const SHORTEST = 2000, LONGEST = 30_000; // milliseconds between two requests while the server does not answer
const GONE = [204, 404, 410];
const TEMPORARY = [401, 408, 425, 429]; // 401: a restarted server wants its token first
/** @type {WeakMap<HTMLImageElement, string>} the address that was loaded a second time */
const loadedAgain = new WeakMap();

/**
 * Ask the server about an image that failed, until it answers.
 * @param {HTMLImageElement} image
 */
async function loadAgain(image) {
  const { src } = image;
  for (let pause = SHORTEST; ; pause = Math.min(LONGEST, 2 * pause)) {
    const status = await statusOf(src);
    if (image.src !== src) return; // it shows another one meanwhile
    const isThere = status >= 200 && status < 300 && !GONE.includes(status);
    if (isThere && loadedAgain.get(image) !== src) {
      loadedAgain.set(image, src);
      image.src = src; // which loads it, even from the same address
      return;
    }
    if (isThere || GONE.includes(status) || (status >= 400 && status < 500 && !TEMPORARY.includes(status))) {
      const detail = { isGone: GONE.includes(status) }; // otherwise the server refuses it, or it is no image
      image.dispatchEvent(new CustomEvent("kohya:lost", { bubbles: true, detail }));
      return;
    }
    await Promise.race([wait(pause), isBack()]);
  }
}

const isBack = () => new Promise((done) => document.addEventListener("kohya:back", done, { once: true }));

/**
 * The status of a response; 0 without one.
 * @param {string} address
 */
async function statusOf(address) {
  try {
    const response = await fetch(address, { cache: "no-store" });
    void response.body?.cancel();
    return response.status;
  } catch {
    return 0;
  }
}

/**
 * Whether an image of the page is shown in the end: it waits for a server that does not answer.
 * @param {HTMLImageElement} image that has begun to load
 * @returns {Promise<boolean>}
 */
export const isLoaded = (image) => new Promise((done) => {
  image.addEventListener("load", () => done(true), { once: true });
  image.addEventListener("kohya:lost", () => done(false), { once: true });
});

// Events of images do not bubble.
document.addEventListener("error", ({ target }) => {
  if (target instanceof HTMLImageElement && target.src.startsWith(location.origin)) void loadAgain(target);
}, true);
document.addEventListener("load", ({ target }) => {
  if (target instanceof HTMLImageElement) loadedAgain.delete(target);
}, true);
