// Notifications: of the browser, once a button has allowed them, and of a webhook.
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { find, make, makeButton } from "../server/elements.js";
import { ask, call, messageOf } from "../server/http.js";
import { moodOf, stateWord } from "./format.js";

const PERIOD = 5000; // milliseconds; browsers wake a hidden window less often
const KEY = "kohya-notices";

/** @param {string} [value] without it, the stored choice is returned */
function choice(value) {
  try {
    if (value === undefined) return localStorage.getItem(KEY);
    localStorage.setItem(KEY, value);
  } catch {} // without storage it is chosen anew each time
  return value ?? null;
}

const isSupported = () => "Notification" in window;
const isOn = () => isSupported() && choice() === "on" && Notification.permission === "granted";

let mark = ""; // mark of the last answer
/** @type {Set<string>} the runs whose end is known */
const ended = new Set();
let waits = "";
let isAsking = false;

/** Show the runs that have ended since the last poll. */
async function look() {
  if (!isOn() || isAsking) return;
  isAsking = true;
  const answers = await Promise.all([call(`runs?count=10000&since=${mark}`), call("queue")]).catch(() => null);
  isAsking = false;
  if (!answers) return;
  const [{ runs, mark: now }, queue] = answers, isFirst = !mark;
  mark = now;
  for (const { id, name, state } of /** @type {import("./columns.js").Run[]} */ (runs)) {
    if (moodOf(state) === "busy") ended.delete(id);
    else if (!ended.has(id)) {
      ended.add(id);
      if (!isFirst) notify(say("{name}: {state}", { name, state: stateWord(state) }), name); // or ended before
    }
  }
  const next = queue.entries.find((/** @type {{ waits: boolean }} */ entry) => entry.waits)?.name ?? "";
  const waiting = queue.halted || (queue.paused && queue.paused !== "by you") ? next : "";
  if (!isFirst && waiting && waiting !== waits)
    notify(say("The queue is paused before {name}.", { name: waiting }), "queue");
  waits = waiting;
}

/**
 * @param {string} text
 * @param {string} tag
 */
function notify(text, tag) {
  const notice = new Notification(translated("Kohya Trainer"), { body: translated(text), tag });
  notice.addEventListener("click", () => window.focus());
}

/** @param {HTMLElement} room */
export function mountNotices(room) {
  const details = find(room, ".notices", HTMLDetailsElement);
  details.addEventListener("toggle", () => details.open && void fill(find(details, ".channels")));
}

/** @param {HTMLElement} place */
async function fill(place) {
  const said = make("p", { className: "answer", role: "status" });
  const tell = (/** @type {string} */ text, bad = false) => {
    said.textContent = text;
    said.classList.toggle("bad", bad);
  };
  place.replaceChildren(browserChannel(tell), said);
  try {
    const { address, here } = await ask("webhook");
    said.before(webhookChannel(address, here, tell));
  } catch (error) {
    tell(messageOf(error), true);
  }
}

/** @param {(text: string, bad?: boolean) => void} tell */
function browserChannel(tell) {
  const button = makeButton("", async () => {
    if (isOn()) {
      choice("off");
    } else if ((await Notification.requestPermission()) === "granted") {
      choice("on");
    } else {
      tell(translated("The browser does not allow notifications from this page: allow them beside its address."), true);
    }
    mark = "";
    show();
    void look();
  });
  const show = () => {
    button.textContent = translated(isOn() ? "Stop notifying in this browser" : "Notify in this browser");
    button.setAttribute("aria-pressed", String(isOn()));
  };
  show();
  button.disabled = !isSupported();
  return make("div", { className: "channel" }, button, make("p", { className: "quiet" }, translated(
    isSupported()
      ? "When a run ends or fails, or the queue waits for you, as long as this page is open in a window."
      : "This browser does not let pages notify at this address: they need https, or this computer's own address.")));
}

/**
 * @param {string} address
 * @param {boolean} here whether this is the computer itself
 * @param {(text: string, bad?: boolean) => void} tell
 */
function webhookChannel(address, here, tell) {
  const about = make("p", { className: "quiet" }, translated(
    "A webhook receives the same as JSON, without images and paths, even while this page is closed."));
  if (!here) {
    const now = address ? say("Messages go to {address}.", { address }) : translated("None is set.");
    const only = translated("It can be changed only on the computer that runs this page.");
    const title = make("p", {}, make("b", {}, "Webhook"));
    return make("div", { className: "channel" }, title, about, make("p", {}, now, " ", only));
  }
  const field = make("input", {
    id: "webhook-address", type: "url", value: address, spellcheck: false, autocomplete: "off", placeholder: "https://",
  });
  const press = async (/** @type {string} */ act) => {
    tell("");
    try {
      tell(translated((await ask("webhook", { act, address: field.value })).said));
    } catch (error) {
      tell(messageOf(error), true);
    }
  };
  return make("div", { className: "channel" },
    make("label", { for: "webhook-address" }, translated("Address of a webhook")),
    make("div", { className: "line" }, field, makeButton(translated("Save address"), () => press("store")),
      makeButton(translated("Send a test"), () => press("test"))), about);
}

setInterval(look, PERIOD);
