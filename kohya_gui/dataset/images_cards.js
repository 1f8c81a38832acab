// The card of an image: the picture with its crop, its size and bucket, findings, and its caption.
import { count, say } from "../i18n/sentences.js";
import { make, makeButton } from "../server/elements.js";
import { address } from "../server/http.js";

/**
 * @typedef {object} Row an image, as the server describes it
 * @property {string} name
 * @property {string} path
 * @property {number} version when the file was last written
 * @property {string} broken why it cannot be decoded, or ""
 * @property {[number, number]} size in pixels; 0 if unknown
 * @property {[number, number] | null} bucket
 * @property {[number, number, number, number]} seen left, top, width and height of the crop, as shares
 * @property {number} cut the share that is cropped away
 * @property {number} larger the factor by which it is enlarged
 * @property {boolean} turned whether its EXIF orientation turns or mirrors it
 * @property {boolean} upright whether that orientation is applied
 * @property {number} repeats
 * @property {string} role "reg", a role in validation, or ""
 * @property {string} unused why it is not used, or ""
 * @property {boolean} foreign whether the caption is not UTF-8
 * @property {string | null} caption
 * @property {boolean | null} trigger whether the caption has the trigger word; null if there is no trigger word
 * @property {string} double
 * @property {number} group
 * @property {string} fixed why it is read-only here, or ""
 */

/**
 * The address of an image, scaled to this longer side in pixels.
 * @param {Row} row
 * @param {number} side
 */
export const thumb = (row, side) =>
  address("images_thumb", { path: row.path, side: String(side), v: String(row.version), upright: String(row.upright) });

/**
 * A picture, with the part that the bucket crops shaded.
 * @param {Row} row
 * @param {number} side in pixels
 */
export function frame(row, side) {
  if (row.broken) return make("div", { className: "frame none" }, "no image");
  const picture = make("img", { src: thumb(row, side), loading: "lazy", decoding: "async", alt: row.name });
  if (row.size[0]) picture.style.aspectRatio = `${row.size[0]} / ${row.size[1]}`;
  const box = make("div", { className: "frame" }, picture);
  picture.addEventListener("kohya:lost", () => box.replaceChildren("no image"));
  const [left, top, width, height] = row.seen;
  if (width < 0.999 || height < 0.999) {
    const shade = make("i", { className: "seen" });
    Object.assign(shade.style, {
      left: `${left * 100}%`, top: `${top * 100}%`, width: `${width * 100}%`, height: `${height * 100}%`,
    });
    box.append(shade);
  }
  return box;
}

/** @param {Row} row */
export function badges(row) {
  /** @type {["bad" | "warn" | "", string][]} */
  const labels = [];
  if (row.broken) labels.push(["bad", row.broken]);
  if (row.role) labels.push(["", row.role === "reg" ? "regularisation" : "used for validation"]);
  if (row.unused) labels.push(["warn", say("not used: {why}", { why: row.unused })]);
  if (row.foreign) labels.push(["bad", "caption is not UTF-8"]);
  if (row.caption === null) labels.push(["warn", "no caption"]);
  else if (!row.caption.trim()) labels.push(["warn", "empty caption"]);
  if (row.trigger === false) labels.push(["warn", "no trigger word"]);
  if (row.double)
    labels.push([
      "warn",
      say(row.double === "alike" ? "similar to others (group {group})" : "duplicate of others (group {group})", {
        group: row.group + 1,
      }),
    ]);
  if (row.cut > 0.02)
    labels.push([row.cut > 0.2 ? "warn" : "", say("{share}% cropped", { share: Math.round(row.cut * 100) })]);
  if (row.larger > 1.5) labels.push(["warn", say("upscaled {factor} times", { factor: row.larger.toFixed(1) })]);
  if (row.turned) labels.push(row.upright ? ["", "turned by EXIF"] : ["warn", "EXIF rotation, ignored"]);
  return labels.map(([kind, text]) => make("span", { className: `badge ${kind}` }, text));
}

/**
 * The size, bucket and repeats of an image.
 * @param {Row} row
 */
export function facts(row) {
  if (!row.bucket) return row.size[0] ? `${row.size[0]} × ${row.size[1]}` : "";
  return say("{size}, {repeats}", {
    size: `${row.size[0]} × ${row.size[1]} → ${row.bucket[0]} × ${row.bucket[1]}`,
    repeats: count(row.repeats, "repeat"),
  });
}

/**
 * A caption's text field, saved when it loses the focus or on Ctrl+Enter. A text that could not be saved stays, and is
 * saved when the field loses the focus again.
 * @param {Row} row
 * @param {(row: Row, text: HTMLTextAreaElement) => unknown} store
 */
export function captionField(row, store) {
  const text = make("textarea", {
    value: row.caption ?? "", rows: 4, "aria-label": say("Caption of {name}", { name: row.name }),
    placeholder: row.caption === null ? "no caption" : "empty", spellcheck: true,
    readOnly: row.foreign || Boolean(row.fixed), title: row.fixed,
  });
  text.onchange = () => void store(row, text);
  text.onblur = () => {
    if (text.dataset.state === "failed") void store(row, text);
  };
  text.onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) text.blur();
    if (event.key === "Escape") text.value = row.caption ?? "";
  };
  return text;
}

/**
 * Show below a caption why it was not saved.
 * @param {HTMLTextAreaElement} text
 * @param {string} why "" if it was saved
 */
export function tellWhy(text, why) {
  text.parentElement?.querySelector(":scope > .why")?.remove();
  if (why) text.after(make("p", { className: "why", role: "alert" }, why));
}

/**
 * The buttons that turn the pages.
 * @param {number} start
 * @param {number} total
 * @param {number} size images on a page
 * @param {(start: number) => void} turnTo
 */
export function turns(start, total, size, turnTo) {
  if (total <= size) return [make("span", {}, count(total, "image"))];
  const last = Math.ceil(total / size) - 1, at = Math.floor(start / size);
  const go = (/** @type {number} */ to) => turnTo(Math.max(0, Math.min(last, to)) * size);
  const where = make("input", { value: String(at + 1), inputMode: "numeric", "aria-label": "Page" });
  where.onchange = () => go((parseInt(where.value, 10) || 1) - 1);
  const range = say(" of {pages} · {first} to {last} of {images}", {
    pages: (last + 1).toLocaleString("en"), first: (start + 1).toLocaleString("en"),
    last: Math.min(start + size, total).toLocaleString("en"), images: count(total, "image"),
  });
  return [
    makeButton("Previous", () => go(at - 1), { disabled: at === 0 }),
    make("span", {}, where, range),
    makeButton("Next", () => go(at + 1), { disabled: at === last }),
  ];
}
