// The four steps to a first training, shown in the panel until there is a run: each leads to its place on the page.
import { family, tabOf } from "../form/inputs.js";
import { formOf, onSettled } from "../form/page.js";
import { loadConfig, onOpened } from "../form/tab.js";
import { showImages } from "../form/live.js";
import { translated } from "../i18n/words.js";
import { all, around, find, hit, isField } from "../server/elements.js";
import { go } from "../server/addresses.js";
import { ask, messageOf, wait } from "../server/http.js";

const MODEL = "pretrained_model_name_or_path";
const IMAGES = ["train_data_dir", "dataset_config", "in_json"];

const shown = () => all(document, ".training").find((training) => training.checkVisibility());

/** The open training tab; if there is none, open the one that was open last. */
async function training() {
  if (!shown()) await go("train");
  for (let i = 0; i < 100 && !shown(); i++) await wait(50);
  return shown();
}

/** @type {Set<string>} the images that the user has looked at, in whichever way they were opened */
const looked = new Set();
/** @type {HTMLElement | null} the form whose steps are shown */
let current = null;
/** @type {WeakMap<HTMLElement, string>} the trainable base model of each form, as judged by the server */
const chosen = new WeakMap();

/**
 * Names of files and folders as one text, which is "" if there are none.
 * @param {string[]} paths
 */
const together = (paths) =>
  paths.map((path) => path.trim().replace(/(?<=.)[\\/]+$/, "")).filter(Boolean).sort().join("\n");

/**
 * The values of some options in a form, as one text.
 * @param {HTMLElement} where
 * @param {string[]} names
 */
const held = (where, names) =>
  together(
    all(where, names.map((name) => `[data-option=${name}]`).join())
      .filter(isField)
      .map((field) => field.value));

/** @param {HTMLElement} where */
const imagesOf = (where) => held(where, IMAGES);

/**
 * Mark the steps that are done, and the next one.
 * @param {HTMLElement} where a form
 */
function progress(where) {
  current = where;
  const model = held(where, [MODEL]), isModel = model && chosen.get(where) === model;
  const images = find(where, ".datasets .sum").textContent && imagesOf(where); // empty before they are counted
  const done = { model: isModel, images, look: looked.has(imagesOf(where)) && images, train: "" };
  const side = find(document, "#side"), steps = Object.entries(done);
  side.dataset.done = steps.filter(([, is]) => is).map(([name]) => name).join(" ");
  side.dataset.next = steps.find(([, is]) => !is)?.[0] ?? "";
}

/** @type {Record<string, (where: HTMLElement) => unknown>} */
const STEPS = {
  model: (where) => find(where, ".find-models").click(),
  images: (where) => {
    find(where, ".datasets").scrollIntoView({ block: "center" });
    find(where, ".choose-images input").focus({ preventScroll: true });
  },
  look: (where) => {
    looked.add(imagesOf(where));
    progress(find(where, "form.settings"));
    return showImages(tabOf(where));
  },
  train: (where) => find(where, ".bar button.train").focus(),
};

/**
 * Create the demo's model and images for the open form, and load its config.
 * @param {HTMLButtonElement} button
 */
async function tryDemo(button) {
  const where = await training(), about = button.nextElementSibling;
  if (!where || !about) return;
  const { tab = "" } = where.dataset, demoRequest = { tab, family: family(formOf(tab)) };
  const tell = (/** @type {string} */ text, bad = false) => {
    about.textContent = text;
    about.classList.toggle("bad", bad);
  };
  button.disabled = true;
  tell(translated("Making the demo's model and images, which takes some seconds …"));
  try {
    const { id } = await ask("demo", demoRequest);
    let demo = { state: "running", path: "" };
    while (demo.state === "running") {
      await wait(500);
      demo = await ask("demo_state", { ...demoRequest, id });
    }
    const isLoaded = await loadConfig(where, demo.path);
    tell(isLoaded ? translated("The form holds the demo. Look at its images, or press Train.") : "");
  } catch (error) {
    tell(messageOf(error), true);
  }
  button.disabled = false;
}

document.addEventListener("click", async (event) => {
  const demo = hit(event, ".try-demo", HTMLButtonElement);
  if (demo) void tryDemo(demo);
  const button = hit(event, ".first-steps button");
  const where = button && (await training());
  if (where) STEPS[button.dataset.step ?? ""](where);
});
onSettled((where) =>
  requestAnimationFrame(() => {
    // reading the visibility any earlier would force a layout of the page
    if (where.checkVisibility()) progress(where);
  }),
);
onOpened(progress);
document.addEventListener("kohya:judged", (event) => {
  const { where, chosen: model } = /** @type {CustomEvent<{ where: HTMLElement, chosen: string }>} */ (event).detail;
  chosen.set(where, together([model]));
  if (where.checkVisibility()) progress(where);
});
document.addEventListener("kohya:looked", (event) => {
  for (const paths of /** @type {CustomEvent<string[][]>} */ (event).detail) looked.add(together(paths));
  if (current?.isConnected) progress(current);
});
document.addEventListener("kohya:counted", (event) => {
  const where = around(/** @type {CustomEvent<Element>} */ (event).detail, "form.settings");
  if (where.checkVisibility()) progress(where);
});
