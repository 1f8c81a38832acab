"use strict";
// What the images of the data set tab are: one folder, or all that a training tab's form names, each source in a row.
window.kohyaImageSources = (() => {
  const { make, count } = window.kohyaAsk;
  const NAMES = ["reg_data_dir", "in_json", "dataset_config"]; // what may name other images than the folder's
  let root, base, taken = null, before = null;
  const one = (selector) => root.querySelector(selector);
  const field = (name) => one(`[data-setting="${name}"]`);
  const put = (to, value) => (to.type === "checkbox" ? (to.checked = value === true || value === "true") : (to.value = value));
  const start = (to) => (to.type === "checkbox" ? to.defaultChecked : to.defaultValue);

  /** Besides the fields of this tab, what the form had that was taken. */
  const question = () => (taken ? { script: taken.script, taken: taken.values, processes: taken.processes } : {});

  function tell() {
    one(".taken").hidden = !taken;
    if (taken) one(".taken span").textContent = `Counted as the training of the ${taken.title} tab, with its other settings for images and captions.`;
  }

  /** All that a form says about images comes over: what this tab shows into its fields, the rest as it is. */
  function take() {
    const list = one("#images-tab"), form = window.kohya.form(list.value);
    const { family, values, launch } = window.kohya.held(form);
    const names = root.dataset.takes.split(" ").filter((name) => name in values);
    taken = { title: list.selectedOptions[0].text, script: `${family}_train${list.value === "lora" ? "_network" : ""}`,
      values: Object.fromEntries(names.map((name) => [name, values[name]])), processes: Math.max(1, parseInt(launch.num_processes, 10) || 1) };
    for (const mine of root.querySelectorAll("[data-setting]")) {
      const name = mine.dataset.setting;
      const keeps = name === "resolution" && !values[name] && !values.dataset_config;
      if (!keeps) put(mine, values[name] ?? start(mine));
    }
    before = null;
    tell();
    if (values.train_data_dir) one("#images-folder").value = values.train_data_dir;
    if (one("#images-folder").value || base.described()) base.open();
    else base.said("plain", `The settings of the ${taken.title} tab were taken. It names no image folder yet.`);
  }

  function give() {
    const list = one("#images-tab"), title = list.selectedOptions[0].text;
    const values = { train_data_dir: one("#images-folder").value };
    for (const name of ["caption_extension", "resolution", "enable_bucket"]) values[name] = field(name).type === "checkbox" ? field(name).checked : field(name).value;
    for (const [name, value] of Object.entries(values)) {
      const theirs = window.kohya.form(list.value).querySelector(`[data-option="${name}"]`);
      if (!theirs) continue;
      put(theirs, value);
      theirs.dispatchEvent(new Event("input", { bubbles: true }));
    }
    base.said("good", `The ${title} tab has this folder now, with its caption ending, resolution and buckets.`);
  }

  function forget() {
    taken = null;
    tell();
    base.open();
  }

  /** One source alone, where its images and captions can be changed; and the way back. */
  function alone(path) {
    before ??= { folder: one("#images-folder").value, fields: NAMES.map((name) => field(name).value) };
    for (const name of NAMES) field(name).value = "";
    one("#images-folder").value = path;
    base.open();
  }

  function back() {
    one("#images-folder").value = before.folder;
    NAMES.forEach((name, i) => (field(name).value = before.fields[i]));
    before = null;
    base.open();
  }

  function line(place) {
    const [least, most = least] = place.span;
    const name = [make("span", { className: place.folder ? "own" : "" }, place.folder || "the folder itself")];
    if (place.role) name.push(make("small", {}, "regularisation"));
    if (place.held) name.push(make("small", {}, `${place.held.toLocaleString("en")} held back`));
    if (place.unused) name.push(make("small", {}, `not used: ${place.unused}`));
    if (place.fixed && place.path) name.push(Object.assign(make("button", { type: "button", title: `Open ${place.path}` }, "Open"), { onclick: () => alone(place.path) }));
    const numbers = [place.used.toLocaleString("en"), least === most ? `${least}` : `${least} to ${most}`, place.seen.toLocaleString("en")];
    return make("tr", {}, make("th", { scope: "row" }, name), numbers.map((text) => make("td", {}, text)));
  }

  function show(found) {
    const { places, count: told } = found;
    one(".sources").replaceChildren(...(places.length ? [
      make("thead", {}, make("tr", {}, ["Folder", "Images", "Repeats", "Per epoch"].map((title) => make("th", { scope: "col" }, title)))),
      make("tbody", {}, places.map(line))] : []));
    const also = [];
    if (told.regularisation) also.push(`${count(told.regularisation, "image")} for regularisation, seen as often as the others.`);
    const both = told.validation - found.kinds.held;
    if (told.validation) also.push(`${count(told.validation, "image")} used for validation.`);
    if (both) also.push(`${both.toLocaleString("en")} of them ${both === 1 ? "is" : "are"} learned from as well, as the share does not come out even.`);
    if (told.world > 1) also.push(`${told.world} processes share the batches.`);
    if (found.fixed) also.push(`${found.fixed} to change them.`);
    one(".also").replaceChildren(...also.map((text) => make("span", {}, text, " ")));
    one(".also").hidden = !also.length;
    one(".stops").hidden = !found.problems.length;
    one(".stops").replaceChildren(make("b", {}, "A training would not start:"), make("ul", {}, found.problems.map((text) => make("li", {}, text))));
    one("[data-do=back]").hidden = !before;
  }

  const state = () => ({ taken, before });
  function restore(kept) {
    ({ taken, before } = kept ?? { taken: null, before: null });
    tell();
  }

  function mount(element, given) {
    [root, base, taken, before] = [element, given, null, null];
    Object.assign(base.acts, { take, give, forget, back });
  }
  return { mount, question, show, state, restore };
})();
