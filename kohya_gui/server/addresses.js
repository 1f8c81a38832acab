// Addresses of the visible part of the page: #train/lora, #runs/NAME, #data=FOLDER, for Back, Forward and reloads.
import { say } from "../i18n/sentences.js";
import { all, hit, make, makeButton } from "./elements.js";
import { wait } from "./http.js";
import { notify } from "./notices.js";

/**
 * @typedef {(rest: string) => unknown} Opener shows what the rest of an address names, "" for the room itself. It
 *   returns, or promises, a sentence if there is no such thing, or false if it has said so itself.
 */

/** @type {Record<string, string>} a room of an address -> its tab */
const ROOMS = {
  data: "data", train: "train", runs: "runs", queue: "runs", try: "try", tools: "tools", lab: "lab",
};
const HOME = "train";
const PATIENCE = 10_000; // milliseconds to wait for a tab
const PAUSE = 20; // milliseconds
/** @type {Record<string, string>} the address at which each tab was left */
const left = {};
/** @type {Record<string, Opener>} */
const openers = {};
let turn = 0; // number of addresses opened, as an opener may finish after the next one
let opening = 0; // active openers: addresses that they set replace the one being opened
let isPressing = false; // a tab is pressed by this module, not by the user

/**
 * Register a function that opens the rest of a room's addresses.
 * @param {string} room
 * @param {Opener} opener
 */
export const register = (room, opener) => void (openers[room] = opener);

/**
 * An address, such as "runs/cat" or "data=/images".
 * @param {string} room
 * @param {string} [rest]
 */
export const addressOf = (room, rest = "") =>
  rest ? room + (room === "data" ? "=" : "/") + encodeURIComponent(rest).replaceAll("%2F", "/") : room;

/**
 * The room of an address, and the rest of it.
 * @param {string} address with or without its #
 */
export function parse(address) {
  const [, room = "", rest = ""] = /^#?([^/=]*)[/=]?(.*)$/s.exec(address) ?? [];
  try {
    return { room: decodeURIComponent(room), rest: decodeURIComponent(rest) };
  } catch {
    return { room, rest }; // typed by hand, with a lone %
  }
}

/**
 * Open an address of the page. Resolves when its content is shown.
 * @param {string} address
 */
export async function go(address) {
  note(address);
  await open(address);
}

/**
 * Set the address of the content that is shown already.
 * @param {string} address
 */
export function note(address) {
  tell("");
  left[ROOMS[parse(address).room]] = address;
  if (location.hash === `#${address}`) return;
  if (opening) history.replaceState(null, "", `#${address}`);
  else history.pushState(null, "", `#${address}`);
}

/** @param {string} address */
async function open(address) {
  const { room, rest } = parse(address), here = ++turn;
  const tab = ROOMS[room || HOME];
  if (!tab) return instead(HOME, say("There is nothing at {address} on this page.", { address: `#${room}` }));
  left[tab] = address || HOME;
  await openTab(tab, "#rooms");
  const opener = openers[room] ?? ((name) => name && say("There is no {name} here.", { name }));
  opening++;
  const why = await Promise.resolve(opener(rest)).finally(() => opening--);
  if (here === turn && (why === false || (why && typeof why === "string"))) await instead(room, why || "");
}

/**
 * Report that an address leads nowhere, and show the nearest room.
 * @param {string} room
 * @param {string} why
 */
async function instead(room, why) {
  history.replaceState(null, "", `#${room}`);
  tell(why);
  left[ROOMS[room]] = room;
  turn++;
  await openTab(ROOMS[room], "#rooms");
  if (why) await openers[room]?.("");
}

/** @param {string} text an empty one takes the last one away */
function tell(text) {
  const close = makeButton("✕", () => tell(""), { "aria-label": "Close" });
  notify("address", ...(text ? [make("p", {}, text), close] : []));
}

/**
 * Open a tab, and wait for its row, which may be inside a tab that was opened just now. Returns whether there is one.
 * @param {string} tab
 * @param {string} row
 */
export async function openTab(tab, row) {
  const tabs = () => all(document, `${row} > .tab-wrapper button[role="tab"]`);
  for (let waited = 0, isOpen = false; waited < PATIENCE; waited += PAUSE) {
    const button = tabs().find(({ dataset }) => dataset.tabId === tab);
    if (!button && tabs().length) return false;
    // Twice in a row, as a row that was added just now goes back to the tab that it begins with.
    const isSelected = button?.ariaSelected === "true";
    if (isSelected && isOpen) return true;
    isOpen = isSelected;
    if (button && !isSelected) press(button);
    await wait(PAUSE);
  }
  return false;
}

/** @param {HTMLElement} button */
function press(button) {
  isPressing = true;
  button.click();
  isPressing = false;
}

/**
 * Have Gradio begin with the tabs of this address, before it renders any.
 * @param {Record<string, string>} tabs a tab by the id of its row
 */
function beginWith(tabs) {
  /** @type {{ components?: { type: string, props: { id?: string, elem_id?: string, selected?: string } }[] }} */
  const { components = [] } = /** @type {any} */ (window).gradio_config ?? {};
  const known = new Set(components.map(({ type, props }) => (type === "tabitem" ? props.id : "")));
  for (const { type, props } of components) {
    const tab = type === "tabs" && tabs[props.elem_id ?? ""];
    if (tab && known.has(tab)) props.selected = tab;
  }
}

/** The room of the current address, or the first one. */
export const openRoom = () => ROOMS[parse(location.hash).room] ?? HOME;

/** Open the address that the page was loaded with. Call it before Gradio's script runs. */
export function begin() {
  const { room, rest } = parse(location.hash);
  beginWith({ rooms: openRoom(), kinds: room === HOME ? rest : "" });
  if (room) void open(location.hash.slice(1));
}

// Before Gradio's own listener, which selects the tab.
document.addEventListener("click", (event) => {
  const button = hit(event, 'button[role="tab"]'), tab = button?.dataset.tabId ?? "";
  if (!button || isPressing) return;
  if (!(tab in ROOMS)) return note(`${HOME}/${tab}`);
  if (button.ariaSelected === "true") void go(tab);
  else note(left[tab] ?? tab);
}, { capture: true });
addEventListener("popstate", () => {
  tell("");
  void open(location.hash.slice(1));
});
