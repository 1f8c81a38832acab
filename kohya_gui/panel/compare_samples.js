// A dialog that shows two samples of a prompt, one over the other.
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { all, find, hit, make } from "../server/elements.js";

/**
 * @typedef {HTMLDialogElement & { row?: { title: string, large: string }[] }} Comparison with the samples of the
 *   current row
 */

/** @type {Comparison | undefined} */
let dialog;

/** @param {HTMLElement} sample */
function compare(sample) {
  const row = sample.parentElement ? all(sample.parentElement, ".sample") : [];
  const place = row.indexOf(sample);
  dialog ??= build();
  const titleOf = (/** @type {string} */ step) =>
    translated(Number(step) ? say("Step {step}", { step }) : "Base model");
  const samples = row.map(({ dataset, title }) => ({
    title: [dataset.title ?? titleOf(dataset.step ?? ""), title].filter(Boolean).join(", "),
    large: dataset.large ?? "",
  }));
  dialog.row = samples;
  find(dialog, "p").textContent = sample.dataset.prompt ?? "";
  const [first, second] = dialog.querySelectorAll("select");
  for (const choice of [first, second])
    choice.replaceChildren(...samples.map(({ title }, i) => make("option", { value: String(i) }, title)));
  second.value = String(place);
  first.value = String(Math.min(place + 1, row.length - 1)); // the previous sample, as the newest comes first
  dialog.classList.toggle("single", row.length < 2);
  render(dialog);
  dialog.showModal();
}

function build() {
  /** @type {Comparison} */
  const comparison = make("dialog", { className: "compare", "aria-label": translated("Compare samples") },
    make("header", {},
      make("p"),
      make("button", { type: "button", className: "close", "aria-label": translated("Close") }, "✕")),
    make("div", { className: "pair" }, make("img", { alt: "" }), make("img", { alt: "" })),
    make("div", { className: "between" },
      make("select", { "aria-label": translated("Left") }),
      make("input", {
        type: "range", min: 0, max: 100, value: 50, "aria-label": translated("Where the left one ends"),
      }),
      make("select", { "aria-label": translated("Right") })));
  comparison.addEventListener("input", () => render(comparison));
  comparison.addEventListener("click", (event) => {
    if (event.target === comparison || hit(event, ".close")) comparison.close();
  });
  document.body.append(comparison);
  return comparison;
}

/** @param {Comparison} dialog */
function render(dialog) {
  const [first, second] = all(dialog, "select", HTMLSelectElement).map((choice) => dialog.row?.[Number(choice.value)]);
  // The left sample lies over the right one.
  for (const [i, image] of all(dialog, ".pair img", HTMLImageElement).entries()) {
    const sample = i ? first : second;
    if (!sample) continue;
    if (image.getAttribute("src") !== sample.large) image.src = sample.large;
    image.alt = sample.title;
  }
  find(dialog, ".pair").style.setProperty("--at", `${find(dialog, "input", HTMLInputElement).value}%`);
}

document.addEventListener("click", (event) => {
  const sample = hit(event, ".sample");
  if (sample) compare(sample);
});
// An original that the page may not read, or that is gone, leaves no broken image. Errors of images do not bubble.
document.addEventListener("error", ({ target }) => {
  if (target instanceof HTMLImageElement) target.closest(".sample.original")?.remove();
}, true);
