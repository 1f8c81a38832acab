// The room Runs: a table of all runs, and a page for each; which one is shown follows from the address.
import { say } from "../i18n/sentences.js";
import { all, find } from "../server/elements.js";
import { addressOf, go, register } from "../server/addresses.js";
import { messageOf } from "../server/http.js";
import { mountNotices } from "./notices.js";
import { RunPage } from "./run.js";
import { mountTable, update as updateTable } from "./table.js";

const PERIOD = 2000; // milliseconds between two polls

/** @type {HTMLElement | undefined} */
let room;
/** @type {RunPage | undefined} */
let page;
let isMounted = () => {};
/** Resolves when the room is on the page. */
const mounted = new Promise((done) => (isMounted = () => done(undefined)));

/** @param {Element} element */
export function mount(element) {
  room = find(element, ".runs-room");
  mountTable(room);
  mountNotices(room);
  isMounted();
  void updateTable();
}

/** @param {string} rest the id of a run, or several between commas; "" for the table */
async function open(rest) {
  await mounted;
  if (!room) return;
  const ids = [...new Set(rest.split(",").filter(Boolean))].slice(0, 8);
  if (!ids.length) return showTable();
  if (page && page.runs.join() === ids.join()) return;
  const next = new RunPage(room, ids);
  try {
    await next.begin();
  } catch (error) {
    next.remove();
    showTable();
    const text = messageOf(error);
    return text || say("There is no run called {name}.", { name: rest });
  }
  page?.remove();
  page = next;
  const place = find(room, ".run-page");
  place.replaceChildren(page.element);
  show(true);
  scrollTo({ top: 0 });
  page.title.focus({ preventScroll: true });
  page.charts.draw();
}

function showTable() {
  const was = page?.runs[0];
  page?.remove();
  page = undefined;
  show(false);
  void updateTable();
  if (was && room) all(room, "tbody tr").find(({ dataset }) => dataset.run === was)?.querySelector("a")?.focus();
}

/** @param {boolean} isRun */
function show(isRun) {
  if (!room) return;
  find(room, ".runs-list").hidden = isRun;
  find(room, ".run-page").hidden = !isRun;
  room.dataset.shows = isRun ? "run" : "table";
}

register("runs", open);
setInterval(() => {
  if (!room?.isConnected || document.visibilityState !== "visible" || !room.checkVisibility()) return;
  if (page) void page.update();
  else void updateTable();
}, PERIOD);
document.addEventListener("kohya:queue", showTable);
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") void page?.update(true); // after a phone's sleep
});
document.addEventListener("kohya:resumed", (event) => {
  const { detail: run } = /** @type {CustomEvent<string>} */ (event);
  if (page && room?.checkVisibility()) void go(addressOf("runs", run));
});
