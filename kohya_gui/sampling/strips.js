// The images of a prompt as a strip: each opens large, and those of a strip can be compared (panel/samples.js).
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { make } from "../server/elements.js";

/**
 * @typedef {{ small: string, large: string, copy?: string, seed?: unknown }} SampleImage `copy`: the training image
 *   that it copies
 */

const MAX_IN_FULL = 16; // up to so many images are shown in full, more as thumbnails

/**
 * The prompt of each row, and its images.
 * @param {string[]} titles of the columns
 * @param {string[]} prompts of the rows
 * @param {(SampleImage | null)[][]} cells
 * @param {string} className of a strip
 */
export function promptStrips(titles, prompts, cells, className) {
  const isInFull = cells.flat().length <= MAX_IN_FULL;
  return prompts.map((prompt, row) => [
    make("p", { className: "own", title: prompt }, make("span", { className: "own" }, prompt)),
    make("div", { className, role: "group" },
      (cells[row] ?? []).map((cell, at) =>
        cell ? makeImage(isInFull ? { ...cell, small: cell.large } : cell, titles[at], prompt) : make("span"))),
  ]);
}

/**
 * @param {SampleImage} cell
 * @param {string} title
 * @param {string} prompt
 */
function makeImage({ small, large, copy, seed }, title, prompt) {
  const image = make("img", { src: small, alt: "", loading: "lazy", decoding: "async" });
  const mark = copy && make("span", { className: "copies" }, say("nearly a copy of {picture}", { picture: copy }));
  return make("button",
    {
      type: "button", className: copy ? "sample copied" : "sample", "data-large": large,
      "aria-label": `${translated(title)}: ${prompt}`,
      ...(typeof seed !== "number" ? {} : { title: translated(say("Seed {seed}", { seed: String(seed) })) }),
    },
    image,
    make("span", {}, title),
    mark);
}
