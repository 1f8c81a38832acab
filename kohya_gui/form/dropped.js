// Drops anywhere on a form: configs are loaded, images and captions become folders of the training.
import { say } from "../i18n/sentences.js";
import { all, find, hit } from "../server/elements.js";
import { hasFiles, takeDrops } from "../server/drops.js";
import { send } from "./datasets_sending.js";
import { tellError } from "./messages.js";
import { upload } from "./tab.js";

takeDrops(".training", async (training, folders, event) => {
  // A dropped text file is a caption; one with a command can be imported by Load config.
  const endings = find(training, "input.upload", HTMLInputElement).accept.split(",").filter((each) => each !== ".txt");
  const isConfig = (/** @type {File} */ { name }) => endings.some((ending) => name.toLowerCase().endsWith(ending));
  const single = folders.filter(({ path }) => !path).flatMap(({ files }) => files); // folders may hold others' files
  const configs = single.filter(isConfig);
  if (configs.length > 1)
    return tellError(
      training.dataset.tab ?? "",
      new Error(say("Drop one config at a time: {names}", { names: configs.map(({ name }) => name).join(", ") })));
  const others = folders
    .map(({ path, files }) => ({ path, files: files.filter((file) => !configs.includes(file)) }))
    .filter(({ files }) => files.length);
  if (configs.length) await upload(training, configs[0]);
  const box = find(training, ".datasets");
  if (configs.length && !others.length) return;
  if (!hit(event, ".datasets")) box.scrollIntoView({ block: "center" }); // where the answer is shown
  await send(box, others, hit(event, ".datasets .groups li"));
});
for (const type of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(type, (event) => {
    const box = hit(event, ".datasets");
    if (!box || !hasFiles(event)) return;
    for (const each of all(box, ".over")) each.classList.remove("over");
    if (type === "dragover") (hit(event, ".groups li") ?? find(box, ".drop")).classList.add("over");
  });
}
