// Try several values: add a training for each value of one setting to the queue.
import { say } from "../i18n/sentences.js";
import { translated } from "../i18n/words.js";
import { find, isField, make, makeButton, withAllowButton } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { sentOf, tell } from "./messages.js";

/**
 * @param {string} tab
 * @param {HTMLElement} box of the field whose values are tried
 */
export function several(tab, box) {
  const field = find(box, "[data-option]");
  if (!isField(field)) return;
  const label = find(box, "label").textContent.trim(), now = field.value.trim();
  const values = make("input", {
    "aria-label": say("Values of {label}", { label }), spellcheck: false, autocomplete: "off",
    placeholder: examples(now),
  });
  const answer = make("p", { role: "alert" });
  const go = makeButton(
    "Add them to the queue",
    async () => {
      go.disabled = true;
      answer.replaceChildren(translated("Checking the settings"));
      try {
        const { said: sentence, notes } = await ask("several", {
          tab, sent: sentOf(tab), option: field.dataset.option, values: values.value,
        });
        const lines = [sentence, .../** @type {string[]} */ (notes)];
        tell(tab, "good", ...lines.map((line) => make("p", {}, line)));
      } catch (error) {
        answer.replaceChildren(
          ...messageOf(error)
            .split("\n")
            .flatMap((line) => [make("span", {}, ...withAllowButton(line)), make("br")]));
        go.disabled = false;
      }
    },
    { className: "go" });
  values.addEventListener("keydown", (event) => {
    if (event.key === "Enter") go.click();
  });
  const about = make("p", {},
    make("b", {}, say("Several values of {label}", { label: translated(label) })),
    " ",
    make("span", {}, "Separated by blanks. Each value becomes a training in the queue, named after it."));
  tell(
    tab,
    "plain",
    about,
    make("div", { className: "sides" }, make("div", { className: "side" }, values), go),
    answer);
  values.focus({ preventScroll: true }); // it is in the bottom bar, which is always visible
}

/**
 * Half the value, the value and its double, as an example.
 * @param {string} value
 */
function examples(value) {
  const number = Number(value);
  if (!value || !Number.isFinite(number) || number <= 0) return "1 2 4";
  return [number / 2, number, number * 2]
    .map((example) => (example < 0.01 ? example.toExponential().replace("e-0", "e-") : String(example)))
    .join(" ");
}
