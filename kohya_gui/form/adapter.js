// The adapter as fields: its type, its arguments and the trained layers. Their values live in the fields of
// network_module and network_args only, which are updated at once and parsed by the server (adapter.py).
import { say } from "../i18n/sentences.js";
import { all, around, find, hit, isBox, isField, make, makeButton, setValue } from "../server/elements.js";
import { ask } from "../server/http.js";
import { noteSubject } from "../server/late.js";
import { sentOf } from "./messages.js";
import * as inputs from "./inputs.js";
import { formAround, tabOf } from "./inputs.js";
import * as form from "./page.js";

/**
 * @typedef {{ id: string, title: string, module: string, fixed: Record<string, string>, start: Record<string, string>,
 *   names: string[], blocks: string[], language: "indices" | "factors" | "joint" }} Kind
 */
/**
 * @typedef {{ name: string, label: string, help: string, type: "switch" | "text", value: string, default: string,
 *   rare: boolean, wrong: string }} Argument
 */
/**
 * @typedef {{ title: string, about: string, arguments: Record<string, string>, names: string[], pressed: boolean }}
 *   Preset
 */
/** @typedef {{ title: string, factors: number[], locked: boolean[] }} Group */
/**
 * @typedef {{ kinds: Kind[], kind: string, about: string, fields: Argument[], presets: Preset[], groups: Group[] }}
 *   Adapter
 */
/** @typedef {{ adapter: Adapter, shape: string, asked: string }} State */

const MODULE = "network_module", ARGUMENTS = "network_args", PAUSE = 300; // milliseconds
/** @type {WeakMap<Element, State>} */
const states = new WeakMap();
/** @type {ReturnType<typeof setTimeout>} */
let timer;

/** @param {Element} box */
const kindOf = (box) => states.get(box)?.adapter.kinds.find(({ id }) => id === states.get(box)?.adapter.kind);

// ---- network_args as text: key=value pairs separated by blanks, quoted if they contain one

