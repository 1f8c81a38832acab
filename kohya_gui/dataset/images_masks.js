// Masks of the data set tab: laid over the images, made by a model, and painted by hand with mouse, pen or finger.
import { say } from "../i18n/sentences.js";
import { make, makeButton, one } from "../server/elements.js";
import { address, ask, messageOf } from "../server/http.js";
import * as commands from "../tools/commands.js";

/** @typedef {import("./images.js").Tab} Tab */
/** @typedef {import("./images_cards.js").Row} Row */
/** @typedef {{ folder: string, count: number, images: number, past: string }} Masks where they are, how many, and the last change */

const SIDE = 1280; // pixels of the longer side while one paints
const KEPT = 12; // strokes that can be undone
const RED = "rgb(220, 30, 60)";

/** @type {HTMLElement} */
let root;
/** @type {Tab} */
let tab;
let version = 0; // a mask that was changed has another address

/**
 * @template {Element} [T=HTMLElement]
 * @param {string} selector
 * @param {new () => T} [type]
 */
const part = (selector, type) => one(root, selector, type);
const shown = () => part("#masks-shown", HTMLInputElement).checked;
const question = () => {
  const { folder, collection } = tab.query();
  return { folder: String(folder), collection: String(collection) };
};

/**
 * The address of a mask as the page lays it over its image.
 * @param {string} name
 * @param {number} side
 */
const maskAt = (name, side) => address("mask", { ...question(), name, side: String(side), v: String(version) });

/**
 * Put a mask over the frame of an image, if masks are shown.
 * @param {HTMLElement} frame
 * @param {Row} row
 * @param {number} side
 */
export function overlay(frame, row, side) {
  if (!tab?.overview() || !shown() || row.broken || row.fixed) return frame;
  const mask = make("img", { className: "mask", alt: "", src: maskAt(row.name, side), draggable: false });
  mask.onerror = () => mask.remove();
  frame.append(mask);
  return frame;
}

/** What is known of the masks of the folder. */
export async function refresh() {
  if (!tab.overview() || !part("[data-panel=masks]", HTMLDetailsElement).open) return;
  const found = await tab.attempt(() => ask("masks", question()));
  if (found) tell(found);
}

/** @param {Masks} found */
function tell(found) {
  part(".masks-of").textContent = say("{count} of {images} images have a mask in {folder}.", { count: found.count, images: found.images, folder: found.folder });
  const undo = part("[data-do=unmask]", HTMLButtonElement);
  undo.disabled = !found.past;
  undo.title = found.past ? say("Undo: {change}", { change: found.past }) : "Nothing to undo";
}

async function changed() {
  version++;
  await tab.page();
  await refresh();
}

async function undo() {
  const found = await tab.attempt(() => ask("masks_undo", question()));
  if (!found) return;
  tab.notify("good", say("Undone: {change}.", { change: found.undone }));
  await changed();
}

// ---- painting

/**
 * Paint the mask of an image in a window of its own.
 * @param {Row} row
 * @param {string} image its address
 */
