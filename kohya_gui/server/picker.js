"use strict";
// The file picker: a dialog that lists what the server allows. Typing filters, arrows move, Enter opens or takes,
// Backspace goes up, Escape closes.
window.kohyaPick = (() => {
  const { ask, make, offered } = window.kohyaAsk;
  let dialog, part = {}, now = {}, wanted = {}, asked = 0, refused = "";

  function build() {
    part.places = make("div", { className: "places" });
    part.path = make("input", { className: "where", spellcheck: false, "aria-label": "Folder" });
    part.up = make("button", { type: "button", className: "up", "aria-label": "Folder above", title: "Folder above" });
    part.filter = make("input", {
      placeholder: "Type to filter", spellcheck: false, role: "combobox", autocomplete: "off",
      "aria-label": "Filter", "aria-expanded": "true", "aria-controls": "pick-list",
    });
    part.list = make("ul", { id: "pick-list", role: "listbox", "aria-label": "Folders and files" });
    part.note = make("p", { className: "note", role: "status" });
    part.name = make("input", { className: "name", spellcheck: false, "aria-label": "Name of the new file" });
    part.take = make("button", { type: "button", className: "take" });
    const close = make("button", { type: "button", className: "cancel" }, "Cancel");
    part.title = make("h2", { id: "pick-title" });
    dialog = make("dialog", { className: "picker", "aria-labelledby": "pick-title" },
      make("div", { className: "head" }, part.title, part.places),
      make("div", { className: "path" }, part.up, part.path), part.filter, part.list, part.note,
      make("div", { className: "foot" }, part.name, part.take, close));
    close.onclick = () => dialog.close();
    part.up.onclick = () => now.up && open(now.up);
    part.take.onclick = take;
    part.filter.oninput = () => open(now.folder, part.filter.value);
    // Not as onkeydown: what such a handler returns is taken for an answer, and false keeps every key from being typed.
    part.path.addEventListener("keydown", (event) => event.key === "Enter" && (event.preventDefault(), open(part.path.value)));
    part.name.addEventListener("keydown", (event) => event.key === "Enter" && (event.preventDefault(), take()));
    part.filter.onkeydown = keys;
    part.list.onclick = ({ target }) => target.closest("li") && enter(Number(target.closest("li").dataset.at));
    dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close());
    dialog.addEventListener("kohya:allowed", () => open(refused));
    dialog.onclose = () => wanted.input?.focus();
    document.body.append(dialog);
  }

  function keys(event) {
    const last = now.entries.length - 1;
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (step && (Number.isFinite(step) || !part.filter.value)) mark(Math.max(0, Math.min(last, now.at + step)));
    else if (event.key === "Enter") now.at >= 0 ? enter(now.at) : take();
    else if (event.key === "Backspace" && !part.filter.value && now.up) open(now.up);
    else return;
    event.preventDefault();
  }

  function mark(at) {
    part.list.children[now.at]?.setAttribute("aria-selected", "false");
    now.at = at;
    const row = part.list.children[at];
    if (row) {
      row.setAttribute("aria-selected", "true");
      row.scrollIntoView({ block: "nearest" });
      part.filter.setAttribute("aria-activedescendant", row.id);
    } else part.filter.removeAttribute("aria-activedescendant");
  }

  const join = (name) => (now.folder.endsWith(now.separator) ? "" : now.separator) + name;

  function enter(at) {
    const entry = now.entries[at];
    if (!entry) return;
    if (entry.folder) open(now.folder + join(entry.name));
    else if (wanted.kind === "new") part.name.value = entry.name;
    else finish(now.folder + join(entry.name));
  }

  function take() {
    if (wanted.kind === "folder") return finish(now.folder);
    const first = wanted.endings.split(" ")[0];
    const name = part.name.value.trim();
    if (wanted.kind === "new" && name) finish(now.folder + join(first && !name.includes(".") ? name + first : name));
    else if (wanted.kind === "file" && now.at >= 0) enter(now.at);
  }

  function finish(path) {
    wanted.input.value = path;
    for (const kind of ["input", "change"]) wanted.input.dispatchEvent(new Event(kind, { bubbles: true }));
    dialog.close();
  }

  async function open(folder, filter = "") {
    const mine = ++asked;
    if (!filter) part.filter.value = "";
    try {
      const found = await ask("list", { folder, filter, kind: wanted.kind, endings: wanted.endings });
      if (mine === asked) show(found);
    } catch (error) {
      refused = folder;
      if (!now.folder && folder) await open("");
      part.note.replaceChildren(...offered(error.message));
    }
  }

  function show(found) {
    now = { ...found, at: -1 };
    part.path.value = found.folder;
    part.up.disabled = !found.up;
    part.places.replaceChildren(...found.places.map((place) => {
      const chip = make("button", { type: "button", title: place.path }, place.name);
      chip.onclick = () => open(place.path);
      return chip;
    }));
    part.list.replaceChildren(...found.entries.map((entry, at) => make("li",
      { id: `pick-${at}`, role: "option", "data-at": String(at), "aria-selected": "false", className: entry.folder ? "folder" : "file" },
      make("span", {}, entry.name), entry.folder ? null : make("small", {}, size(entry.size)))));
    const empty = part.filter.value ? "Nothing in this folder matches." : wanted.kind === "folder" ? "This folder contains no folders." : "This folder contains no matching files.";
    part.note.textContent = found.more ? `${found.more} more: type a part of the name.` : found.entries.length ? "" : empty;
    if (found.entries.length && (part.filter.value || wanted.kind === "file")) mark(0);
  }

  function size(bytes) {
    for (const [unit, many] of [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) if (bytes >= many) return `${(bytes / many).toFixed(1)} ${unit}`;
    return `${bytes} bytes`;
  }

  /** Open the picker for a text field. kind: "file", "folder", or "new" for a file still to be written. */
  function pick(input, kind = "file", endings = "") {
    if (!dialog) build();
    wanted = { input, kind, endings };
    now = { entries: [], at: -1, separator: "/" };
    part.title.textContent = { file: "Choose a file", folder: "Choose a folder", new: "Where to write the file" }[kind];
    part.take.textContent = { file: "Choose", folder: "Choose this folder", new: "Use this name" }[kind];
    part.name.hidden = kind !== "new";
    part.name.value = kind === "new" ? input.value.split(/[\\/]/).pop() : "";
    part.note.textContent = "";
    part.list.replaceChildren();
    dialog.showModal();
    part.filter.focus();
    open(input.value.trim());
  }

  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.("button.pick");
    if (!button) return;
    const { beside } = button.dataset;
    const input = beside ? button.closest(".row").querySelector(beside) : button.parentElement.querySelector("input:not([type]), input[type=text], textarea");
    if (input) pick(input, button.dataset.pick, button.dataset.endings);
  });
  return pick;
})();
