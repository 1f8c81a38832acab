"use strict";
// The form in the browser: read it, fill it, fold it, remember it. Everything that decides is on the server.
window.kohya = (() => {
  const form = (tab) => document.getElementById(`${tab}-form`);
  const fields = (where) => [...where.querySelectorAll("[data-option], [data-launch]")];
  const family = (where) => where.elements.family.value;
  const value = (field) => (field.type === "checkbox" ? field.checked : field.value);
  const isFor = (field, name) => field.dataset.families.split(" ").includes(name);

  /** Whether two texts are one value: 1600.0 is 1600, and 0.0001 is 1e-4. */
  const same = (one, other) => one === other || (one.trim() !== "" && other !== "" && Number(one) === Number(other));

  function set(field, to) {
    if (field.type === "checkbox") field.checked = to === true || to === "true";
    else field.value = to;
  }

  // ---- what the form began with: a preset or the defaults, for each family

  const BARE = { id: "defaults", title: "sd-scripts' defaults", why: "", values: {} };
  const starts = {}; // form -> family -> {id, title, why, values}
  const NAMED = "output_name"; // what a start proposes, and leaves alone once it was typed

  /** What the server found to suit this machine, by family. */
  const offered = (where) => JSON.parse(where.dataset.starts || "{}");

  const startOf = (where, name) => starts[where.id]?.[name] ?? BARE;

  /** What a field held when the form began, as text. */
  function first(field, name) {
    const given = startOf(field.form, isFor(field, name) ? name : field.dataset.families.split(" ")[0]).values;
    return String(given[field.dataset.option] ?? field.dataset.default);
  }

  const untouched = (field, name) => same(String(value(field)), first(field, name));

  /** Open the form as it begins: each family's own fields, and the shared ones as the chosen family has them. */
  function open(where) {
    starts[where.id] = offered(where);
    for (const field of fields(where)) set(field, first(field, family(where)));
    where.dataset.family = family(where);
    settle(where);
  }

  /** Choose a family: what nobody has changed becomes what the form begins with for it, and what was typed stays. */
  function turn(where, name) {
    const from = where.dataset.family ?? family(where);
    const radio = [...where.elements.family].find((choice) => choice.value === name);
    if (!radio) return;
    radio.checked = true;
    where.dataset.family = name;
    if (from === name) return;
    const idle = fields(where).filter((field) => isFor(field, from) && isFor(field, name) && untouched(field, from));
    for (const field of idle) set(field, first(field, name));
  }

  /** What the form of a tab holds, for the server. Whoever asks has a new answer coming: what was said before goes. */
  function read(tab, busy = "") {
    const where = form(tab);
    const bar = where.closest(".training")?.querySelector(".bar");
    bar?.querySelector(".told")?.replaceChildren();
    bar?.classList.remove("own", "away");
    for (const field of where.querySelectorAll(".mended")) field.classList.remove("mended");
    if (busy) rest(tab, busy);
    return JSON.stringify(held(where));
  }

  /** Say that something is being worked on, or with no words that it is done. */
  function rest(tab, busy = "") {
    const bar = form(tab).closest(".training").querySelector(".bar");
    if (busy) bar.dataset.busy = `${window.kohyaWords ? window.kohyaWords.of(busy) : busy} …`;
    else delete bar.dataset.busy;
  }

  function held(where) {
    const sent = { family: family(where), values: {}, typed: [], launch: {}, anyway: where.dataset.anyway === images(where) };
    for (const field of fields(where)) {
      if (!isFor(field, sent.family)) continue;
      const { option, launch } = field.dataset;
      if (launch) sent.launch[launch] = value(field);
      else sent.values[option] = value(field);
      if (option && !untouched(field, sent.family)) sent.typed.push(option);
    }
    return sent;
  }

  /** Which images a form names, as one text: whether they may do without captions is asked once for each. */
  function images(where) {
    const named = ["train_data_dir", "dataset_config", "in_json", "caption_extension"];
    const asked = fields(where).filter((field) => isFor(field, family(where)) && named.includes(field.dataset.option));
    return asked.map(value).join("\n");
  }

  /** Put what the server sent into the form of a tab. */
  function fill(tab, sent) {
    if (!sent) return;
    const where = form(tab);
    const { family: name, values, base: theirs, start } = JSON.parse(sent);
    if (theirs) store(`${tab}-base`, JSON.stringify(theirs));
    remember(where);
    const named = fields(where).filter((field) => field.dataset.option === NAMED && untouched(field, family(where)));
    if (name) turn(where, name);
    if (start) starts[where.id] = { ...starts[where.id], [family(where)]: start };
    put(where, values);
    if (!start?.id) return;
    for (const field of named) set(field, first(field, family(where)));
    settle(where);
  }

  function put(where, values) {
    const name = family(where);
    for (const field of fields(where))
      if (isFor(field, name) && field.dataset.option in values) {
        set(field, values[field.dataset.option]);
        field.classList.add("mended");
      }
    settle(where);
  }

  /** Put single values into the form, and show the first of them. */
  function apply(tab, values) {
    const where = form(tab);
    remember(where);
    put(where, values);
    const name = family(where);
    const first = fields(where).find((field) => isFor(field, name) && field.dataset.option in values);
    if (first) jump(first.id);
  }

  // What the form held before something filled it, the newest last. Tokens are in no copy.
  const before = {};

  function remember(where) {
    (before[where.id] ??= []).push(kept(where));
    if (before[where.id].length > 20) before[where.id].shift();
  }

  /** Take back the last filling of the form; false when there is none. */
  function undo(tab) {
    const where = form(tab);
    const last = before[where.id]?.pop();
    if (last) restore(where, last);
    return Boolean(last);
  }

  const kept = (where) => ({
    family: family(where),
    starts: starts[where.id] ?? {},
    kept: fields(where).filter((field) => field.type !== "password").map((field) => [field.id, value(field)]),
  });

  function restore(where, { family: name, kept: values, starts: begun }) {
    starts[where.id] = begun ?? {};
    delete where.dataset.family; // or what follows would be taken for a change of the family
    turn(where, name);
    for (const [id, was] of values) {
      const field = document.getElementById(id);
      if (field) set(field, was);
    }
    settle(where);
  }

  /** After any change: mark what differs from the start, show rare settings that do, remember all of it. */
  function settle(where) {
    const name = family(where);
    for (const section of where.querySelectorAll(".section")) {
      let count = 0;
      for (const field of fields(section)) {
        const differs = mark(field, name);
        if (!differs || !isFor(field, name)) continue;
        count += 1;
        if (field.closest(".advanced")) where.elements.advanced.checked = true;
      }
      section.querySelector("i").textContent = count ? `${count} changed` : "";
    }
    for (const field of fields(where.querySelector(".basics"))) mark(field, name);
    for (const field of where.querySelectorAll("[data-unless]")) demand(field, name);
    store(where.id, JSON.stringify(kept(where)));
    document.dispatchEvent(new CustomEvent("kohya:settled", { detail: where }));
  }

  /** Whether a field differs from what the form began with; where it does it is marked, and a button puts it back. */
  function mark(field, name) {
    const differs = !untouched(field, name);
    const box = field.closest(".field");
    if (box.classList.toggle("changed", differs) === Boolean(box.querySelector(".reset"))) return differs;
    if (!differs) box.querySelector(".reset").remove();
    else {
      const back = document.createElement("button");
      const words = window.kohyaWords?.of("Back to what the form began with") ?? "Back to what the form began with";
      Object.assign(back, { type: "button", className: "reset", title: words });
      back.setAttribute("aria-label", `${words}: ${(box.querySelector("label span") ?? box.querySelector("label")).textContent}`);
      box.querySelector("label").after(back);
    }
    return differs;
  }

  /** Ask for a field only as long as the one that may stand in its place is empty. */
  function demand(field, name) {
    const stands = ({ dataset }) => dataset.option === field.dataset.unless;
    const other = fields(field.form).find((one) => stands(one) && isFor(one, name));
    const wanted = !other?.value.trim();
    field.closest(".field").classList.toggle("required", wanted);
    field.setAttribute("aria-required", wanted);
  }

  function reset(button) {
    const field = button.closest(".field").querySelector("[data-option], [data-launch]");
    set(field, first(field, family(field.form)));
    settle(field.form);
    field.focus();
  }

  function store(key, text) {
    try {
      if (text === undefined) return sessionStorage.getItem(key);
      sessionStorage.setItem(key, text);
    } catch {} // a browser that keeps nothing only forgets the form on reload
    return null;
  }

  /** The file of kohya_ss that was loaded last, with the keys that have no field here. */
  const base = (tab) => store(`${tab}-base`) ?? "{}";

  /** A form has come onto the page: give it back what it held before a reload. */
  function mount(element) {
    const where = element.querySelector("form.settings");
    const before = store(where.id);
    if (before) restore(where, JSON.parse(before));
    else open(where);
  }

  function fold(button, open) {
    const panel = document.getElementById(button.getAttribute("aria-controls"));
    const opening = open ?? button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", opening);
    if (opening) panel.removeAttribute("hidden");
    else panel.setAttribute("hidden", "until-found");
  }

  /** Bring a field into view, wherever it is folded away, and put the cursor there. */
  function jump(id) {
    const field = document.getElementById(id);
    if (!field) return;
    if (field.closest(".advanced")) field.form.elements.advanced.checked = true;
    const section = field.closest(".section");
    if (section) fold(section.querySelector("button"), true);
    field.scrollIntoView({ block: "center" });
    field.focus({ preventScroll: true });
    const box = field.closest(".field");
    box.classList.remove("found");
    void box.offsetWidth; // or an animation that is still running would not begin again
    box.classList.add("found");
  }

  async function copy(button) {
    const text = button.parentElement.querySelector("pre").textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Pages reached over plain HTTP from another computer have no clipboard: select the text instead.
      getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
      return;
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }

  /** Write the config that a printed command reads into its file, and say so in the button's place. */
  async function keep(button) {
    const { path, script } = button.dataset;
    const toml = [...button.closest(".message").querySelectorAll("pre")].at(-1).textContent;
    button.disabled = true;
    try {
      const { said } = await window.kohyaAsk.ask("keep", { path, script, toml });
      button.parentElement.replaceChildren(said);
    } catch (error) {
      button.disabled = false;
      const told = button.parentElement.querySelector("b") ?? button.parentElement.appendChild(document.createElement("b"));
      told.replaceChildren(...window.kohyaAsk.offered(error.message));
    }
  }

  /** Hand a text that the server made to the user as a file. */
  function download(sent) {
    if (!sent) return;
    const { name, text } = JSON.parse(sent);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: name.endsWith(".json") ? "application/json" : "application/toml" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  document.addEventListener("click", ({ target }) => {
    const row = target.closest?.(".fold");
    if (row) fold(row.querySelector("button"));
    const link = target.closest?.(".jump");
    if (link) jump(link.dataset.field);
    const copier = target.closest?.(".copy");
    if (copier) copy(copier);
    const keeper = target.closest?.(".keep");
    if (keeper) keep(keeper);
    const back = target.closest?.(".reset");
    if (back) reset(back);
  });
  document.addEventListener("input", ({ target }) => {
    target.classList.add("mended"); // what the last message said of it is out of date
    if (!target.form?.classList.contains("settings")) return;
    if (target.name === "family") turn(target.form, target.value);
    settle(target.form);
  });
  document.addEventListener("submit", (event) => {
    if (event.target.classList.contains("settings")) event.preventDefault();
  });
  document.addEventListener("beforematch", ({ target }) => {
    const button = document.querySelector(`[aria-controls="${target.id}"]`);
    if (button) fold(button, true);
  }, true);

  return { read, rest, held, base, fill, apply, undo, mount, download, jump, form, fields, isFor, family, turn, offered, startOf, settle, remember, images };
})();