export async function edit(row, image) {
  const [wide, high] = row.size, scale = Math.min(1, SIDE / Math.max(wide, high));
  const canvas = make("canvas", { width: Math.max(1, Math.round(wide * scale)), height: Math.max(1, Math.round(high * scale)), tabIndex: 0 });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", say("Mask of {name}", { name: row.name }));
  const context = canvas.getContext("2d", { willReadFrequently: true });
  if (!context) return;
  /** @type {ImageData[]} */
  const before = [];
  let tool = "erase", size = 48, painting = false, saved = true;
  const back = makeButton("Undo stroke", () => undoStroke(), { disabled: true });
  const tools = [["erase", "Learn this"], ["paint", "Leave this out"]].map(([name, text]) => makeButton(text, () => choose(name), { "data-tool": name, "aria-pressed": String(name === tool) }));
  const range = make("input", { type: "range", min: "4", max: "240", value: String(size), id: "mask-size" });
  range.oninput = () => (size = Number(range.value));
  const answer = make("p", { className: "said", role: "status" });
  const keep = makeButton("Save mask", () => void store(), { className: "go" });
  const discard = makeButton("Close", () => leave());
  const dialog = make("dialog", { className: "closer painter" },
    make("div", { className: "head" }, make("b", {}, row.name), make("span", { className: "acts" }, keep, discard)),
    make("div", { className: "acts" }, tools, make("label", { htmlFor: "mask-size" }, "Brush size", range), back,
      makeButton("Learn all", () => flood(false)), makeButton("Leave all out", () => flood(true))),
    make("div", { className: "easel", style: `aspect-ratio:${canvas.width} / ${canvas.height};--shape:${canvas.width / canvas.height}` }, make("img", { src: image, alt: "", draggable: false }), canvas),
    make("p", { className: "quiet" }, "Red is left out of the training. Paint with mouse, pen or finger; Ctrl+Z undoes a stroke."), answer);

  /** @param {string} name */
  function choose(name) {
    tool = name;
    for (const button of tools) button.setAttribute("aria-pressed", String(button.dataset.tool === name));
  }

  function remember() {
    before.push(context?.getImageData(0, 0, canvas.width, canvas.height) ?? new ImageData(1, 1));
    if (before.length > KEPT) before.shift();
    [back.disabled, saved] = [false, false];
    discard.textContent = "Discard";
  }

  function undoStroke() {
    const last = before.pop();
    if (last) context?.putImageData(last, 0, 0);
    back.disabled = !before.length;
  }

  /** @param {boolean} out */
  function flood(out) {
    remember();
    if (!context) return;
    context.globalCompositeOperation = "source-over";
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = RED;
    if (out) context.fillRect(0, 0, canvas.width, canvas.height);
  }

  /** @param {PointerEvent} event */
  function at(event) {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * canvas.width, ((event.clientY - box.top) / box.height) * canvas.height];
  }

  /** @type {number[]} */
  let last = [];
  /** @param {PointerEvent} event */
  function stroke(event) {
    const [x, y] = at(event);
    if (!context || !painting) return;
    context.globalCompositeOperation = tool === "erase" ? "destination-out" : "source-over";
    Object.assign(context, { strokeStyle: RED, lineWidth: size, lineCap: "round", lineJoin: "round" });
    context.beginPath();
    context.moveTo(last[0], last[1]);
    context.lineTo(x, y + (last[0] === x && last[1] === y ? 0.01 : 0));
    context.stroke();
    last = [x, y];
  }

  canvas.onpointerdown = (event) => {
    if (event.button) return;
    event.preventDefault();
    remember();
    canvas.setPointerCapture(event.pointerId);
    [painting, last] = [true, at(event)];
    stroke(event);
  };
  canvas.onpointermove = (event) => stroke(event);
  canvas.onpointerup = canvas.onpointercancel = () => (painting = false);
  dialog.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "z" && (event.ctrlKey || event.metaKey)) undoStroke();
  });
  dialog.addEventListener("cancel", (event) => {
    if (saved) return;
    event.preventDefault(); // Escape would lose what was painted
    answer.textContent = "Save the mask, or discard what you have painted.";
  });
  dialog.addEventListener("close", () => dialog.remove());
  const leave = () => dialog.close();

  async function store() {
    keep.disabled = true;
    try {
      const content = await (await greyOf(canvas)).arrayBuffer();
      const sent = { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: content };
      const found = await (await fetch(address("mask_put", { ...question(), name: row.name }), sent)).json();
      if (found.error) throw new Error(found.error);
      saved = true;
      leave();
      tab.notify("good", say("The mask of {name} is kept in {folder}.", { name: row.name, folder: found.folder }));
      await changed();
    } catch (error) {
      answer.textContent = messageOf(error);
      keep.disabled = false;
    }
  }

  root.append(dialog);
  dialog.showModal();
  keep.disabled = true;
  const mask = new Image();
  mask.src = maskAt(row.name, SIDE);
  await mask.decode().then(() => context.drawImage(mask, 0, 0, canvas.width, canvas.height), () => {
    answer.textContent = "The mask that is there cannot be read; a new one replaces it, and the old file is kept.";
  });
  keep.disabled = false;
}

/**
 * What was painted as a grey picture: white where the training learns.
 * @param {HTMLCanvasElement} canvas
 * @returns {Promise<Blob>}
 */
function greyOf(canvas) {
  const out = make("canvas", { width: canvas.width, height: canvas.height });
  const from = canvas.getContext("2d"), to = out.getContext("2d");
  if (!from || !to) throw new Error("This browser cannot paint.");
  const data = from.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.data.length; i += 4) {
    data.data[i] = data.data[i + 1] = data.data[i + 2] = 255 - data.data[i + 3];
    data.data[i + 3] = 255;
  }
  to.putImageData(data, 0, 0);
  return new Promise((done, fail) => out.toBlob((blob) => (blob ? done(blob) : fail(new Error("This browser cannot paint."))), "image/png"));
}

/**
 * @param {HTMLElement} element
 * @param {Tab} given
 */
export function mount(element, given) {
  [root, tab] = [element, given];
  Object.assign(tab.actions, { unmask: undo });
  const panel = part("[data-panel=masks]", HTMLDetailsElement);
  panel.addEventListener("toggle", refresh);
  part("#masks-shown", HTMLInputElement).onchange = () => tab.page();
  commands.mount(panel, () => ({ folder: tab.overview()?.folder ?? "" }), async () => {
    part("#masks-shown", HTMLInputElement).checked = true;
    version++;
    await tab.open(true);
  });
}
