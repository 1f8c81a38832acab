// Probe: find settings with which the form's training fits this machine, and put them into the form.
import { make, makeButton } from "../server/elements.js";
import { ask, wait } from "../server/http.js";
import { sentOf, tell, tellError } from "./messages.js";

/**
 * @typedef {{ state: string, doing: string, tries: { text: string }[], text: string, best: unknown, fix: Record<string,
 *   unknown> }} Progress
 */

/** @param {string} tab */
export async function probe(tab) {
  try {
    const sent = sentOf(tab), { id } = await ask("probe", { tab, sent });
    const line = make("p"), list = make("ul");
    let stopped = false;
    const stop = makeButton("Stop", () => {
      stopped = true;
      ask("unprobe", { id }).catch(() => {});
      tell(tab, "plain", make("p", {}, "The probe was stopped."));
    }, { className: "close" });
    tell(tab, "plain", make("b", {}, "Probing"), line, list, stop);
    while (!stopped) {
      /** @type {Progress} */
      const progress = await ask("probing", { tab, sent, id });
      if (stopped) return;
      line.textContent = progress.doing;
      list.replaceChildren(...progress.tries.map((attempt) => make("li", {}, attempt.text)));
      if (progress.state !== "running") {
        const isOther = sent !== sentOf(tab);
        return isOther && !list.isConnected ? undefined : showEnd(tab, progress, list, isOther);
      }
      await wait(1000);
    }
  } catch (error) {
    tellError(tab, error);
  }
}

/**
 * @param {string} tab
 * @param {Progress} progress
 * @param {HTMLElement} list of the settings tried
 * @param {boolean} isOther whether the form has changed since
 */
function showEnd(tab, { state, text, best, fix }, list, isOther) {
  if (state === "failed") return tellError(tab, text);
  if (isOther)
    return tell(
      tab,
      "plain",
      make("p", {}, text),
      list,
      make("p", {}, "The form was changed since: probe again to learn what suits it now."));
  const apply = Object.keys(fix).length
    ? [
        make("button", { type: "button", className: "fix", "data-fix": JSON.stringify(fix) },
          make("span", {}, "Put it into the form")),
      ]
    : [];
  return tell(tab, best ? "good" : "bad", make("p", {}, text), list, ...apply);
}
