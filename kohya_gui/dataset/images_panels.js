"use strict";
// The panels of the data set tab: tags, captions by a model, folder preparation; and the close look at one image.
window.kohyaImagePanels = (() => {
  const { make, count } = window.kohyaAsk;
  let root, base, ready = "", dialog, at = -1;
  const one = (selector) => root.querySelector(selector);
  const isOpen = (name) => one(`[data-panel=${name}]`).open;

  // ---- tags

  let turn = 0;
  async function tags() {
    if (!base?.state() || !isOpen("tags")) return;
    const mine = ++turn;
    const found = await base.attempt(() => base.ask("images_tags", base.asked({ prefix: one("#tags-filter").value })));
    if (!found || mine !== turn) return;
    one(".frequencies").replaceChildren(...found.tags.map(([tag, n]) => {
      const chip = make("button", { type: "button", title: "Use as the search text" }, make("code", {}, tag), make("b", {}, n.toLocaleString("en")));
      chip.onclick = () => {
        const field = one(one("#tags-action").value === "add" ? "#tags-put" : "#tags-find");
        field.value = tag;
        forget();
        field.focus();
      };
      return chip;
    }), found.more ? make("span", {}, `+ ${found.more.toLocaleString("en")}`) : "");
  }

  function edit() {
    const action = one("#tags-action").value;
    return { action, find: one("#tags-find").value, put: one("#tags-put").value, at_end: one("#tags-end").checked, match_case: one("#tags-case").checked };
  }

  /** A change that is not the one which was looked at cannot be applied. */
  function forget() {
    const { action } = edit();
    one(".change .find").hidden = action === "add";
    one(".change .put").hidden = action === "remove";
    one(".change .end").hidden = action !== "add";
    one(".change .put label").textContent = action === "add" ? "Tags to add" : "Replace with";
    ready = "";
    one("[data-do=edit]").disabled = true;
    one(".preview").replaceChildren();
  }

  async function preview() {
    const found = await base.attempt(() => base.ask("images_edit", base.asked({ ...edit(), apply: false })));
    if (!found) return;
    base.said("good", "");
    ready = found.changes ? JSON.stringify(base.asked(edit())) : "";
    one("[data-do=edit]").disabled = !found.changes;
    const [changes, shown] = [count(found.changes, "caption"), count(found.of, "shown image")];
    one(".preview").replaceChildren(
      make("p", {}, found.changes ? `${changes} of ${shown} would change:` : `None of ${shown} would change.`),
      make("ul", {}, found.samples.map((sample) => make("li", {}, make("small", {}, sample.name), make("del", {}, make("code", {}, sample.before)), make("ins", {}, make("code", {}, sample.after))))));
  }

  async function apply() {
    if (ready !== JSON.stringify(base.asked(edit()))) return preview();
    const done = await base.change("images_edit", { ...edit(), apply: true }, (found) => `${count(found.done, "caption")} changed. Undo brings the old ones back.`);
    if (done) forget();
  }

  // ---- folders

  function prepare() {
    const { places } = base.state();
    const own = places.find((place) => place.folder === "");
    const entries = [];
    const lying = own && count(own.images, "image");
    if (own && !own.words) entries.push(["gather", `Move the ${lying} that lie directly here into a folder`]);
    for (const place of places) if (place.folder) entries.push([`rename/${place.folder}`, `Rename ${place.folder}`]);
    entries.push(["bring", "Copy images from another folder"]);
    const select = one("#prepare-how"), before = select.value;
    select.replaceChildren(...entries.map(([value, text]) => make("option", { value, selected: value === before }, text)));
    chooseHow();
  }

  function chooseHow() {
    const how = one("#prepare-how").value;
    one(".prepare .source").hidden = how !== "bring";
    const place = base.state()?.places.find((p) => `rename/${p.folder}` === how);
    if (place) {
      one("#prepare-repeats").value = place.repeats;
      one("#prepare-words").value = place.words || place.folder;
    }
  }

  function doPrepare() {
    const [how, ...rest] = one("#prepare-how").value.split("/");
    const repeats = Number(one("#prepare-repeats").value);
    if (!Number.isInteger(repeats) || repeats < 1) return base.said("bad", "Repeats: write a whole number from 1.");
    const question = { how, place: rest.join("/"), repeats, words: one("#prepare-words").value, source: one("#prepare-source").value };
    return base.change("images_prepare", question, (found) => `The folder is called ${found.made} now.`);
  }

  // ---- one image, large

  function closer(row) {
    if (!dialog) {
      dialog = make("dialog", { className: "closer" });
      dialog.addEventListener("keydown", (event) => {
        if (event.target.tagName === "TEXTAREA") return;
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (step) show(at + step);
      });
      dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close());
      root.append(dialog);
    }
    dialog.showModal();
    show(base.state().rows.indexOf(row));
  }

  function show(to) {
    const { rows } = base.state();
    at = Math.max(0, Math.min(rows.length - 1, to));
    const row = rows[at];
    const button = (text, act, off) => Object.assign(make("button", { type: "button", disabled: off }, text), { onclick: act });
    dialog.replaceChildren(
      make("div", { className: "head" }, make("b", {}, row.name), make("span", { className: "acts" },
        button("Previous", () => show(at - 1), at === 0), button("Next", () => show(at + 1), at === rows.length - 1), button("Close", () => dialog.close()))),
      make("div", { className: "large" }, base.frame(row, 1280)),
      make("small", { className: "quiet" }, base.facts(row), row.cut > 0.001 ? ". The shaded part is cropped." : ""),
      make("div", { className: "badges" }, base.badges(row)), base.writer(row));
    dialog.setAttribute("aria-label", row.name);
  }

  function refresh() {
    tags();
    prepare();
  }

  function mount(element, given) {
    [root, base] = [element, given];
    Object.assign(base.acts, { preview, edit: apply, prepare: doPrepare });
    for (const panel of root.querySelectorAll(".panel")) panel.addEventListener("toggle", () => base.state() && refresh());
    for (const id of ["tags-action", "tags-find", "tags-put", "tags-end", "tags-case"]) one(`#${id}`).addEventListener("input", forget);
    for (const id of ["tags-find", "tags-put"]) one(`#${id}`).addEventListener("keydown", (event) => event.key === "Enter" && preview());
    let pause;
    one("#tags-filter").oninput = () => {
      clearTimeout(pause);
      pause = setTimeout(tags, 200);
    };
    one("#prepare-how").onchange = chooseHow;
    window.kohyaCommands.mount(one("[data-panel=caption]"), {
      more: () => ({ folder: base.state()?.folder ?? "", extension: root.querySelector("[data-setting=caption_extension]").value }),
      ended: () => base.reload(),
    });
    forget();
  }
  return { mount, tags, refresh, closer };
})();
