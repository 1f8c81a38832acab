"use strict";
// Search over all settings of a form: by label, by the option's own name, by its help. Enter goes to the field.
(() => {
  const kohya = window.kohya;
  const MOST = 12;
  let hits = [], at = -1;

  const textOf = (field) => {
    const box = field.closest(".field");
    const label = (box.querySelector("label span") ?? box.querySelector("label")).textContent.trim();
    const help = document.getElementById(`${field.id}-help`);
    const name = field.dataset.option ?? field.dataset.launch;
    const section = box.closest(".section")?.querySelector("h3").textContent ?? "";
    return { field, label, name, section, help: help ? `${help.dataset.help ?? ""} ${help.textContent}` : "" };
  };

  function rank(entry, words) {
    const label = entry.label.toLowerCase(), name = entry.name.toLowerCase();
    const all = `${label} ${name} ${name.replaceAll("_", " ")} ${entry.section} ${entry.help}`.toLowerCase();
    if (!words.every((word) => all.includes(word))) return 0;
    const whole = words.join(" ");
    if (label.startsWith(whole) || name.startsWith(words.join("_"))) return 4;
    if (words.every((word) => label.includes(word) || name.includes(word))) return 3;
    return words.every((word) => `${label} ${name} ${entry.section.toLowerCase()}`.includes(word)) ? 2 : 1;
  }

  function look(input) {
    const form = input.form;
    const words = input.value.toLowerCase().split(/[\s_]+/).filter(Boolean);
    const name = kohya.family(form);
    const found = words.length ? kohya.fields(form).filter((field) => kohya.isFor(field, name)).map(textOf) : [];
    hits = found.map((entry) => ({ ...entry, rank: rank(entry, words) })).filter((entry) => entry.rank);
    hits.sort((a, b) => b.rank - a.rank || a.label.length - b.label.length);
    hits = hits.slice(0, MOST);
    draw(input, words.length > 0);
  }

  function draw(input, asked) {
    const list = document.getElementById(input.getAttribute("aria-controls"));
    const { make } = window.kohyaAsk;
    at = hits.length ? 0 : -1;
    list.hidden = !asked;
    input.setAttribute("aria-expanded", String(asked));
    list.replaceChildren(...hits.map((hit, number) => make("li",
      { id: `${list.id}-${number}`, role: "option", "data-at": String(number), "aria-selected": String(number === at) },
      make("b", {}, hit.label), make("code", {}, hit.name), make("small", {}, hit.section))));
    if (asked && !hits.length) list.append(make("li", { role: "presentation" }, "No setting has that in its name or help."));
    input.setAttribute("aria-activedescendant", at >= 0 ? `${list.id}-${at}` : "");
  }

  function mark(input, to) {
    const list = document.getElementById(input.getAttribute("aria-controls"));
    list.children[at]?.setAttribute("aria-selected", "false");
    at = (to + hits.length) % hits.length;
    list.children[at].setAttribute("aria-selected", "true");
    list.children[at].scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", `${list.id}-${at}`);
  }

  function take(input, number) {
    const hit = hits[number];
    close(input);
    input.value = "";
    if (hit) kohya.jump(hit.field.id);
  }

  function close(input) {
    hits = [];
    document.getElementById(input.getAttribute("aria-controls")).hidden = true;
    input.setAttribute("aria-expanded", "false");
  }

  const isSearch = (target) => target.matches?.(".search input");
  document.addEventListener("input", ({ target }) => isSearch(target) && look(target));
  document.addEventListener("focusout", ({ target }) => isSearch(target) && setTimeout(() => close(target), 150));
  document.addEventListener("keydown", (event) => {
    const { target, key } = event;
    if (isSearch(target)) {
      if (key === "ArrowDown" && hits.length) mark(target, at + 1);
      else if (key === "ArrowUp" && hits.length) mark(target, at - 1);
      else if (key === "Enter") take(target, at);
      else if (key === "Escape") close(target);
      else return;
      event.preventDefault();
    } else if (key === "/" && !event.ctrlKey && !event.metaKey && !target.closest?.("input, textarea, select, [contenteditable]")) {
      const input = [...document.querySelectorAll(".search input")].find((one) => one.checkVisibility());
      if (input) {
        event.preventDefault();
        input.focus();
      }
    }
  });
  document.addEventListener("pointerdown", (event) => {
    const row = event.target.closest?.(".search li[data-at]");
    if (!row) return;
    event.preventDefault();
    take(row.closest(".search").querySelector("input"), Number(row.dataset.at));
  });
})();
