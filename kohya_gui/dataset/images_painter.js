// A window in which the mask of an image is painted, with mouse, pen or finger.
import { say } from "../i18n/sentences.js";
import { make, makeButton } from "../server/elements.js";
import { messageOf } from "../server/http.js";
import { isLoaded } from "../server/images.js";

/** @typedef {import("./images_cards.js").Row} Row */
/**
 * @typedef {object} Work what is painted
 * @property {string} image its address
 * @property {string} mask the address of its present mask
 * @property {number} side pixels of the longer side while painting
 * @property {(content: ArrayBuffer) => Promise<() => Promise<void>>} save saves a PNG; called when the window is closed
 */

const MAX_UNDO = 12; // strokes
const RED = "rgb(220, 30, 60)";

/**
 * Open the window below `root`.
 * @param {HTMLElement} root
 * @param {Row} row
 * @param {Work} work
 */
export async function paint(root, row, work) {
  const canvas = makeCanvas(row, work.side), context = canvas.getContext("2d", { willReadFrequently: true });
  if (!context) return;
  await new MaskPainter(row, work, canvas, context).open(root);
}

/**
 * @param {Row} row
 * @param {number} side
 */
function makeCanvas({ name, size: [wide, high] }, side) {
  const scale = Math.min(1, side / Math.max(wide, high));
  const sizes = { width: Math.max(1, Math.round(wide * scale)), height: Math.max(1, Math.round(high * scale)) };
  return make("canvas", { ...sizes, tabIndex: 0, role: "img", "aria-label": say("Mask of {name}", { name }) });
}

class MaskPainter {
  /** @type {ImageData[]} the canvas before each stroke */
  before = [];
  /** @type {number[]} */
  last = [];
  tool = "erase";
  size = 48;
  painting = false;
  saved = true;

  /**
   * @param {Row} row
   * @param {Work} work
   * @param {HTMLCanvasElement} canvas
   * @param {CanvasRenderingContext2D} context
   */
  constructor(row, work, canvas, context) {
    this.work = work;
    this.row = row;
    this.canvas = canvas;
    this.context = context;
    this.back = makeButton("Undo stroke", () => this.undoStroke(), { disabled: true });
    this.tools = [["erase", "Learn this"], ["paint", "Leave this out"]].map(([name, text]) =>
      makeButton(text, () => this.choose(name), { "data-tool": name, "aria-pressed": String(name === this.tool) }));
    this.answer = make("p", { className: "said", role: "status" });
    this.keep = makeButton("Save mask", () => void this.store(), { className: "go", disabled: true });
    this.discard = makeButton("Close", () => this.dialog.close());
    this.dialog = this.build();
    this.listen();
  }

  build() {
    const { canvas, row, work } = this, { width, height } = canvas;
    const range = make("input", { type: "range", min: "4", max: "240", value: String(this.size), id: "mask-size" });
    range.oninput = () => (this.size = Number(range.value));
    return make("dialog", { className: "closer painter" },
      make("div", { className: "head" },
        make("b", {}, row.name),
        make("span", { className: "acts" }, this.keep, this.discard)),
      make("div", { className: "acts" },
        this.tools,
        make("label", { htmlFor: "mask-size" }, "Brush size", range),
        this.back,
        makeButton("Learn all", () => this.flood(false)),
        makeButton("Leave all out", () => this.flood(true))),
      make("div", { className: "easel", style: `aspect-ratio:${width} / ${height};--shape:${width / height}` },
        make("img", { src: work.image, alt: "", draggable: false }),
        canvas),
      make("p", { className: "quiet" },
        "Red is left out of the training. Paint with mouse, pen or finger; Ctrl+Z undoes a stroke."),
      this.answer);
  }

