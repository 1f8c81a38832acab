// The change history of a data set, and the captions before and after a change side by side, which can be restored.
import { moment } from "../i18n/dates.js";
import { count, say } from "../i18n/sentences.js";
import { finder, make, makeButton } from "../server/elements.js";
import { ask } from "../server/http.js";
import { countRequests } from "../server/late.js";
import { frame } from "./images_cards.js";

/** @typedef {import("./images.js").Tab} Tab */
/** @typedef {import("./images_overview.js").Overview} Overview */
/**
 * @typedef {import("./images_cards.js").Row & { before: string | null, after: string, now: string | null }} Compared an
 *   image whose caption was changed
 */
/**
 * @typedef {{ rows: Compared[], total: number, start: number, names: string[] }} Comparison one page of them, and the
 *   names of all that can be restored
 */

const EACH = 24; // captions shown at once

/** @type {HTMLElement} */
let root;
/** @type {Tab} */
let tab;
const begin = countRequests();
let shown = ""; // the id of the change that is compared

const part = finder(() => root);

/** @param {Overview["past"]} past */
export function showHistory(past) {
  const undo = part("[data-do=undo]", HTMLButtonElement);
  undo.disabled = !past.length;
  undo.title = past.length ? say("Undo: {change}", { change: past[0].title }) : "Nothing to undo";
  part("[data-panel=past] summary small").textContent = past.length
    ? say("{count} can be undone, last: {change}", { count: past.length, change: past[0].title })
    : "nothing to undo";
  part(".past").replaceChildren(
    ...past.map((entry) =>
      make("li", {},
        make("span", {}, entry.title),
        make("small", {}, moment(entry.when)),
        /caption/i.test(entry.title) &&
          makeButton("Compare", () => compare(entry.id), {
            className: "plain",
            "aria-label": say("Compare the captions before and after: {change}", { change: entry.title }),
          }))));
  if (shown && !past.some(({ id }) => id === shown)) close();
}

/**
 * Show the captions before and after a change.
 * @param {string} id of the change
 * @param {number} [start]
 */
export async function compare(id, start = 0) {
  const box = part(".compared"), isNewest = begin();
  /** @type {Comparison | null} */
  const comparison = await tab.attempt(() => ask("images_changed", tab.query({ change: id, start })));
  if (!comparison || !isNewest()) return;
  const reveal = shown !== id;
  shown = id;
  box.hidden = false;
  const last = Math.min(start + EACH, comparison.total);
  const back = makeButton("Put all back", () => putBack(comparison.names), { disabled: !comparison.names.length });
  box.replaceChildren(
    make("div", { className: "head" },
      make("b", {}, "Before and after"),
      make("small", {}, say("{captions} changed", { captions: count(comparison.total, "caption") })),
      make("span", { className: "acts" }, back, makeButton("Close", close))),
    ...comparison.rows.map(line),
    comparison.total > EACH
      ? make("div", { className: "acts" },
          makeButton("Previous", () => compare(id, start - EACH), { disabled: start === 0 }),
          make("span", {},
            say("{first} to {last} of {images}", { first: start + 1, last, images: count(comparison.total, "image") })),
          makeButton("Next", () => compare(id, start + EACH), { disabled: last >= comparison.total }))
      : "");
  if (reveal) box.scrollIntoView({ block: "nearest" });
}

/** @param {Compared} row */
function line(row) {
  const same = row.now === row.after;
  const state = row.now === row.before ? "Put back" : "Changed since";
  return make("div", { className: "pair", "data-name": row.name },
    make("div", { className: "small" }, frame(row, 160)),
    make("div", { className: "old" },
      make("small", {}, "Before"),
      make("p", { translate: "no" }, row.before ?? make("em", {}, "no caption"))),
    make("div", { className: "new" }, make("small", {}, "After"), make("p", { translate: "no" }, row.after)),
    same
      ? makeButton("Put back", () => putBack([row.name]), {
          "aria-label": say("Put back the caption of {name}", { name: row.name }),
        })
      : make("small", { className: "quiet" }, state));
}

/** @param {string[]} names */
async function putBack(names) {
  const id = shown;
  const done = await tab.change("images_put_back", { names, change: id }, (answer) => {
    const left = answer.left
      ? ` ${say("{captions} changed since and left.", { captions: count(answer.left, "caption") })}`
      : "";
    return (
      say("{captions} put back. Undo brings the new ones again.", { captions: count(answer.done, "caption") }) + left
    );
  });
  if (done) await compare(id);
}

function close() {
  begin(); // no answer opens it again
  shown = "";
  part(".compared").hidden = true;
  part(".compared").replaceChildren();
}

/**
 * @param {HTMLElement} element
 * @param {Tab} parentTab
 */
export function mount(element, parentTab) {
  [root, tab, shown] = [element, parentTab, ""];
}
