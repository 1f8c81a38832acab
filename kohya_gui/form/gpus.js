// Choose the GPUs of a training: a button for each, in step with the field of their numbers. Shown if there are
// several.
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { all, find, isField, make, makeButton, setValue } from "../server/elements.js";
import { call } from "../server/http.js";
import { onSettled } from "./page.js";

/**
 * @typedef {{ index: string, name: string, free: number, total: number, user: string }} Gpu memory in GiB; `user` is
 *   the run that uses it
 */

const PERIOD = 10_000;
/** @type {Promise<void> | null} */
let asking = null;
/** @type {Gpu[]} */
let gpuList = [];
let isRequested = false;

/**
 * The field of a launch setting.
 * @param {Element} box
 * @param {string} name
 */
function field(box, name) {
  const element = find(/** @type {HTMLFormElement} */ (box.closest("form")), `[data-launch=${name}]`);
  if (!isField(element)) throw new Error(`${name} is not a field`);
  return element;
}

/** @param {Element} box */
const chosen = (box) => field(box, "gpu_ids").value.split(",").map((part) => part.trim()).filter(Boolean);

/**
 * Train on these GPUs, one process on each; with none, on any free GPU.
 * @param {Element} box
 * @param {string[]} names
 */
function choose(box, names) {
  const machines = Number(field(box, "num_machines").value) || 1;
  setValue(field(box, "gpu_ids"), gpuList.map(({ index }) => index).filter((index) => names.includes(index)).join(","));
  setValue(field(box, "num_processes"), Math.max(1, names.length) * machines);
  field(box, "gpu_ids").dispatchEvent(new Event("input", { bubbles: true }));
}

/** @param {Element} box */
function show(box) {
  /** @type {HTMLElement} */ (box).hidden = gpuList.length < 2;
  if (gpuList.length < 2) return;
  const names = chosen(box), cpu = field(box, "cpu"), off = cpu instanceof HTMLInputElement && cpu.checked;
  const isAll = names.join() === "all";
  /** @type {[string, string, string, boolean][]} */
  const choices = [
    ["", "Any free GPU", "", !names.length],
    ...gpuList.map(({ index, name, free, total, user }) => {
      const memory = total ? say("{free} of {total} GB free", { free: free.toFixed(1), total: total.toFixed(1) }) : "";
      /** @type {[string, string, string, boolean]} */
      const choice = [
        index,
        `${index} · ${name}`,
        [memory, user && say("used by {user}", { user: translated(user) })]
          .filter(Boolean)
          .map(translated)
          .join(" · "),
        isAll || names.includes(index),
      ];
      return choice;
    }),
  ];
  const place = find(box, ".choices"), now = JSON.stringify([choices, off]);
  if (place.dataset.shown === now) return;
  place.dataset.shown = now;
  const focus = place.contains(document.activeElement)
    ? /** @type {HTMLElement} */ (document.activeElement).dataset.gpu
    : null;
  place.replaceChildren(
    ...choices.map(([index, title, about, pressed]) => {
      const press = () => {
        const before = isAll ? gpuList.map((gpu) => gpu.index) : chosen(box);
        choose(box, index ? (pressed ? before.filter((name) => name !== index) : [...before, index]) : []);
      };
      const button = makeButton("", press, { "data-gpu": index, "aria-pressed": pressed && !off, disabled: off });
      button.append(
        make("span", index ? { className: "own" } : {}, title),
        ...(about ? [make("small", { className: "own" }, about)] : []));
      return button;
    }));
  if (focus !== null)
    all(place, "button")
      .find((button) => button.dataset.gpu === focus)
      ?.focus();
}

/** Fetch the GPUs and their users; forms that ask at the same time share one request. */
const look = () => (asking ??= call("queue").then(({ gpus }) => {
  gpuList = gpus;
  for (const box of all(document, ".gpus")) show(box);
}).catch(() => {}).finally(() => (asking = null)));

onSettled((where) => {
  const box = find(where, ".gpus");
  if (gpuList.length > 1) show(box);
  else if (!isRequested) void look();
  isRequested = true;
});
setInterval(() => {
  if (
    gpuList.length > 1 &&
    document.visibilityState === "visible" &&
    all(document, ".gpus").some((box) => box.checkVisibility())
  )
    void look();
}, PERIOD);
