"use strict";
// Search over all settings of a form: by label, by the option's own name or flag, by what kohya_ss calls it, by its help
// and its choices. Where nothing has all of it, what is nearest is shown, letters that are missing or swapped included.
(() => {
  const kohya = window.kohya;
  const MOST = 12, ENOUGH = 0.6; // of the letters that were typed
  const ROOM = 160; // pixels that some of what was found needs above the buttons at the bottom
  // What people who come from other pages look for.
  const KNOWN_AS = {
    network_dim: "dimension", network_args: "lycoris extra arguments", network_module: "lycoris locon loha lokr dora adapter type",
    resolution: "max size", lr_warmup_steps: "lr percent of total", sdpa: "crossattention", xformers: "crossattention",
    flip_aug: "augmentation", color_aug: "augmentation", optimizer_args: "extra", lr_scheduler_args: "extra",
    optimizer_type: "optimizer", text_encoder_lr: "t5xxl clip", learning_rate: "lr", unet_lr: "lr",
    compile: "dynamo", compile_backend: "dynamo", compile_mode: "dynamo", num_processes: "multi gpu",
    blocks_to_swap: "vram low memory offload", gradient_checkpointing: "vram low", fp8_base: "vram low",
    train_data_dir: "dataset pictures", reg_data_dir: "images", pretrained_model_name_or_path: "checkpoint",
    max_train_epochs: "epoch", clip_skip: "layer", keep_tokens: "n", logging_dir: "tensorboard", max_data_loader_n_workers: "number of threads",
  };
  let hits = [], at = -1;

  const tokens = (text) => text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];

  const textOf = (field) => {
    const box = field.closest(".field");
    const label = (box.querySelector("label span") ?? box.querySelector("label")).textContent.trim();
    const help = document.getElementById(`${field.id}-help`);
    const name = field.dataset.option ?? field.dataset.launch;
    const section = box.closest(".section")?.querySelector("h3").textContent ?? "";
    const choices = [...(field.options ?? field.list?.options ?? [])].map((one) => one.value).join(" ");
    return { field, label, name, section: `${section} ${choices}`, shown: section, help: `${help?.dataset.help ?? ""} ${help?.textContent ?? ""}` };
  };

  function rank(entry, words) {
    const label = entry.label.toLowerCase(), name = entry.name.toLowerCase();
    const known = `${label} ${name} ${KNOWN_AS[name] ?? ""}`;
    if (!words.every((word) => `${known} ${entry.section} ${entry.help}`.toLowerCase().includes(word))) return 0;
    const whole = words.join(" ");
    if (label === whole || name === words.join("_")) return 5;
    if (label.startsWith(whole) || name.startsWith(words.join("_"))) return 4;
    if (words.every((word) => known.includes(word))) return 3;
    return words.every((word) => `${known} ${entry.section.toLowerCase()}`.includes(word)) ? 2 : 1;
  }

  /** How many letters of the words are in a setting's names or, for less, its help; as a share of all. */
  function nearness(entry, words) {
    const names = tokens(`${entry.label} ${entry.name} ${KNOWN_AS[entry.name] ?? ""}`), help = entry.help.toLowerCase();
    const worth = (word) => {
      if (names.some((one) => one.includes(word))) return 1;
      if (names.some((one) => isNear(word, one))) return 0.9;
      return word.length > 3 && help.includes(word) ? 0.5 : 0;
    };
    const all = words.reduce((sum, word) => sum + word.length, 0);
    const share = words.reduce((sum, word) => sum + word.length * worth(word), 0) / all;
    return share < ENOUGH ? 0 : share;
  }

  /** Whether two words differ by one letter more, less, other or swapped; by two where they are long. */
  function isNear(one, other) {
    const most = one.length < 4 ? 0 : one.length < 7 ? 1 : 2;
    if (!most || Math.abs(one.length - other.length) > most) return false;
    let before = [], last = Array.from({ length: other.length + 1 }, (_, i) => i);
    for (let i = 1; i <= one.length; i++) {
      const row = [i];
      for (let j = 1; j <= other.length; j++) {
        row[j] = Math.min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (one[i - 1] === other[j - 1] ? 0 : 1));
        if (i > 1 && j > 1 && one[i - 1] === other[j - 2] && one[i - 2] === other[j - 1]) row[j] = Math.min(row[j], before[j - 2] + 1);
      }
      [before, last] = [last, row];
    }
    return last[other.length] <= most;
  }

  function look(input) {
    const form = input.form, name = kohya.family(form);
    const words = tokens(input.value);
    const every = words.length ? kohya.fields(form).map(textOf) : [];
    const mine = every.filter((entry) => isShown(entry.field, name));
    hits = best(mine, (entry) => rank(entry, words));
    const others = hits.length ? [] : best(every, (entry) => (mine.includes(entry) || !titles(form, entry.field) ? 0 : rank(entry, words)));
    if (!hits.length) hits = best(mine, (entry) => nearness(entry, words));
    draw(input, words.length > 0, others[0]);
  }

  function best(entries, judge) {
    const found = entries.map((entry) => ({ ...entry, rank: judge(entry) })).filter((entry) => entry.rank);
    const onTop = (entry) => Number(Boolean(entry.field.closest(".basics")));
    return found.sort((a, b) => b.rank - a.rank || onTop(b) - onTop(a) || a.label.length - b.label.length).slice(0, MOST);
  }

  /** Whether a family has this setting and it means something there; else it is on the page, but hidden. */
  const isShown = (field, name) => kohya.isFor(field, name) && [field.closest(".field"), field.closest(".section")]
    .map((box) => [...(box?.classList ?? [])].filter((one) => one.startsWith("only-")))
    .every((only) => !only.length || only.includes(`only-${name}`));

  /** For which families a setting is, by their titles. */
  const titles = (form, field) => field.dataset.families.split(" ").filter((name) => isShown(field, name))
    .map((name) => form.querySelector(`[name=family][value="${name}"] + span`).textContent).join(", ");

  function draw(input, asked, elsewhere) {
    const list = document.getElementById(input.getAttribute("aria-controls"));
    const { make } = window.kohyaAsk;
    at = hits.length ? 0 : -1;
    list.hidden = !asked;
    input.setAttribute("aria-expanded", String(asked));
    list.replaceChildren(...hits.map((hit, number) => make("li",
      { id: `${list.id}-${number}`, role: "option", "data-at": String(number), "aria-selected": String(number === at) },
      make("b", {}, hit.label), make("code", {}, hit.name), make("small", {}, hit.shown))));
    if (elsewhere) list.prepend(make("li", { role: "presentation" }, `Only found for ${titles(input.form, elsewhere.field)}: ${elsewhere.label}`));
    if (asked && !hits.length && !elsewhere) list.append(make("li", { role: "presentation" }, "No setting matches."));
    input.setAttribute("aria-activedescendant", at >= 0 ? `${list.id}-${at}` : "");
    const bar = input.closest(".training").querySelector(".bar").getBoundingClientRect();
    if (asked && list.getBoundingClientRect().top + ROOM > bar.top) input.scrollIntoView({ block: "start" });
  }

  function mark(input, to) {
    const list = document.getElementById(input.getAttribute("aria-controls"));
    const rows = list.querySelectorAll("[role=option]");
    rows[at]?.setAttribute("aria-selected", "false");
    at = (to + hits.length) % hits.length;
    rows[at].setAttribute("aria-selected", "true");
    rows[at].scrollIntoView({ block: "nearest" });
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
  document.addEventListener("focusout", ({ target }) => isSearch(target) && setTimeout(() => document.activeElement !== target && close(target), 150));
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
