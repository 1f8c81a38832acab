"use strict";
// The form in the browser: read it, fill it, fold it, remember it. Everything that decides is on the server.
window.kohya = (() => {
  const form = (tab) => document.getElementById(`${tab}-form`);
  const fields = (where) => [...where.querySelectorAll("[data-option], [data-launch]")];
  const family = (where) => where.elements.family.value;
  const value = (field) => (field.type === "checkbox" ? field.checked : field.value);
  const isFor = (field, name) => field.dataset.families.split(" ").includes(name);

  function set(field, to) {
    if (field.type === "checkbox") field.checked = to === true || to === "true";
    else field.value = to;
  }

  function chooseFamily(where, name) {
    const radio = [...where.elements.family].find((choice) => choice.value === name);
    if (radio) radio.checked = true;
  }

  /** What the form of a tab holds, for the server. */
  function read(tab) {
    const where = form(tab);
    const sent = { family: family(where), values: {}, launch: {} };
    for (const field of fields(where)) {
      if (!isFor(field, sent.family)) continue;
      const { option, launch } = field.dataset;
      if (launch) sent.launch[launch] = value(field);
      else sent.values[option] = value(field);
    }
    return JSON.stringify(sent);
  }

  /** Put what the server sent into the form of a tab. */
  function fill(tab, sent) {
    if (!sent) return;
    const where = form(tab);
    const { family: name, values } = JSON.parse(sent);
    chooseFamily(where, name);
    for (const field of fields(where))
      if (isFor(field, name) && field.dataset.option in values) set(field, values[field.dataset.option]);
    settle(where);
  }

  /** After any change: mark what differs from the defaults, show rare settings that do, remember all of it. */
  function settle(where) {
    const name = family(where);
    for (const section of where.querySelectorAll(".section")) {
      let count = 0;
      for (const field of fields(section)) {
        const differs = String(value(field)) !== field.dataset.default;
        field.closest(".field").classList.toggle("changed", differs);
        if (!differs || !isFor(field, name)) continue;
        count += 1;
        if (field.closest(".advanced")) where.elements.advanced.checked = true;
      }
      section.querySelector("i").textContent = count ? `${count} changed` : "";
    }
    const kept = fields(where).filter((field) => field.type !== "password").map((field) => [field.id, value(field)]);
    store(where.id, JSON.stringify({ family: name, kept }));
  }

  function store(key, text) {
    try {
      if (text === undefined) return sessionStorage.getItem(key);
      sessionStorage.setItem(key, text);
    } catch {} // a browser that keeps nothing only forgets the form on reload
    return null;
  }

  /** A form has come onto the page: give it back what it held before a reload. */
  function mount(element) {
    const where = element.querySelector("form.settings");
    const before = store(where.id);
    if (before) {
      const { family: name, kept } = JSON.parse(before);
      chooseFamily(where, name);
      for (const [id, held] of kept) {
        const field = document.getElementById(id);
        if (field) set(field, held);
      }
    }
    settle(where);
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

  /** Hand a text that the server made to the user as a file. */
  function download(sent) {
    const { name, text } = JSON.parse(sent);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/toml" }));
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
  });
  document.addEventListener("input", ({ target }) => {
    if (target.form?.classList.contains("settings")) settle(target.form);
  });
  document.addEventListener("submit", (event) => {
    if (event.target.classList.contains("settings")) event.preventDefault();
  });
  document.addEventListener("beforematch", ({ target }) => {
    const button = document.querySelector(`[aria-controls="${target.id}"]`);
    if (button) fold(button, true);
  }, true);

  return { read, fill, mount, download };
})();