const PIECES = /(?:[^\s"']|"[^"]*"|'[^']*')+/g;

/** @param {string} piece */
const nameOf = (piece) => piece.replace(/["']/g, "").split("=")[0];

/** @param {string} pair */
const quoted = (pair) => (/[\s"']/.test(pair) ? pair.split('"').map((part) => part && `"${part}"`).join("'\"'") : pair);

/**
 * Set arguments in the form; null removes one. Others stay unchanged.
 * @param {Element} box
 * @param {Record<string, string | null>} changes
 */
function write(box, changes) {
  const where = formAround(box), field = inputs.fieldOf(where, ARGUMENTS);
  if (!field) return;
  const remaining = { ...changes };
  const unchanged = (field.value.match(PIECES) ?? []).flatMap((piece) => {
    const name = nameOf(piece);
    if (!(name in changes)) return [piece];
    const value = remaining[name] ?? null;
    delete remaining[name];
    return value === null ? [] : [quoted(`${name}=${value}`)];
  });
  const added = Object.entries(remaining)
    .filter(([, value]) => value !== null)
    .map(([name, value]) => quoted(`${name}=${value}`));
  setValue(field, [...unchanged, ...added].join(" "));
  form.settle(where);
}

/**
 * The trained blocks as arguments of a kind: null if all are trained.
 * @param {Kind} kind
 * @param {Group[]} groups
 * @returns {Record<string, string | null>}
 */
function blockArguments(kind, groups) {
  const everywhere = groups.every(({ factors }) => factors.every(Boolean));
  if (kind.language === "joint")
    return { [kind.blocks[0]]: everywhere ? null : groups.map(({ factors }) => ranges(factors)).join("/") };
  return Object.fromEntries(
    kind.blocks.map((name, at) => {
      const { factors } = groups[at];
      if (kind.language === "factors")
        return [name, factors.every((factor) => factor === 1) ? null : factors.join(",")];
      return [name, factors.every(Boolean) ? null : ranges(factors)];
    }));
}

/**
 * The trained blocks as "0-3,5".
 * @param {number[]} factors
 */
function ranges(factors) {
  if (factors.every(Boolean)) return "all";
  /** @type {[number, number][]} */
  const spans = [];
  factors.forEach((factor, at) => {
    const last = spans.at(-1);
    if (!factor) return;
    if (last && last[1] === at - 1) last[1] = at;
    else spans.push([at, at]);
  });
  return spans.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`)).join(",") || "none";
}

// ---- actions

/**
 * Choose another type: with its arguments, those it shares with the old type, and the same blocks.
 * @param {Element} box
 * @param {string} id
 */
function choose(box, id) {
  const state = states.get(box), kind = state?.adapter.kinds.find((candidate) => candidate.id === id);
  const module = inputs.fieldOf(formAround(box), MODULE), field = inputs.fieldOf(formAround(box), ARGUMENTS);
  if (!state || !kind || !module || !field) return;
  const { kinds, groups } = state.adapter, written = (field.value.match(PIECES) ?? []).map(nameOf);
  const argumentNames = new Set(
    kinds.flatMap(({ names, fixed, start }) => [...names, ...Object.keys(fixed), ...Object.keys(start)]));
  const removed = [...argumentNames].filter((name) => !kind.names.includes(name) || name in kind.fixed);
  const initial = Object.entries(kind.start).filter(([name]) => !written.includes(name));
  const { values } = form.held(formAround(box));
  const isSmall = ["fp8_base", "fp8_base_unet", "int8_base", "base_bits"].some((name) => values[name]);
  if (isSmall && kind.names.includes("bypass_mode") && !written.includes("bypass_mode"))
    // otherwise LyCORIS would change the weights, which is impossible in eight or four bits
    initial.push(["bypass_mode", "True"]);
  const blocks = groups.length && kindOf(box)?.language !== kind.language ? blockArguments(kind, groups) : {};
  setValue(module, kind.module);
  write(box, {
    ...Object.fromEntries(removed.map((name) => [name, null])),
    ...kind.fixed,
    ...Object.fromEntries(initial),
    ...blocks,
  });
}

/**
 * @param {Element} box
 * @param {import("../server/elements.js").Field} field of an argument
 */
function change(box, field) {
  const { argument = "", unset = "" } = field.dataset;
  if (isBox(field))
    write(box, { [argument]: String(field.checked) === unset ? null : field.checked ? "True" : "False" });
  else write(box, { [argument]: field.value.trim() || null });
}

/**
 * Train a block or not; with the shift key, all blocks between it and the last one clicked.
 * @param {Element} box
 * @param {number} at group
 * @param {number[]} numbers of blocks
 * @param {boolean} learn
 */
function setBlocks(box, at, numbers, learn) {
  const state = states.get(box), kind = kindOf(box);
  if (!state || !kind) return;
  const { factors, locked } = state.adapter.groups[at];
  for (const number of numbers)
    if (!locked[number] && Boolean(factors[number]) !== learn) factors[number] = learn ? 1 : 0;
  showBlocks(box, state.adapter.groups);
  form.remember(formAround(box));
  const conflicting = kind.names.filter((name) => name === "train_blocks");
  write(box, {
    ...Object.fromEntries(conflicting.map((name) => [name, null])),
    ...blockArguments(kind, state.adapter.groups),
  });
}

// ---- showing

/**
 * @param {Element} box
 * @param {Adapter} adapter
 */
function show(box, adapter) {
  const state = states.get(box) ?? { adapter, shape: "", asked: "" };
  states.set(box, Object.assign(state, { adapter }));
  const { kinds, kind, fields, presets, groups } = adapter;
  const shape = JSON.stringify([
    kinds.map(({ id }) => id),
    kind,
    fields.map(({ name }) => name),
    presets.map(({ title }) => title),
    groups.map(({ factors }) => factors.length),
  ]);
  if (state.shape !== shape) build(box, adapter);
  state.shape = shape;
  find(box, ".field > small").textContent = adapter.about;
  for (const { name, value, wrong, help } of fields) {
    const field = find(box, `[data-argument="${name}"]`);
    const cell = around(field, ".field"), below = find(cell, "small");
    if (isField(field) && field !== document.activeElement) setValue(field, value);
    cell.classList.toggle("wrong", Boolean(wrong));
    if (below.dataset.said !== (wrong || help)) below.textContent = below.dataset.said = wrong || help;
    if (wrong) find(box, ".rare", HTMLDetailsElement).open ||= Boolean(field.closest(".rare"));
  }
  const pressed = presets.find((preset) => preset.pressed);
  all(box, ".choices button").forEach((button, at) => button.setAttribute("aria-pressed", String(presets[at].pressed)));
  find(box, ".chosen").textContent = pressed?.about ?? "Chosen below, or by arguments.";
  showBlocks(box, groups);
  measure(box);
}

/**
 * Build the fields, presets and blocks of a kind.
 * @param {Element} box
 * @param {Adapter} adapter
 */
function build(box, { kinds, kind, fields, presets, groups }) {
  const other = kind ? [] : [make("option", { value: "", selected: true }, "Another one")];
  find(box, ".kinds").replaceChildren(
    ...other,
    ...kinds.map(({ id, title }) => make("option", { value: id, selected: id === kind }, title)));
  const [plain, rare] = [false, true].map((isRare) => fields.filter((field) => field.rare === isRare).map(makeField));
  const [shown, folded] = all(box, ".arguments");
  shown.replaceChildren(...plain);
  folded.replaceChildren(...rare);
  find(box, ".rare").hidden = !rare.length;
  find(box, ".layers").hidden = !kind;
  find(box, ".choices").replaceChildren(
    ...presets.map(({ title, about, names, arguments: values }) =>
      makeButton(title, () => {
        form.remember(formAround(box));
        write(box, { ...Object.fromEntries(names.map((name) => [name, null])), ...values });
      }, { title: about })));
  find(box, ".blocks").replaceChildren(
    ...groups.map(({ title, factors }, at) =>
      make("div", { className: "group", role: "group", "aria-label": title },
        make("div", { className: "head" },
          make("b", {}, title),
          ...[true, false].map((learn) =>
            makeButton(learn ? "All" : "None", () =>
              setBlocks(
                box,
                at,
                factors.map((_, number) => number),
                learn)))),
        make("div", { className: "row", "data-group": at },
          factors.map((_, number) =>
            make("button", { type: "button", "data-block": number, tabIndex: number ? -1 : 0 }, String(number)))))));
}

/** @param {Argument} argument */
function makeField({ name, label, help, type, default: unset }) {
  const id = `adapter-${name}`;
  const facts = { id, "data-argument": name, "data-unset": unset, "aria-describedby": `${id}-help` };
  const below = make("small", { id: `${id}-help`, "data-said": help }, help);
  if (type === "switch")
    return make("div", { className: "field check" },
      make("label", {}, make("input", { ...facts, type: "checkbox" }), make("span", {}, label)),
      below);
  return make("div", { className: "field" },
    make("label", { for: id }, label),
    make("input", { ...facts, spellcheck: false, autocomplete: "off", placeholder: "not set" }),
    below);
}

/**
 * @param {Element} box
 * @param {Group[]} groups
 */
function showBlocks(box, groups) {
  groups.forEach(({ factors, locked }, at) =>
    all(box, `[data-group="${at}"] button`, HTMLButtonElement).forEach((button, number) => {
      button.setAttribute("aria-pressed", String(Boolean(factors[number])));
      button.disabled = locked[number];
      button.classList.toggle("part", ![0, 1].includes(factors[number]));
    }));
}

/**
 * Request the adapter's size once it is visible and nothing has changed for a moment.
 * @param {Element} box
 */
function measure(box) {
  clearTimeout(timer);
  const state = states.get(box), where = formAround(box), tab = tabOf(box);
  const { values, family } = form.held(where),
    optionNames = [
      "network_dim", "network_alpha", MODULE, ARGUMENTS, "network_train_unet_only", "network_train_text_encoder_only",
      "pretrained_model_name_or_path", "save_precision", "mixed_precision",
    ];
  const question = JSON.stringify([family, ...optionNames.map((name) => values[name])]);
  if (
    !state ||
    state.asked === question ||
    !box.checkVisibility({ visibilityProperty: true, contentVisibilityAuto: true }) ||
    box.closest("[hidden]")
  )
    return;
  timer = setTimeout(async () => {
    state.asked = question;
    const isNewest = noteSubject(() => state.asked), line = find(box, ".size");
    line.classList.add("old");
    if (!line.textContent) line.textContent = "Counting …";
    /** @type {{ said: string, blocks?: number[][] }} */
    const size = await ask("adapter_size", { tab, sent: sentOf(tab) }).catch(() => ({ said: "" })); // Check says why
    if (!isNewest()) return;
    line.textContent = size.said;
    if (size.blocks) showLayers(box, size.blocks);
    line.classList.remove("old");
  }, PAUSE);
}

/**
 * Show how many layers of each block are trained, as counted by the server.
 * @param {Element} box
 * @param {number[][]} blocks
 */
function showLayers(box, blocks) {
  const groups = states.get(box)?.adapter.groups ?? [];
  if (blocks.some((counts, at) => counts.length !== groups[at]?.factors.length))
    return void form.settle(formAround(box)); // the model differs from the published one
  blocks.forEach((counts, at) =>
    all(box, `[data-group="${at}"] button`).forEach((button, number) => {
      button.classList.toggle("bare", Boolean(groups[at].factors[number]) && !counts[number]);
      button.title = say(counts[number] === 1 ? "{count} layer learns" : "{count} layers learn", {
        count: counts[number],
      });
    }));
}

// ---- events

/** @type {Element | null} the block that was clicked last, where a range begins */
let first = null;

document.addEventListener("click", (event) => {
  const button = hit(event, ".adapter [data-block]"), line = button?.parentElement;
  if (hit(event, ".fold, .jump")) setTimeout(() => all(document, ".adapter").forEach(measure));
  if (!button || !line) return;
  const numbers = [Number(button.dataset.block)];
  const at = first?.parentElement === line ? Number(/** @type {HTMLElement} */ (first).dataset.block) : numbers[0];
  if (event.shiftKey)
    for (let number = Math.min(at, numbers[0]); number <= Math.max(at, numbers[0]); number++) numbers.push(number);
  first = button;
  setBlocks(
    around(button, ".adapter"),
    Number(line.dataset.group),
    numbers,
    button.getAttribute("aria-pressed") !== "true");
});
document.addEventListener("keydown", (event) => {
  const button = hit(event, ".adapter [data-block]");
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const other = step === 1 ? button?.nextElementSibling : step === -1 ? button?.previousElementSibling : null;
  if (!button || !(other instanceof HTMLElement)) return;
  event.preventDefault();
  [button.tabIndex, other.tabIndex] = [-1, 0];
  other.focus();
});
document.addEventListener("input", ({ target }) => {
  const box = target instanceof Element ? target.closest(".adapter") : null;
  if (!box || !isField(target)) return;
  if (target.classList.contains("kinds")) choose(box, target.value);
  else if (target.dataset.argument) change(box, target);
});
document.addEventListener("kohya:judged", (event) => {
  const { where, adapter } = /** @type {CustomEvent<{ where: HTMLFormElement, adapter: Adapter | null }>} */ (event)
    .detail;
  if (adapter) for (const box of all(where, ".adapter")) show(box, adapter);
});
