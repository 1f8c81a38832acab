// Images that fail to load: loaded again once the server answers; "kohya:gone" tells which have no file any more.
import { wait } from "./http.js";

const PAUSE = 2000; // milliseconds between two requests while the server does not answer
const UNAUTHORIZED = 401; // a restarted server wants its token first
/** @type {WeakMap<HTMLImageElement, string>} the address that was loaded a second time */
const loadedAgain = new WeakMap();

/**
 * Ask the server about an image that failed, until it answers.
 * @param {HTMLImageElement} image
 */
async function loadAgain(image) {
  const { src } = image;
  while (image.isConnected && image.src === src) {
    const status = await statusOf(src);
    if (image.src !== src) return;
    const isThere = status >= 200 && status < 300, isRefused = status >= 400 && status < 500 && status !== UNAUTHORIZED;
    if (isThere && loadedAgain.get(image) !== src) {
      loadedAgain.set(image, src);
      image.src = src; // which loads it, even from the same address
      return;
    }
    if (isThere || isRefused) { // a file that arrives and still fails is no image
      image.dispatchEvent(new CustomEvent("kohya:gone", { bubbles: true }));
      return;
    }
    await wait(PAUSE);
  }
}

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
  image.addEventListener("kohya:gone", () => done(false), { once: true });
});

// Error events of images do not bubble.
document.addEventListener("error", ({ target }) => {
  if (target instanceof HTMLImageElement && target.src.startsWith(location.origin)) void loadAgain(target);
}, true);
