// Compare: the options that differ between two of these: the form, its start, presets and config files.
import { translated } from "../i18n/words.js";
import { make, makeButton } from "../server/elements.js";
import { ask, messageOf } from "../server/http.js";
import { countRequests } from "../server/late.js";
import { family } from "./inputs.js";
import { sentOf, tell, tellError } from "./messages.js";
import { formOf, startOf } from "./page.js";

/**
 * @typedef {{ first: string, second: string, rows: [string, string, string, string][] }} Comparison each row: name,
 *   label and both values
 */

/**
 * One of the two sides to compare: a choice that the server offers, or a file.
 * @param {string} label
 * @param {[string, string][]} choices text and key of each
 * @param {number} chosen
 */
function makeSide(label, choices, chosen) {
  const list = make("select", { "aria-label": translated(label) },
    choices.map(([text, key], at) => make("option", { value: key, selected: at === chosen }, text)));
  list.append(make("option", { value: "" }, "A file"));
  const path = make("input", {
    placeholder: "~/kohya/cat.toml", hidden: true, "aria-label": translated("Config file"), spellcheck: false,
  });
  const browse = make("button", {
    type: "button", className: "pick", hidden: true, "data-pick": "file", "data-endings": ".toml .json .yaml .yml",
    "aria-label": translated("Browse"), title: translated("Browse"),
  });
  list.addEventListener("change", () => (path.hidden = browse.hidden = list.value !== ""));
  return { box: make("div", { className: "side" }, list, path, browse), value: () => list.value || path.value || " " };
}

/**
 * The likely choice to compare the form with: the newest run, or else the preset that it started from.
 * @param {string} tab
 * @param {[string, string][]} choices
 */
function counterpart(tab, choices) {
  const where = formOf(tab), start = startOf(where, family(where)).id;
  const preset = choices.findIndex(([, key]) => key === `preset:${start}`);
  return preset > 0 && !choices[1]?.[1].startsWith("run:") ? preset : Math.min(1, choices.length - 1);
}

const beginOpening = countRequests(), beginComparison = countRequests();

/** @param {string} tab */
export async function compare(tab) {
  const isNewest = beginOpening();
  try {
    const { choices } = await ask("choices", { tab });
    if (!isNewest()) return;
    const first = makeSide("Compare this", choices, 0);
    const second = makeSide("with that", choices, counterpart(tab, choices));
    const answer = make("div", { className: "differences" });
    const go = makeButton(
      "Compare",
      async () => {
        const isLast = beginComparison(), sides = { first: first.value(), second: second.value() };
        try {
          const differences = await ask("compare", { tab, sent: sentOf(tab), ...sides });
          if (isLast()) answer.replaceChildren(table(differences));
        } catch (error) {
          if (!isLast()) return;
          answer.replaceChildren(...messageOf(error).split("\n").map((line) => make("p", {}, line)));
        }
      },
      { className: "go" });
    tell(tab, "plain", make("div", { className: "sides" }, first.box, second.box, go), answer);
  } catch (error) {
    if (isNewest()) tellError(tab, error);
  }
}

const WORDS = new Set(["On", "Off", "not set"]); // of compare.py; other values stay as they are in every language

/**
 * The cell of a setting's value.
 * @param {string} value
 * @param {string} [kind]
 */
export const valueCell = (value, kind = "") =>
  make("td", { className: WORDS.has(value) ? `word ${kind}` : kind }, value);

/** @param {Comparison} comparison */
export function table({ first, second, rows }) {
  if (!rows.length) return make("p", {}, "No option differs.");
  const head = make("tr", {}, ["Option", first, second].map((text) => make("th", {}, text)));
  const body = rows.map(([name, label, firstValue, secondValue]) =>
    make("tr", {},
      make("td", { className: "word" }, make("b", {}, label), " ", make("code", {}, name)),
      valueCell(firstValue),
      valueCell(secondValue)));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, body));
}
