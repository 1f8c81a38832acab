"use strict";
// Commands as forms: collect what is filled in, start it, and show the processes until they have ended.
window.kohyaCommands = (() => {
  const { ask, make, say, wait } = window.kohyaAsk;
  const STATES = { running: "Running", stopping: "Stopping", finished: "Finished", failed: "Failed", stopped: "Stopped", interrupted: "Interrupted" };
  const busy = (job) => job.state === "running" || job.state === "stopping";

  function value(field) {
    const kind = field.dataset.kind;
    if (kind === "flag") return field.checked;
    if (kind !== "files") return field.value.trim();
    return [...field.querySelectorAll(".file")].map((row) => {
      const [path, weight] = [...row.querySelectorAll("input")].map((input) => input.value.trim());
      return path && `${path}=${weight || 1}`;
    }).filter(Boolean).join("\n");
  }

  const values = (form) => Object.fromEntries([...form.querySelectorAll("[data-field]")].map((field) => [field.dataset.field, value(field)]));

  /** Rows of files: there is always an empty one at the end. */
  function grow(list) {
    const rows = [...list.querySelectorAll(".file")];
    if (!rows.at(-1).querySelector("input").value.trim()) return;
    const row = rows[0].cloneNode(true);
    const [path, weight] = row.querySelectorAll("input");
    [path.value, weight.value, path.id] = ["", "1", `${list.dataset.start}-${rows.length}`];
    list.append(row);
  }

  function card(job, at) {
    const share = job.total ? job.done / job.total : 0;
    const lines = job.log.trim().split("\n").filter((line) => line && !/^\S.* \(\d+\)$/.test(line));
    const last = job.error ? job.error.split("\n") : [];
    const kind = { finished: "good", failed: "bad", interrupted: "bad" }[job.state] ?? (busy(job) ? "busy" : "");
    return make("div", { className: `card job ${kind}`, "data-job": job.id, "data-state": job.state },
      make("div", { className: "line" }, make("b", {}, job.title), make("small", {}, [job.about, job.when].filter(Boolean).join(" · ")), make("span", { className: "state" }, STATES[job.state] ?? job.state),
        busy(job) && make("button", { type: "button", "data-stop": job.id }, job.state === "stopping" ? "End now" : "Stop")),
      busy(job) && make("p", { className: "quiet" }, job.total ? `${job.text} ${job.done} / ${job.total}` : "starting"),
      busy(job) && make("div", { className: `track ${job.total ? "" : "waiting"}` }, Object.assign(make("i"), { style: `width:${share * 100}%` })),
      last.length ? make("p", { className: "cause" }, last.join(" ")) : null,
      lines.some((line) => !line.startsWith("error:")) ? make("details", { open: at === 0 && !busy(job) }, make("summary", {}, "Output"), make("pre", {}, lines.join("\n"))) : null);
  }

  /** Show the last processes of a command, and follow those that work. `ended` is called with each that ends. */
  function watcher(where, command, ended = () => {}) {
    let turn = 0;
    const working = new Set();
    async function look() {
      const mine = ++turn;
      for (;;) {
        let found;
        try {
          found = (await ask("command_list", { command })).jobs;
        } catch {
          if (mine !== turn) return;
          await wait(3000);
          continue;
        }
        if (mine !== turn) return;
        const open = new Set([...where.querySelectorAll("details[open]")].map((fold) => fold.closest("[data-job]").dataset.job));
        const seen = new Set([...where.querySelectorAll("[data-job]")].map((job) => job.dataset.job + job.dataset.state));
        where.replaceChildren(...found.map((job, at) => {
          const made = card(job, at);
          const fold = made.querySelector("details");
          if (fold && seen.has(job.id + job.state)) fold.open = open.has(job.id);
          return made;
        }));
        for (const job of found) {
          if (busy(job)) working.add(job.id);
          else if (working.delete(job.id)) ended(job);
        }
        if (!working.size || !where.isConnected) return;
        await wait(700);
      }
    }
    where.addEventListener("click", async ({ target }) => {
      const button = target.closest("[data-stop]");
      if (!button) return;
      button.disabled = true;
      await ask("command_stop", { id: button.dataset.stop }).catch(() => {});
      look();
    });
    return look;
  }

  /** Bring a block of forms to life. `more` adds values that are not on screen; `ended` hears of each process's end. */
  function mount(element, { more = () => ({}), ended } = {}) {
    const block = element.querySelector(".commands");
    const { command } = block.dataset;
    const scope = block.closest(".inside, .tools");
    const said = scope.querySelector(".said-of");
    const look = watcher(scope.querySelector(".jobs"), command, ended);
    const forms = [...block.querySelectorAll(".command")];
    block.addEventListener("change", ({ target }) => {
      if (target.name === `${command}-which`) for (const form of forms) form.hidden = form.dataset.name !== target.value;
    });
    block.addEventListener("input", ({ target }) => target.closest(".files") && grow(target.closest(".files")));
    const go = scope.querySelector("[data-go]");
    go.addEventListener("click", async () => {
      const form = forms.find((one) => !one.hidden);
      go.disabled = true;
      try {
        await ask("command_begin", { command, name: form.dataset.name, values: { ...values(form), ...more() } });
        say(said, "good", "");
        look();
      } catch (error) {
        say(said, "bad", error.message);
      }
      go.disabled = false;
    });
    look();
  }
  return { mount };
})();
