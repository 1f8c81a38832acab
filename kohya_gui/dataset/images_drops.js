// Drops in the room Data: images and captions are uploaded to the open folder or a new one, and shown.
import { say } from "../i18n/sentences.js";
import { finder, hit } from "../server/elements.js";
import { takeDrops } from "../server/drops.js";
import { ask } from "../server/http.js";
import { BUSY, describe, namesOf, Sending } from "../server/uploads.js";

/** @typedef {import("./images.js").Tab} Tab */
/** @typedef {import("../server/uploads.js").Folder} Folder */

/** @type {HTMLElement} */
let root;
/** @type {Tab} */
let tab;
/** @type {Sending | null} */
let sending = null;
let isSending = false;

const part = finder(() => root);

/** The open folder, or a new one. Throws an error if images come from several folders. */
async function folderToFill() {
  const overview = tab.overview();
  if (overview && (tab.described() || overview.fixed))
    throw new Error("These are all images of a training: open one folder to add images to it.");
  if (overview) return overview.folder;
  const { value } = part("#images-folder", HTMLInputElement);
  return value.trim() || (await ask("upload_folder", { name: "images" })).folder;
}

/**
 * Upload files, and show the progress.
 * @param {string} folder
 * @param {File[]} files
 */
async function fill(folder, files) {
  const bar = part(".working");
  sending = new Sending(files, folder, (bytes, of, done, all) => {
    const percent = of ? Math.floor((100 * bytes) / of) : 100;
    part(".working span").textContent = say("{done} of {files} files, {percent}%", { done, files: all, percent });
    part(".working i").style.width = `${percent}%`;
  });
  bar.hidden = false;
  try {
    return await sending.run();
  } finally {
    bar.hidden = true;
  }
}

/**
 * @param {HTMLElement} element
 * @param {Tab} parentTab
 */
export function mount(element, parentTab) {
  [root, tab] = [element, parentTab];
  root.addEventListener("click", (event) => hit(event, "[data-do=halt]") && sending?.stop());
}

/**
 * Upload the files of folders. Returns the target, and the message about it.
 * @param {Folder[]} folders
 */
async function send(folders) {
  const base = await folderToFill(), isOpen = Boolean(tab.overview()), outcomes = [], places = [];
  for (const [at, name] of (await namesOf(folders)).entries()) {
    if (sending?.stopped.signal.aborted) break;
    places.push(name ? `${base}/${name}` : base);
    outcomes.push(await fill(places[at], folders[at].files));
  }
  const { said, refused } = describe(outcomes, places);
  if (!said) throw new Error(refused || "Nothing was sent.");
  return { base, isOpen, said, refused };
}

takeDrops(".images", async (_, folders) => {
  if (isSending) return tab.notify("bad", BUSY);
  isSending = true;
  const sent = await tab.attempt(() => send(folders));
  sending = null;
  isSending = false; // more may be dropped while a slow server lists these
  if (!sent) return;
  const { base, isOpen, said, refused } = sent;
  if (!isOpen) part("#images-folder", HTMLInputElement).value = base;
  const isShown = await tab.open(isOpen); // clears messages, or shows why the folder cannot be opened
  if (isShown) tab.notify(refused ? "bad" : "good", [said, refused].filter(Boolean).join("\n"));
});