  listen() {
    const { canvas, dialog } = this;
    canvas.onpointerdown = (event) => {
      if (event.button) return;
      event.preventDefault();
      this.remember();
      canvas.setPointerCapture(event.pointerId);
      [this.painting, this.last] = [true, this.at(event)];
      this.stroke(event);
    };
    canvas.onpointermove = (event) => this.stroke(event);
    canvas.onpointerup = canvas.onpointercancel = () => (this.painting = false);
    dialog.addEventListener("keydown", (event) => {
      if (event.key.toLowerCase() === "z" && (event.ctrlKey || event.metaKey)) this.undoStroke();
    });
    dialog.addEventListener("cancel", (event) => {
      if (this.saved) return;
      event.preventDefault(); // Escape would lose the unsaved strokes
      this.answer.textContent = "Save the mask, or discard what you have painted.";
    });
    dialog.addEventListener("close", () => dialog.remove());
  }

  /** @param {HTMLElement} root */
  async open(root) {
    root.append(this.dialog);
    this.dialog.showModal();
    const mask = make("img", { src: this.work.mask, alt: "", hidden: true }), { width, height } = this.canvas;
    this.dialog.append(mask);
    if (await isLoaded(mask)) this.context.drawImage(mask, 0, 0, width, height);
    else this.answer.textContent =
      "The mask that is there cannot be read; a new one replaces it, and the old file is kept.";
    mask.remove();
    this.keep.disabled = false;
  }

  /** @param {string} name */
  choose(name) {
    this.tool = name;
    for (const button of this.tools) button.setAttribute("aria-pressed", String(button.dataset.tool === name));
  }

  remember() {
    this.before.push(this.context.getImageData(0, 0, this.canvas.width, this.canvas.height));
    if (this.before.length > MAX_UNDO) this.before.shift();
    [this.back.disabled, this.saved] = [false, false];
    this.discard.textContent = "Discard";
  }

  undoStroke() {
    const last = this.before.pop();
    if (last) this.context.putImageData(last, 0, 0);
    this.back.disabled = !this.before.length;
  }

  /**
   * Exclude the whole image from the training, or none of it.
   * @param {boolean} out
   */
  flood(out) {
    const { context, canvas: { width, height } } = this;
    this.remember();
    context.globalCompositeOperation = "source-over";
    context.clearRect(0, 0, width, height);
    context.fillStyle = RED;
    if (out) context.fillRect(0, 0, width, height);
  }

  /** @param {PointerEvent} event */
  at(event) {
    const { canvas } = this, box = canvas.getBoundingClientRect();
    return [
      ((event.clientX - box.left) / box.width) * canvas.width, ((event.clientY - box.top) / box.height) * canvas.height,
    ];
  }

  /** @param {PointerEvent} event */
  stroke(event) {
    if (!this.painting) return;
    const { context, last } = this, [x, y] = this.at(event);
    context.globalCompositeOperation = this.tool === "erase" ? "destination-out" : "source-over";
    Object.assign(context, { strokeStyle: RED, lineWidth: this.size, lineCap: "round", lineJoin: "round" });
    context.beginPath();
    context.moveTo(last[0], last[1]);
    context.lineTo(x, y + (last[0] === x && last[1] === y ? 0.01 : 0)); // a line without a length is not drawn
    context.stroke();
    this.last = [x, y];
  }

  async store() {
    this.keep.disabled = true;
    try {
      const done = await this.work.save(await (await greyOf(this.canvas)).arrayBuffer());
      this.saved = true;
      this.dialog.close();
      await done();
    } catch (error) {
      this.answer.textContent = messageOf(error);
      this.keep.disabled = false;
    }
  }
}

/**
 * The mask as a grey image: white where the model is trained.
 * @param {HTMLCanvasElement} canvas
 * @returns {Promise<Blob>}
 */
function greyOf(canvas) {
  const out = make("canvas", { width: canvas.width, height: canvas.height });
  const from = canvas.getContext("2d"), to = out.getContext("2d");
  if (!from || !to) throw new Error("This browser cannot paint.");
  const data = from.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.data.length; i += 4) { // where red is painted (alpha), the mask is black
    data.data[i] = data.data[i + 1] = data.data[i + 2] = 255 - data.data[i + 3];
    data.data[i + 3] = 255;
  }
  to.putImageData(data, 0, 0);
  return new Promise((done, fail) =>
    out.toBlob((blob) => (blob ? done(blob) : fail(new Error("This browser cannot paint."))), "image/png"));
}
