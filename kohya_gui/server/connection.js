// Shows a notice while the page's server does not answer. Polling continues, so the page recovers by itself.
import { translated } from "../i18n/words.js";
import { make, makeButton } from "./elements.js";
import { address, UNANSWERED } from "./http.js";
import { notify } from "./notices.js";

const KIND = "connection";
const MAX_UNANSWERED = 3; // failed requests in a row before the notice
const UNAUTHORIZED = 401;
const SCRIPT = new URL("../main.js", import.meta.url).pathname.split("/").slice(-3).join("/");

let unanswered = 0;
let failedAt = 0; // when a request failed, in milliseconds; 0 if one that was sent later has been answered

/** @param {number} status of the response, 0 if there was none */
function tell(status) {
  const text = status === UNAUTHORIZED
    ? "The page's server was restarted and needs its token: open the address that it printed."
    : "The page's server does not answer. Trainings continue, and this page reconnects when the server is back.";
  notify(KIND, make("p", {}, text));
}

/** Whether the returned server sends another script than this one, as after an update. */
async function isUpdated() {
  const page = await fetch(new URL("../", address("")), { headers: { Accept: "text/html" } }).catch(() => null);
  return Boolean(page?.ok) && !(await page?.text())?.includes(SCRIPT);
}

/** Update the messages of failed requests: the server answers again. */
function sayBack() {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = /** @type {Text} */ (walker.currentNode);
    if (![UNANSWERED, translated(UNANSWERED)].includes(text.data.trim())) continue;
    text.data = "The page's server did not answer, but does now: try again.";
    text.parentElement?.closest(".message.bad")?.classList.add("plain");
    text.parentElement?.closest(".bad")?.classList.remove("bad");
  }
  document.dispatchEvent(new CustomEvent("kohya:back"));
}

document.addEventListener("kohya:answered", async (event) => {
  const { status, failed, began } =
    /** @type {CustomEvent<{ status: number, failed: boolean, began: number }>} */ (event).detail;
  if (failed) {
    failedAt = performance.now();
  } else if (failedAt && began > failedAt) { // an answer to an earlier request does not prove that the server is back
    failedAt = 0;
    sayBack();
  }
  const isLost = !status || status === UNAUTHORIZED, wasLost = unanswered >= MAX_UNANSWERED;
  unanswered = isLost ? unanswered + 1 : 0;
  if (unanswered >= MAX_UNANSWERED) tell(status);
  if (isLost || !wasLost) return;
  notify(KIND);
  if (await isUpdated())
    notify(KIND, make("p", {}, "The page's server was updated: load the page again. What you have typed stays."),
      makeButton("Load again", () => location.reload()));
});
