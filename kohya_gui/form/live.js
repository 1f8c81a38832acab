"use strict";
// Around the form: what is wrong or idle while one types, presets, undo, fixes, comparing, probing.
window.kohyaDesk = (() => {
  const { ask, make, pieces, wait } = window.kohyaAsk;
  const kohya = window.kohya;
  const tabOf = (element) => element.closest(".training")?.querySelector("form.settings").id.replace(/-form$/, "");
  const say = (text) => window.kohyaWords?.of(text) ?? text;
  const sent = (tab) => JSON.stringify(kohya.held(kohya.form(tab)));

  /** Say something beside the buttons, in the place of what the server said last. */
  function tell(tab, kind, ...parts) {
    const bar = kohya.form(tab).closest(".training").querySelector(".bar");
    let where = bar.querySelector(".told");
    if (!where) bar.prepend((where = make("div", { className: "told" })));
    bar.classList.toggle("own", parts.length > 0);
    bar.classList.remove("away");
    where.replaceChildren(...(parts.length ? [make("div", { className: `message ${kind}`, role: kind === "bad" ? "alert" : "status" }, ...parts, away())] : []));
    return where;
  }

  const away = () => make("button", { type: "button", className: "away", "aria-label": "Close" }, "✕");

  const failed = (tab, error) => tell(tab, "bad", ...error.message.split("\n").map((line) => make("p", {}, ...window.kohyaAsk.offered(line))));

  // ---- while one types

  const timers = {}, newest = {};

  document.addEventListener("kohya:settled", ({ detail: where }) => {
    const tab = where.id.replace(/-form$/, "");
    clearTimeout(timers[tab]);
    timers[tab] = setTimeout(() => judge(tab), 250);
  });

  async function judge(tab) {
    const mine = (newest[tab] = (newest[tab] ?? 0) + 1);
    try {
      const found = await ask("judge", { tab, sent: sent(tab) });
      if (mine === newest[tab]) show(tab, found);
    } catch {} // the server's absence is said by whatever the user asks for next
  }

  function show(tab, found) {
    const where = kohya.form(tab);
    const name = kohya.family(where);
    for (const field of kohya.fields(where)) {
      if (!kohya.isFor(field, name)) continue;
      const wrong = found.wrong[field.id] ?? "", idle = found.idle[field.id] ?? "";
      const model = found.model.path === field.value && field.dataset.option === "pretrained_model_name_or_path" ? found.model : null;
      explain(field, wrong || (model && `The file is ${model.words}.`), !wrong && idle ? `No effect: ${idle}` : "");
      field.closest(".field").classList.toggle("wrong", Boolean(wrong));
      field.closest(".field").classList.toggle("idle", Boolean(idle) && !wrong);
      if (wrong) field.setAttribute("aria-invalid", "true");
      else field.removeAttribute("aria-invalid");
      if (field.type === "password") keep(field, found.kept.includes(field.id));
    }
    for (const card of where.querySelectorAll(".profile"))
      card.setAttribute("aria-pressed", String(card.dataset.preset === found.profile));
    const outlook = where.querySelector(".outlook");
    if (outlook && outlook.textContent !== found.outlook) outlook.textContent = found.outlook;
    recognise(tab, where, found.model);
  }

  /** Below a field: its help, or what is to be said `instead` of it, and then why it does nothing at the moment. */
  function explain(field, instead, idle) {
    const help = document.getElementById(`${field.id}-help`);
    help.dataset.help ??= window.kohyaWords.said(help);
    const text = instead || help.dataset.help, now = `${text}\n${idle}`;
    if ((help.dataset.now ?? `${help.dataset.help}\n`) === now) return;
    help.dataset.now = now;
    help.replaceChildren(text, ...(idle ? [make("em", {}, idle)] : []));
  }

  /** What the running job has compiled, while someone looks at these settings. */
  setInterval(async () => {
    const panel = [...document.querySelectorAll(".compiling .ledger")].find((line) => line.parentElement.checkVisibility());
    const works = document.querySelector(".run:is([data-state=starting], [data-state=running], [data-state=stopping])");
    if (!panel || (!works && panel.hidden) || panel.parentElement.closest("[hidden]")) return;
    try {
      const { text } = works ? await ask("ledger") : { text: "" };
      if (panel.textContent !== text) panel.textContent = text;
      panel.hidden = !text;
    } catch {} // it asks again
  }, 3000);

  /** The family of a checkpoint is in its header: choose it, once for each file. */
  function recognise(tab, where, model) {
    if (!model.path || where.dataset.seen === model.path) return;
    where.dataset.seen = model.path;
    if (!model.family || model.family === kohya.family(where)) return;
    const values = kohya.held(where).values;
    kohya.remember(where);
    kohya.turn(where, model.family);
    for (const field of kohya.fields(where))
      if (field.dataset.option === "pretrained_model_name_or_path" && kohya.isFor(field, model.family))
        field.value = values.pretrained_model_name_or_path;
    kohya.settle(where);
  }

  function keep(field, isKept) {
    const box = field.closest(".field");
    field.placeholder = isKept ? say("Kept; type to replace it") : "";
    const button = box.querySelector(".forget");
    if (isKept && !button) box.append(make("button", { type: "button", className: "forget" }, say("Delete the stored key")));
    if (!isKept) button?.remove();
  }

  // ---- presets, undo, fixes

  async function preset(tab, id) {
    try {
      const found = await ask("preset", { tab, sent: sent(tab), id });
      kohya.fill(tab, found.fill);
      const rest = found.profile ? "All else is kept." : "Paths and names are kept, all else is as in the preset.";
      tell(tab, "good", make("p", {}, make("b", {}, found.title), " ", make("span", {}, found.profile ? found.text : pieces(found.text)), " ", make("span", {}, rest)), ...(found.notes ?? []).map((note) => make("p", {}, note)), back());
    } catch (error) {
      failed(tab, error);
    }
  }

  const back = () => make("button", { type: "button", className: "undo" }, "Undo");

  function undo(tab) {
    const done = kohya.undo(tab);
    tell(tab, "plain", make("p", {}, done ? "The form is as it was before." : "There is nothing to undo."));
  }

  function fix(button) {
    kohya.apply(tabOf(button), JSON.parse(button.dataset.fix));
    button.disabled = true;
    button.classList.add("done");
  }

  /** Images without captions are meant: press the button again that asked. */
  function anyway(button) {
    const tab = tabOf(button), where = kohya.form(tab);
    where.dataset.anyway = kohya.images(where);
    button.closest(".bar").querySelector(`button.${button.dataset.again}`).click();
  }

  /** Show the images of a tab's form where captions are written. */
  async function write(tab) {
    const tabs = [...document.querySelectorAll('button[role="tab"]')];
    tabs.find((one) => ["Data set", say("Data set")].includes(one.textContent.trim()))?.click();
    for (let i = 0; i < 100 && !document.querySelector(".images")?.checkVisibility(); i++) await wait(50);
    const list = document.getElementById("images-tab");
    list.value = tab;
    list.dispatchEvent(new Event("change", { bubbles: true }));
    document.querySelector(".images [data-do=take]").click();
  }

  async function forget(button) {
    const field = button.closest(".field").querySelector("[data-option]");
    await ask("forget", { name: field.dataset.option });
    judge(tabOf(button));
  }

  /** Ask where to, and save there: the path field holds the answer, and Save config does the rest. */
  function saveAs(training) {
    const path = training.querySelector(".path textarea, .path input");
    const save = [...training.querySelectorAll(".begin button")].find((button) => button.classList.contains("save"));
    const chosen = () => setTimeout(() => save.click(), 50);
    path.addEventListener("change", chosen, { once: true });
    window.kohyaPick(path, "new", ".toml");
    // Whoever closes the picker has chosen nothing, and later changes of the path are no answer.
    document.querySelector("dialog.picker").addEventListener("close", () => path.removeEventListener("change", chosen), { once: true });
  }

  // ---- comparing

  async function compare(tab) {
    try {
      const { choices } = await ask("choices", { tab });
      const side = (label, chosen) => {
        const list = make("select", { "aria-label": say(label) }, choices.map(([text, key], at) => make("option", { value: key, selected: at === chosen }, text)));
        list.append(make("option", { value: "" }, "A file"));
        const path = make("input", { placeholder: "~/kohya/cat.toml", hidden: true, "aria-label": say("Config file"), spellcheck: false });
        const browse = make("button", { type: "button", className: "pick", hidden: true, "data-pick": "file", "data-endings": ".toml .json .yaml .yml", "aria-label": say("Browse"), title: say("Browse") });
        list.onchange = () => (path.hidden = browse.hidden = list.value !== "");
        return { box: make("div", { className: "side" }, list, path, browse), value: () => list.value || path.value || " " };
      };
      const sides = [side("Compare this", 0), side("with that", Math.min(1, choices.length - 1))];
      const answer = make("div", { className: "differences" });
      const go = make("button", { type: "button", className: "go" }, "Compare");
      go.onclick = async () => {
        try {
          table(answer, await ask("compare", { tab, sent: sent(tab), first: sides[0].value(), second: sides[1].value() }));
        } catch (error) {
          answer.replaceChildren(...error.message.split("\n").map((line) => make("p", {}, line)));
        }
      };
      tell(tab, "plain", make("div", { className: "sides" }, sides[0].box, sides[1].box, go, close(tab)), answer);
    } catch (error) {
      failed(tab, error);
    }
  }

  function close(tab) {
    const button = make("button", { type: "button", className: "close" }, "Close");
    button.onclick = () => tell(tab, "plain");
    return button;
  }

  function table(where, found) {
    if (!found.rows.length) return where.replaceChildren(make("p", {}, "No option differs."));
    const head = make("tr", {}, ["Option", found.first, found.second].map((text) => make("th", {}, text)));
    const rows = found.rows.map(([name, label, one, two]) =>
      make("tr", {}, make("td", {}, make("b", {}, label), " ", make("code", {}, name)), make("td", {}, one), make("td", {}, two)));
    where.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, rows)));
  }

  // ---- probing

  async function probe(tab) {
    try {
      const { id } = await ask("probe", { tab, sent: sent(tab) });
      const line = make("p", {}), list = make("ul", {}), end = make("button", { type: "button", className: "close" }, "Stop");
      let stopped = false;
      end.onclick = () => {
        stopped = true;
        ask("unprobe", { id }).catch(() => {});
        tell(tab, "plain", make("p", {}, "The probe was stopped."));
      };
      tell(tab, "plain", make("b", {}, "Probing"), line, list, end);
      for (let found; !stopped; await wait(1000)) {
        found = await ask("probing", { tab, sent: sent(tab), id });
        if (stopped) return;
        line.textContent = found.doing;
        list.replaceChildren(...found.tries.map((one) => make("li", {}, one.text)));
        if (found.state !== "running") return probed(tab, found, list);
      }
    } catch (error) {
      failed(tab, error);
    }
  }

  function probed(tab, found, list) {
    if (found.state === "failed") return failed(tab, new Error(found.text));
    const more = Object.keys(found.fix).length
      ? make("button", { type: "button", className: "fix", "data-fix": JSON.stringify(found.fix) }, make("span", {}, "Put it into the form"))
      : null;
    tell(tab, found.best ? "good" : "bad", make("p", {}, found.text), list, more, close(tab));
  }

  document.addEventListener("click", ({ target }) => {
    const on = (selector) => target.closest?.(selector);
    let button;
    if ((button = on("[data-preset]"))) {
      const sheet = button.closest(".sheet");
      sheet?.hidePopover();
      preset(sheet?.dataset.tab ?? tabOf(button), button.dataset.preset);
    } else if ((button = on(".undo"))) undo(button.dataset.tab ?? tabOf(button));
    else if ((button = on(".message > .away"))) button.closest(".bar")?.classList.add("away");
    else if ((button = on(".message .anyway"))) anyway(button);
    else if ((button = on(".message .captions"))) write(tabOf(button));
    else if ((button = on(".fix"))) fix(button);
    else if ((button = on(".forget"))) forget(button);
    else if ((button = on(".compare"))) compare(button.dataset.tab);
    else if ((button = on(".saveas"))) saveAs(button.closest(".training"));
    else if ((button = on("button.probe"))) probe(tabOf(button));
    else if ((button = on(".extra"))) {
      const open = button.closest(".training").classList.toggle("more-open");
      button.setAttribute("aria-expanded", String(open));
    }
  });
  return { tell, judge };
})();
