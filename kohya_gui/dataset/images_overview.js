// The overview of a data set: its numbers, findings, notes and buckets, and the choices that filter its images.
import { count, say } from "../i18n/sentences.js";
import { fillSelect, find, make, makeButton } from "../server/elements.js";

/**
 * @typedef {{ folder: string, path: string, images: number, repeats: number, words: string, span: number[],
 *   used: number, seen: number, role: string, held: number, unused: string, fixed: string }} Place a folder of images
 */
/**
 * @typedef {{ images: number, repeats: number, batch: number, steps_per_epoch: number, steps: number, epochs: number,
 *   world: number, regularisation: number, validation: number, buckets: { size: [number, number], repeats: number,
 *   dataset: number }[] }} Count of the images as a training would use them
 */

/**
 * @typedef {object} Overview a folder, as the server describes it
 * @property {string} folder
 * @property {string} collection its id
 * @property {string} fixed why it is read-only and how to edit it, or ""
 * @property {Count} count
 * @property {Record<string, number>} kinds how many images there are of each kind of finding
 * @property {Record<string, string>} titles of the kinds
 * @property {string[]} calm kinds that are not mistakes
 * @property {number} captioned
 * @property {boolean} compared
 * @property {string[]} notes
 * @property {string} unread_ending another extension of caption files, which all captions of a folder have, or ""
 * @property {string[]} problems
 * @property {Place[]} places
 * @property {{ id: string, title: string, when: number }[]} past
 */
/** @typedef {{ show: string, place: string | null }} Filter the kind of finding and the folder that are shown */
/** @typedef {(changes: Partial<Filter>) => void} Narrow changes the filter */

/**
 * @param {HTMLElement} root
 * @param {Overview} overview
 * @param {Filter} filter
 * @param {Narrow} narrow
 */
export function renderOverview(root, overview, filter, narrow) {
  const part = (/** @type {string} */ selector) => find(root, selector);
  part(".collection").hidden = false;
  part(".collection").classList.toggle("fixed", Boolean(overview.fixed));
  part(".numbers").replaceChildren(
    ...numbers(overview).map(([title, text]) => make("div", {}, make("dt", {}, title), make("dd", {}, text))));
  part(".steps").textContent = steps(overview.count);
  const captions = overview.kinds.missing && !overview.unread_ending
    ? [linkToCaptions(part("[data-panel=caption]")), linkToOneCaption(part("[data-panel=tags]"))] : [];
  part(".findings").replaceChildren(...findings(overview, filter, narrow), ...captions);
  part(".notes").replaceChildren(...overview.notes.map((note) => make("li", {}, note)), ...captionFix(overview));
  showBuckets(part(".buckets"), overview.count.buckets);
  const places = overview.places.map((place) => [
    `/${place.folder}`, place.folder || "The folder itself", ` (${place.images.toLocaleString("en")})`,
  ]);
  const chosen = filter.place === null ? "" : `/${filter.place}`;
  fillSelect(part(".sieve .place"), [["", "All folders"], ...places], chosen);
  const kinds = Object.entries(overview.kinds);
  const choices = kinds.map(([kind, n]) => [kind, overview.titles[kind], ` (${n.toLocaleString("en")})`]);
  fillSelect(part(".sieve .show"), choices, filter.show);
}

/** @param {Overview} found */
function numbers({ count: training, kinds, captioned }) {
  const of = (/** @type {number} */ n) =>
    say("{done} of {of}", { done: n.toLocaleString("en"), of: kinds.all.toLocaleString("en") });
  return [
    ["Images used", of(training.images)],
    ["With a caption", of(captioned)],
    ["Steps per epoch", training.steps_per_epoch.toLocaleString("en")],
    ["Buckets", training.buckets.length.toLocaleString("en")],
    ...("trigger" in kinds ? [["With the trigger word", of(kinds.all - kinds.trigger)]] : []),
  ];
}

/** @param {Count} training */
function steps(training) {
  if (!training.repeats) return "A training would find no images here.";
  return say(
    "{images} with repeats are {pictures} per epoch; in batches of {batch} that is {each}. {steps} are {epochs}.",
    {
      images: count(training.images, "image"), pictures: count(training.repeats, "image"), batch: training.batch,
      each: count(training.steps_per_epoch, "step"), steps: count(training.steps, "step"),
      epochs: count(training.epochs, "epoch"),
    });
}

/**
 * A button for each kind of finding, which filters the images by it.
 * @param {Overview} found
 * @param {Filter} filter
 * @param {Narrow} narrow
 */
function findings({ kinds, titles, calm }, filter, narrow) {
  const present = Object.entries(kinds).filter(([kind, n]) => (n || kind === filter.show) && kind !== "all");
  return present.map(([kind, n]) => {
    const className = ["broken", "foreign"].includes(kind) ? "bad" : calm.includes(kind) ? "calm" : "";
    const pressed = String(filter.show === kind);
    const properties = { "data-kind": kind, "aria-pressed": pressed, className };
    const chip = makeButton("", () => narrow({ show: filter.show === kind ? "all" : kind }), properties);
    chip.append(make("b", {}, n.toLocaleString("en")), make("span", {}, titles[kind]));
    return chip;
  });
}

/**
 * A button that reads the captions which another extension hides; a data set file names its own.
 * @param {Overview} overview
 */
function captionFix({ unread_ending: other, fixed }) {
  if (!other || fixed) return [];
  return [make("li", { className: "fix" },
    make("button", { type: "button", "data-do": "read_captions" }, say("Read {other} files", { other })))];
}

/**
 * A button that leads to automatic captions.
 * @param {HTMLElement} panel
 */
function linkToCaptions(panel) {
  return makeButton("Write captions with a model", () => {
    panel.setAttribute("open", "");
    panel.scrollIntoView({ block: "start" });
    find(panel, "summary").focus({ preventScroll: true });
  }, { className: "to-captions" });
}

/**
 * A button that leads to the field whose words are written into the caption of every image that is shown.
 * @param {HTMLElement} panel
 */
function linkToOneCaption(panel) {
  return makeButton("Write the same words for all", () => {
    panel.setAttribute("open", "");
    const action = find(panel, "#tags-action", HTMLSelectElement);
    action.value = "add";
    action.dispatchEvent(new Event("input"));
    panel.scrollIntoView({ block: "start" });
    find(panel, "#tags-put").focus({ preventScroll: true });
  }, { className: "to-captions" });
}

/**
 * @param {HTMLElement} where
 * @param {Count["buckets"]} buckets
 */
function showBuckets(where, buckets) {
  const several = buckets.some((bucket) => bucket.dataset), name = count(buckets.length, "bucket");
  where.hidden = !buckets.length;
  find(where, "summary").textContent = say("{buckets}: number of images per epoch", { buckets: name });
  find(where, ".chips").replaceChildren(
    ...buckets.map(({ size, repeats, dataset }) =>
      make("span", { title: several ? say("Data set {number}", { number: dataset + 1 }) : "" },
        `${size[0]} × ${size[1]}`,
        make("b", {}, repeats.toLocaleString("en")))));
}
