"use strict";
// The Compile Lab tab: starts measurements, and draws what the server says of them.
window.kohyaLab = (() => {
  const { ask, make, say, wait } = window.kohyaAsk;
  const words = (text) => window.kohyaWords?.of(text) ?? text;
  const PERIOD = 1200, RESTING = 6000;
  let place, shown = "", looked = 0, busy = false, wanted = "", tabs = [], target = "";

  const part = (selector) => place.querySelector(selector);
  const visible = () => place?.isConnected && document.visibilityState === "visible" && place.checkVisibility();

  function mount(element) {
    place = element.querySelector(".lab");
    shown = "";
    part("form").addEventListener("submit", (event) => event.preventDefault());
    for (const button of place.querySelectorAll("[data-lab]")) button.addEventListener("click", () => start(button.dataset.lab));
    part("#lab-job").addEventListener("change", ({ target }) => { wanted = target.value; look(); });
    part("#lab-model").addEventListener("change", settle);
    settle();
    look();
  }

  setInterval(() => { if (visible() && Date.now() - looked >= (busy ? PERIOD : RESTING)) look(); }, 400);

  /** A form has a batch size of its own. */
  function settle() {
    part("#lab-batch").disabled = tabs.some(([tab]) => tab === part("#lab-model").value);
  }

  async function look() {
    looked = Date.now();
    try {
      show(await ask("lab", { job: wanted }));
    } catch (error) {
      say(part(".answer"), "bad", error.message);
    }
  }

  async function start(kind) {
    const model = part("#lab-model").value, own = part("#lab-batch").disabled;
    const batch = Number(part("#lab-batch").value);
    const question = { kind, model, sizes: part("#lab-sizes").value, extent: part("#lab-extent").value,
      ways: part("#lab-ways").value, batch: Number.isInteger(batch) && batch > 0 ? batch : 0, clean: kind === "cache" };
    if (own) question.form = window.kohya.read(model);
    await act("lab-start", question);
  }

  async function act(name, question) {
    try {
      const answer = await ask(name, question);
      say(part(".answer"), "", "");
      wanted = answer.job ?? wanted;
    } catch (error) {
      say(part(".answer"), "bad", error.message);
    }
    await look();
  }

  /** Put what was found best into the form of a training tab, and go there. */
  async function apply(job, number = 0) {
    const tab = target, title = tabs.find(([id]) => id === tab)[1];
    try {
      const { values, said } = await ask("lab-apply", { job, tab, number });
      const buttons = [...document.querySelectorAll('button[role="tab"]')];
      buttons.find((button) => button.id.startsWith(`${tab}-`) || button.textContent.trim() === title)?.click();
      for (let i = 0; i < 100 && !document.getElementById(`${tab}-form`)?.checkVisibility(); i++) await wait(50);
      window.kohya.apply(tab, values);
      say(part(".answer"), "good", said);
    } catch (error) {
      say(part(".answer"), "bad", error.message);
    }
  }

  // ---- drawing

  function show({ jobs, tabs: known, shown: job }) {
    tabs = known;
    target ||= tabs[0][0];
    settle();
    busy = jobs.some((one) => one.busy);
    const now = JSON.stringify([jobs, job]);
    if (now === shown) return;
    shown = now;
    part(".found").hidden = !job;
    for (const button of place.querySelectorAll("[data-lab]")) button.disabled = busy;
    if (!job) return;
    const picker = part("#lab-job");
    picker.replaceChildren(...jobs.map((one) => make("option", { value: one.id, selected: one.id === job.id }, one.title)));
    part(".which").hidden = jobs.length < 2;
    part(".now").replaceChildren(...head(job));
    const draw = { bench, profile, doctor, cache }[job.kind];
    part(".body").replaceChildren(...(job.body && draw ? draw(job.body, job) : []));
  }

  function head(job) {
    const { text, done, total } = job.doing;
    const line = make("div", { className: "who" }, make("span", { className: "state" }, words(job.state)), make("b", {}, words(job.title)),
      make("small", {}, job.took), job.busy ? button(words("Stop"), () => { say(part(".answer"), "plain", words("Stopping")); act("lab-stop", { job: job.id }); }, "stop") : null);
    const made = [make("div", { className: `run ${job.mood}` }, line)];
    if (job.busy) {
      const share = total ? (100 * done) / total : 0;
      const bar = make("i");
      bar.style.width = `${share}%`;
      made.push(make("div", { className: "line" }, make("span", {}, text), make("span", {}, total ? `${done} / ${total}` : "")),
        make("div", { className: `track${total ? "" : " waiting"}`, role: "progressbar", "aria-label": "Progress",
          "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": String(Math.round(share)) }, bar));
    }
    if (job.error) made.push(make("div", { className: "cause", role: "alert" }, make("ul", {}, lines(job.error))));
    if (job.log) made.push(make("details", {}, make("summary", {}, words("Log")), make("pre", {}, job.log)));
    return made;
  }

  const lines = (text) => text.split("\n").filter(Boolean).map((line) => make("li", {}, line));

  function button(text, does, className = "") {
    const made = make("button", { type: "button", className }, text);
    made.addEventListener("click", does);
    return made;
  }

  /** Into which form to apply; chosen once for all measurements. */
  function targets() {
    const choices = make("select", { id: "lab-tab" }, tabs.map(([id, title]) => make("option", { value: id, selected: id === target }, title)));
    choices.addEventListener("change", () => { target = choices.value; });
    return make("div", { className: "target" }, make("label", { for: "lab-tab" }, words("Form")), choices);
  }

  const heading = (texts) => make("p", { className: "heading" }, texts.flatMap((text, i) => (i ? [make("br"), text] : [make("b", {}, text)])));

  function bench(body, job) {
    const made = [heading(body.heading)];
    if (body.verdict) {
      made.push(make("div", { className: "advice" }, make("p", {}, body.verdict), body.apply ? targets() : null,
        body.apply ? button(words("Apply the best to my config"), () => apply(job.id), "primary") : null));
    }
    const columns = ["Speed", "Memory", "MFU", "Compiling"].filter((name) => body.groups.some((group) => group.rows.some((row) => cell(row, name))));
    for (const group of body.groups) made.push(chart(group, ["Way", "Time", ...columns]));
    if (body.notes.length) made.push(make("ul", { className: "notes" }, body.notes.map((note) => make("li", {}, note))));
    made.push(make("details", {}, make("summary", {}, words("What is compared")),
      make("dl", {}, body.about.map(([name, about]) => [make("dt", {}, name), make("dd", {}, about)]).flat())));
    return [...made, files(job)];
  }

  /** A table whose second column is a bar: the median, and a thin line to the 90th percentile. */
  function chart({ title, rows }, columns) {
    const body = rows.map((row) => make("tr", { className: row.best ? "best" : "" }, columns.map((name, i) => {
      if (i === 1) return make("td", { className: "timed" }, bar(row), make("span", { className: "time", title: row.p90 && `p90 ${row.p90}` }, row.p50));
      return make(i ? "td" : "th", { "data-name": name, title: i ? "" : row.name }, cell(row, name));
    })));
    return make("table", { className: "bars" }, make("caption", {}, title),
      make("thead", {}, make("tr", {}, columns.map((name) => make("th", { scope: "col", "data-of": name }, words(name))))), make("tbody", {}, body));
  }

  const cell = (row, name) => ({ Speed: row.speed, Memory: row.memory, MFU: row.mfu, Compiling: row.compiled })[name] ?? row.name;

  function bar(row) {
    const solid = make("i"), thin = make("u");
    solid.style.width = `${100 * row.share}%`;
    thin.style.width = `${100 * row.far}%`;
    return make("span", { className: "bar", "aria-hidden": true }, thin, solid);
  }

  function profile(body, job) {
    const found = body.verdict.map((one, i) => make("li", {}, make("p", {}, one.text),
      one.options ? button(`${words("Apply")}: ${one.options}`, () => apply(job.id, i)) : null));
    const rows = body.kinds.map((kind) => ({ name: kind.name, share: kind.share, far: kind.share, best: false, p50: `${(100 * kind.share).toFixed(1)} %`, p90: "",
      speed: "", memory: "", mfu: "", compiled: "" }));
    const choice = body.verdict.some((one) => one.options) ? targets() : null;
    return [heading(body.heading), make("p", { className: "step" }, `${body.step}; ${body.counts.join(", ")}`),
      make("ol", { className: "advice" }, found), ...(choice ? [choice] : []),
      chart({ title: words("Where the time goes"), rows }, ["Kind", "Share"]),
      table(words("The longest operations of a step"), ["Operation", "Kind", "Calls", "ms", "Share"], body.operations), files(job)];
  }

  function table(title, columns, rows) {
    return make("div", { className: "wide" }, make("table", { className: "plain" }, make("caption", {}, title),
      make("thead", {}, make("tr", {}, columns.map((name) => make("th", { scope: "col" }, words(name))))),
      make("tbody", {}, rows.map((row) => make("tr", {}, row.map((text, i) => make("td", { className: i > 1 ? "number" : "" }, text)))))));
  }

  const files = (job) => make("p", { className: "files" }, `${words("Files")}: ${job.folder}`);

  function doctor(body, job) {
    const marks = { ok: "✓", hint: "·", bad: "✗" };
    const found = body.findings.map((one) => make("div", { className: one.verdict },
      make("dt", {}, make("span", { className: "mark", "aria-label": one.verdict }, marks[one.verdict] ?? "·"), one.topic), make("dd", {}, one.text)));
    const made = [make("dl", { className: "findings" }, found)];
    if (body.verdict) made.unshift(make("div", { className: "advice" }, make("p", {}, words(body.verdict)), body.apply ? targets() : null,
      body.apply ? button(words("Apply these settings to my config"), () => apply(job.id), "primary") : null));
    return made;
  }

  function cache(body) {
    return [make("p", { className: "step" }, body.verdict),
      ...(body.rows.length ? [table(words("Kept"), ["Made with", "Size", "Last used"], body.rows)] : [])];
  }

  return { mount };
})();
