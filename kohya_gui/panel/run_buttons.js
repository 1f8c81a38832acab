// The buttons of a run: stop, save, sample, resume, open in a form, save the support bundle.
import { tell as tellInForm } from "../form/messages.js";
import * as form from "../form/page.js";
import { translated } from "../i18n/words.js";
import { all, around, find, hit, isField, make, makeButton, saveFile, setValue } from "../server/elements.js";
import { address, ask, call, messageOf, pathOfRun, Refusal } from "../server/http.js";
import { go } from "../server/addresses.js";
import { lookAt } from "./monitor.js";

/**
 * Put settings from the server into the form of their tab, and show it.
 * @param {{ tab: string, fill: string, launch: Record<string, string>, notes: string[] }} settings
 */
export async function openInForm({ tab, fill, launch, notes }) {
  await go(`train/${tab}`);
  form.fill(tab, fill);
  const where = form.formOf(tab);
  for (const field of all(where, "[data-launch]").filter(isField)) {
    const value = launch[field.dataset.launch ?? ""] ?? field.dataset.default;
    setValue(field, field.type === "checkbox" ? value.toLowerCase() : value);
  }
  where.dispatchEvent(new Event("input", { bubbles: true }));
  find(where, "[data-option]").dispatchEvent(new Event("input", { bubbles: true }));
  if (notes.length) tellInForm(tab, "plain", ...notes.map((note) => make("p", {}, note)));
  where.scrollIntoView({ block: "start" });
}

const STOPS = ["after_step", "now", "kill"];

/**
 * Stop a run, have it save or sample, or resume it. The answer is a question (`ask`) if the action needs confirmation.
 * @param {string} act
 * @param {string} run
 * @param {{ sure?: boolean, pause?: boolean }} [how]
 * @returns {Promise<{ said?: string, run?: string, ask?: string, next?: string }>}
 */
export async function actOn(act, run, { sure = false, pause = false } = {}) {
  if (!STOPS.includes(act)) return call(pathOfRun(run, act), {});
  try {
    return await call(pathOfRun(run, "stop"), { how: act, sure, pause_queue: pause, ask_about_queue: true });
  } catch (error) {
    if (!(error instanceof Refusal) || error.field !== "sure") throw error;
    return { ask: error.message, next: error.next };
  }
}

/** @param {HTMLButtonElement} button of an action on a run */
async function act(button) {
  const where = around(button, ".acts"), place = find(where, ".answer"), run = where.dataset.run ?? "";
  const tell = (/** @type {string} */ text, bad = false) => {
    place.textContent = text;
    place.classList.toggle("bad", bad);
  };
  button.disabled = true;
  try {
    if (button.dataset.act === "bundle") tell(await saveBundle(run, tell));
    else if (button.dataset.act === "open") {
      await openInForm(await ask("open", { run }));
      tell(translated("The form holds the settings of this run: change what you like."));
    } else {
      const { act: what = "", sure, pause } = button.dataset;
      const answer = await actOn(what, run, { sure: sure === "true", pause: pause === "true" });
      if (answer.ask) confirm(button, place, answer.ask, answer.next);
      else tell(translated(answer.said ?? ""));
      if (what === "resume" && answer.run) {
        lookAt(answer.run);
        document.dispatchEvent(new CustomEvent("kohya:resumed", { detail: answer.run }));
      }
    }
  } catch (error) {
    tell(messageOf(error), true);
  }
  button.disabled = false;
}

/**
 * Ask for confirmation; yes sends the same action with `sure`, and may pause the queue.
 * @param {HTMLButtonElement} button
 * @param {HTMLElement} place
 * @param {string} text
 * @param {string} [next] the training that the queue starts then
 */
function confirm(button, place, text, next) {
  const sure = { type: "button", "data-act": button.dataset.act, "data-sure": "true" };
  const yes = make("button", { ...sure, className: "stop" }, button.textContent);
  const pausing = next
    ? [make("button", { ...sure, "data-pause": "true" }, translated("Stop and pause the queue")), " "] : [];
  const no = makeButton(translated("Cancel"), () => place.replaceChildren(), { className: "no" });
  place.classList.remove("bad");
  place.replaceChildren(translated(text), " ", yes, " ", ...pausing, no);
  no.focus();
}

/**
 * Save the support bundle of a run. Returns the message about it.
 * @param {string} run
 * @param {(text: string) => void} tell
 */
async function saveBundle(run, tell) {
  tell(translated("Collecting, which takes some seconds …"));
  const answer = await fetch(address("bundle", { run }));
  if (!answer.ok) throw new Error(await answer.text());
  const name = /filename="([\w.-]+)"/.exec(answer.headers.get("content-disposition") ?? "")?.[1] ?? "support.zip";
  saveFile(await answer.blob(), name);
  const advice = "no captions, images, names or tokens are in it. Look through it before you pass it on.";
  return `${name}: ${translated(advice)}`;
}

document.addEventListener("click", (event) => {
  const button = hit(event, "[data-act]", HTMLButtonElement);
  if (button) act(button);
});
