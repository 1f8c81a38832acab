// uPlot draws the charts. Its script and style are loaded when the first one is shown.
import { make } from "../server/elements.js";
import { address } from "../server/http.js";

/**
 * The members of uPlot used here.
 * @typedef {{
 *   root: HTMLElement, over: HTMLElement, data: (number | null | undefined)[][],
 *   cursor: { idx: number | null | undefined, left: number, top: number },
 *   scales: Record<string, { min: number, max: number }>,
 *   setData: (data: (number | null | undefined)[][], resetScales?: boolean) => void,
 *   setSize: (size: { width: number, height: number }) => void,
 *   setScale: (key: string, range: { min: number, max: number }) => void,
 *   setCursor: (place: { left: number, top: number }) => void,
 *   valToPos: (value: number, scale: string) => number,
 *   posToVal: (position: number, scale: string) => number,
 *   redraw: () => void,
 *   destroy: () => void,
 * }} UPlot
 * @typedef {{ new (options: Record<string, unknown>, data: unknown[], place: HTMLElement): UPlot,
 *   join: (tables: unknown[][]) => (number | null | undefined)[][] }} UPlotClass
 */

/** @type {Promise<UPlotClass> | undefined} */
let loading;

/**
 * @param {HTMLElement} room which names both files
 * @returns {Promise<UPlotClass>}
 */
export const loadUPlot = (room) => (loading ??= load(room.dataset));

/** @param {DOMStringMap} files */
function load({ script = "", style = "" }) {
  const page = address("");
  document.head.append(make("link", { rel: "stylesheet", href: new URL(`../${style}`, page).href }));
  return new Promise((done, fail) => {
    const element = make("script", { src: new URL(`../${script}`, page).href });
    element.addEventListener("load", () => done(/** @type {any} */ (window).uPlot));
    element.addEventListener("error", () => {
      loading = undefined; // so that the next call retries
      fail(new Error("The charts could not be loaded: is the page's server still running?"));
    });
    document.head.append(element);
  });
}
