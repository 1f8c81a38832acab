"use strict";
// The line above the form: what it began with, why, and what else it can begin with.
(() => {
  const { make, pieces } = window.kohyaAsk;
  const kohya = window.kohya;
  const DEFAULTS = "defaults", BARE = "sd-scripts' defaults";

  document.addEventListener("kohya:settled", ({ detail: where }) => {
    const line = where.querySelector(".start"), name = kohya.family(where);
    const start = kohya.startOf(where, name), suited = kohya.offered(where)[name];
    const shown = `${name} ${start.id} ${start.title}`;
    if (line.dataset.shown === shown) return;
    line.dataset.shown = shown;
    const others = [suited && suited.id !== start.id ? [suited.id, suited.title] : null, start.id !== DEFAULTS ? [DEFAULTS, BARE] : null];
    line.replaceChildren(
      make("span", {}, "Start:"), " ", make("b", {}, make("span", { className: start.id ? "" : "own" }, start.title)), " ",
      make("small", {}, start.id ? (start.why ?? "") : "Marked is what differs from sd-scripts' defaults."),
      ...(start.notes ?? []).map((note) => make("small", {}, note)),
      ...others.filter(Boolean).map(([id, title]) => make("button", { type: "button", "data-preset": id }, make("span", {}, title))),
      start.id && start.id !== DEFAULTS ? make("small", { className: "with" }, pieces(start.text)) : "");
  });
})();
