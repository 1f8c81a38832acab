// Cache a form's images or captions now, and show the progress.
import { make } from "../server/elements.js";
import { ask } from "../server/http.js";
import { watcher } from "../tools/commands.js";
import { sentOf, tell, tellError } from "./messages.js";

/**
 * @param {string} tab
 * @param {string} kind
 */
export async function makeCaches(tab, kind) {
  try {
    const { id } = await ask("caches", { tab, kind, sent: sentOf(tab) });
    show(tab, id);
  } catch (error) {
    tellError(tab, error);
  }
}

/**
 * @param {string} tab
 * @param {string} id of the job
 */
function show(tab, id) {
  const list = make("div", { className: "jobs" });
  tell(
    tab,
    "plain",
    make("p", {}, "A training uses these caches as they are. Caching continues when this page is closed."),
    list);
  void watcher(list, "caching", () => {})(id);
}
