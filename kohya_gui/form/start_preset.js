// The line above the form: its start, the reason, and alternatives.
import { remember } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { all, around, find, make, makeButton } from "../server/elements.js";
import { family } from "./inputs.js";
import { bare, onSettled, startOf, suited } from "./page.js";

onSettled((where) => {
  const line = find(where, ".start"), name = family(where);
  if (where.dataset.texts) remember(JSON.parse(where.dataset.texts)); // the sentences of its start
  delete where.dataset.texts;
  const start = startOf(where, name);
  remember(start.texts ?? []);
  const best = suited(where)[name], defaults = bare(where, name);
  const shown = JSON.stringify([name, start.id, start.title, start.text, start.notes]);
  if (line.dataset.shown === shown) return;
  line.dataset.shown = shown;
  // Of dozens of presets, show those of the chosen family.
  const sheet = find(around(where, ".training"), ".sheet");
  all(sheet, "section").filter((group) => group.dataset.family === name)
    .forEach((group) => find(sheet, "header").after(group));
  const alternatives = [best, defaults].filter((other) => other && other.id !== start.id);
  line.replaceChildren(
    make("span", {}, "Starting point:"),
    " ",
    make("b", {}, make("span", { className: start.id ? "" : "own" }, start.title)),
    more(where),
    " ",
    make("small", {}, start.id ? (start.why ?? "") : "What differs from the defaults is marked."),
    ...(start.notes ?? []).map((note) => make("small", {}, note)),
    ...alternatives.map(({ id, title }) =>
      make("button", { type: "button", "data-preset": id }, make("span", {}, title))),
    start.id && start.id !== defaults.id
      ? make("small", { className: "with" }, make("span", {}, start.text ?? "")) : "");
});

/**
 * The button that unfolds the reasons on a phone.
 * @param {HTMLElement} where
 */
function more(where) {
  const isOpen = () => where.classList.contains("told-start");
  const button = makeButton("", () => {
    where.classList.toggle("told-start");
    button.setAttribute("aria-expanded", String(isOpen()));
  }, { className: "why", "aria-expanded": isOpen(), "aria-label": translated("What the form started from") });
  return button;
}
