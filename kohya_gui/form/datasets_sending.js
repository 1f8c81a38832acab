// Upload chosen or dropped images to folders of the server, which become folders of the training.
import { say } from "../i18n/sentences.js";
import { all, around, find, hit, isField, make, setValue } from "../server/elements.js";
import { ask, messageOf, wait } from "../server/http.js";
import { areRepeated, BUSY, describe, namesOf, Sending } from "../server/uploads.js";
import { add, choose, refresh, save, showMessage, stateOf, valueOf } from "./datasets.js";
import { textsOf } from "./datasets_rows.js";
import { family, formAround } from "./inputs.js";
import { startOf } from "./page.js";

/** @typedef {import("../server/uploads.js").Folder} Folder */

const IMAGES = "image_dir";
/** @type {Record<string, string>} what is put behind the name of a folder for images that go with its own */
const BESIDE = { conditioning_data_dir: "-masks", control_directory: "-references" };

/**
 * Upload files to the folder of a row or to new folders, and show them.
 * @param {Element} box
 * @param {Folder[]} folders
 * @param {HTMLElement | null} row
 * @param {string} [name] of the option that names the folder
 */
export async function send(box, folders, row, name = IMAGES) {
  const state = stateOf(box), rows = all(box, ".groups li");
  if (state.isSending) return showMessage(box, "", BUSY);
  state.isSending = true;
  try {
    const names = row ? folders.map(() => "") : await namesOf(folders), isApart = names.some(Boolean);
    const into = row ?? (isApart ? null : await rowToFill(box, rows));
    const base = await folderFor(box, into, name);
    const { filled, said, refused } = await fill(box, folders, names.map((each) => (each ? `${base}/${each}` : base)));
    if (!filled.length) return showMessage(box, "", refused || "Nothing was sent.");
    while (state.saving) await wait(100); // its message would replace the one shown below
    if (!rows.length && areRepeated(names)) choose(box, { train_data_dir: base });
    else if (isApart) await nameNewFolders(box, filled);
    else await nameFolder(box, into && rowNow(box, into), name, filled[0]);
    showMessage(box, said, refused, state.unsaved); // below why rows cannot be saved
  } catch (error) {
    showMessage(box, "", messageOf(error));
  } finally {
    state.isSending = false;
    state.sending = undefined;
    find(box, ".sending").hidden = true;
  }
}

/**
 * Upload the files of each folder. Returns the server's folders that have files now, and the messages.
 * @param {Element} box
 * @param {Folder[]} folders
 * @param {string[]} places
 */
async function fill(box, folders, places) {
  const state = stateOf(box), line = find(box, ".sending"), folder = [];
  /** @type {import("../server/uploads.js").Outcome[]} */
  const outcomes = [];
  line.hidden = false;
  for (const [at, { files }] of folders.entries()) {
    if (state.sending?.stopped.signal.aborted) break;
    state.sending = new Sending(files, places[at], progressIn(line));
    outcomes.push(await state.sending.run());
    folder.push(state.sending.folder);
  }
  const filled = folder.filter((_, at) => outcomes[at].sent.length || outcomes[at].there.length);
  return { filled, ...describe(outcomes, folder) };
}

/**
 * The only row, if it takes more images: images are added to a user's own folder only if they were dropped on it.
 * @param {Element} box
 * @param {HTMLElement[]} rows
 */
async function rowToFill(box, [first, ...others]) {
  if (!first || others.length) return null;
  const { image_dir: folder = "" } = textsOf(first);
  return !folder || areBeside(folder, await newFolder(box)) ? first : null;
}

/**
 * The current element of a row, as rows may have been rebuilt during the upload.
 * @param {Element} box
 * @param {HTMLElement} row
 */
function rowNow(box, row) {
  const { image_dir: folder = "" } = textsOf(row);
  return row.isConnected ? row : all(box, ".groups li").find((each) => textsOf(each).image_dir === folder) ?? null;
}

/**
 * Whether the page made this folder for images; `added` is the next such folder.
 * @param {string} folder
 * @param {string} added
 */
function areBeside(folder, added) {
  const [path, other] = [folder, added].map((each) => each.replaceAll("\\", "/").replace(/\/+$/, ""));
  const place = other.replace(/[^/]*$/, "");
  return path.startsWith(place) && path !== place && !path.includes("/../");
}

/**
 * A folder for images that does not exist yet, with the output name if the user chose one: that of the start names
 * the kind of training, not the images.
 * @param {Element} box
 * @returns {Promise<string>}
 */
async function newFolder(box) {
  const where = formAround(box), name = valueOf(box, "output_name");
  const isChosen = name !== String(startOf(where, family(where)).values.output_name ?? "");
  return (await ask("upload_folder", { name: isChosen ? name : "" })).folder;
}

/**
 * The folder of a row, or one that does not exist yet.
 * @param {Element} box
 * @param {HTMLElement | null} row
 * @param {string} name
 * @returns {Promise<string>}
 */
async function folderFor(box, row, name) {
  const field = row && find(row, `[data-set=${name}]`), named = isField(field) ? field.value.trim() : "";
  if (named) return named;
  const { image_dir: images = "" } = row && BESIDE[name] ? textsOf(row) : {};
  return (images.replace(/[\\/]+$/, "") || await newFolder(box)) + (BESIDE[name] ?? "");
}

/**
 * @param {HTMLElement} line
 * @returns {import("../server/uploads.js").Report}
 */
const progressIn = (line) => (bytes, of, done, files) => {
  find(line, "span").textContent = say("{done} of {files} files, {percent}%", {
    done, files, percent: of ? Math.floor((100 * bytes) / of) : 100,
  });
  find(line, "i").style.width = `${of ? (100 * bytes) / of : 100}%`;
};

/**
 * Name the folder of images that were sent, if it has no name yet, and save that.
 * @param {Element} box
 * @param {HTMLElement | null} row
 * @param {string} name
 * @param {string} folder
 */
async function nameFolder(box, row, name, folder) {
  const field = (row ?? add(box, "")).querySelector(`[data-set=${name}]`);
  if (!isField(field)) return;
  const isNew = field.value.trim() !== folder;
  setValue(field, folder);
  if (isNew) await save(box);
  else void refresh(box);
}

/**
 * Add a row for each folder, and save the rows.
 * @param {Element} box
 * @param {string[]} folders
 */
async function nameNewFolders(box, folders) {
  for (const folder of folders) {
    const row = add(box, folder), repeats = /[\\/](\d+)_[^\\/]*$/.exec(folder)?.[1];
    const field = row.querySelector("[data-set=num_repeats]");
    if (repeats && isField(field)) setValue(field, repeats);
  }
  await save(box);
}

/** @param {HTMLInputElement} input */
const filesOf = (input) => [{ path: "", files: [...(input.files ?? [])] }].filter(({ files }) => files.length);

document.addEventListener("click", (event) => {
  const button = hit(event, ".datasets button[data-row]"), box = button?.closest(".datasets");
  if (!button || !box) return;
  const row = button.closest("li");
  if (button.dataset.row === "stop") stateOf(box).sending?.stop();
  if (button.dataset.row !== "send" || !row) return;
  const { accept } = find(box, "input[type=file]", HTMLInputElement);
  const input = make("input", { type: "file", multiple: true, accept });
  const { set } = find(around(button, ".of"), "[data-set]").dataset;
  input.onchange = () => void send(box, filesOf(input), row, set);
  input.click();
});
document.addEventListener("change", ({ target }) => {
  if (!(target instanceof HTMLInputElement) || !target.matches(".choose-images input")) return;
  void send(around(target, ".datasets"), filesOf(target), null);
  target.value = "";
});
