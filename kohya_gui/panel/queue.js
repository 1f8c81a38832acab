"use strict";
// The Queue tab: shows what the server says of the queue, and asks it to change.
window.kohyaQueue = (() => {
  const { ask, make, count } = window.kohyaAsk;
  const words = (text) => window.kohyaWords?.of(text) ?? text;
  const STATES = { waiting: "Waiting", starting: "Starting", running: "Running", stopping: "Stopping", finished: "Finished",
    stopped: "Stopped", failed: "Failed", interrupted: "Interrupted" };
  const MOODS = { starting: "busy", running: "busy", stopping: "busy", finished: "good", failed: "bad", interrupted: "bad" };
  const PERIOD = 1500;
  let place, shown = "";

  function mount(element) {
    place = element.querySelector(".queue");
    shown = "";
    look();
  }

  const visible = () => place?.isConnected && document.visibilityState === "visible" && place.checkVisibility();

  async function look() {
    if (!place) return;
    try {
      show(await ask("queue"));
    } catch (error) {
      tell(error.message, true);
    }
  }

  setInterval(() => { if (visible()) look(); }, PERIOD);

  function tell(text, bad = false) {
    const where = place.querySelector(".answer");
    where.textContent = text;
    where.classList.toggle("bad", bad);
  }

  async function change(question, said = "") {
    try {
      const answer = await ask(question.run ? "act" : "queue-act", question);
      if (answer.fill) return void window.kohyaMonitor.open(answer);
      tell(words(answer.said ?? said));
      if (answer.entries) show(answer);
      else look();
    } catch (error) {
      tell(error.message, true);
      look();
    }
  }

  function show(found) {
    const now = JSON.stringify(found);
    if (now === shown) return;
    shown = now;
    const focus = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    place.querySelector(".how").textContent = how(found);
    place.querySelector(".switches").replaceChildren(...tools(found));
    const waiting = found.entries.filter((entry) => entry.waits);
    const others = found.entries.filter((entry) => !entry.waits);
    const active = others.filter((entry) => MOODS[entry.state] === "busy");
    const ended = others.filter((entry) => MOODS[entry.state] !== "busy").reverse();
    place.querySelector(".entries").replaceChildren(...[...active, ...waiting, ...ended].map((entry) => row(entry, waiting)));
    if (focus) place.querySelector(`[data-key="${focus}"]`)?.focus();
  }

  function how({ entries, waiting, paused, halted, lanes }) {
    if (!entries.length) return words("The queue is empty. Fill in a form and press Add to queue: trainings run one after the other, also while this page is closed.");
    if (halted) return `${words("The queue is halted, since the computer or its process ended.")} ${count(waiting, words("training"))} ${words("left.")}`;
    if (paused) return `${words("Paused: nothing new is started.")} ${paused === "by you" ? "" : paused}`;
    if (!waiting) return words("The queue is empty.");
    const each = lanes.length > 1 ? ` ${words("One training at a time on each GPU")} (${lanes.join(", ")}).` : "";
    return `${count(waiting, words("training"))} ${words("waiting.")}${each}`;
  }

  function tools({ entries, waiting, paused, halted, go_on: goOn }) {
    const made = [];
    if (paused || halted) made.push(button("Continue", "go", () => change({ act: "go_on" }), "primary"));
    else if (waiting) made.push(button("Pause", "pause", () => change({ act: "pause" })));
    if (entries.some((entry) => !entry.waits && MOODS[entry.state] !== "busy"))
      made.push(button("Clear what has ended", "clear", () => change({ act: "clear" })));
    const box = make("input", { type: "checkbox", checked: goOn, "data-key": "after" });
    box.addEventListener("change", () => change({ act: "after_failure", go_on: box.checked }));
    if (entries.length) made.push(make("label", {}, box, make("span", {}, words("Continue when a training fails"))));
    return made;
  }

  function row(entry, waiting) {
    const at = waiting.indexOf(entry);
    const progress = entry.total ? `${words("step")} ${entry.step} / ${entry.total}` : "";
    const gpus = entry.gpus ? `GPU ${entry.gpus}` : "";
    const about = [entry.title, progress, gpus].filter(Boolean).join(" · ");
    return make("li", { className: `entry ${MOODS[entry.state] ?? "calm"}`, "data-id": entry.id, "data-state": entry.state },
      make("span", { className: "state" }, words(STATES[entry.state] ?? entry.state)),
      make("div", { className: "about" }, make("b", {}, entry.name), make("small", {}, about),
        entry.why && entry.state !== "finished" ? make("small", { className: "why" }, entry.why) : null),
      make("div", { className: "does" }, ...does(entry, at, waiting.length)));
  }

  function does(entry, at, many) {
    const key = (what) => `${entry.id}-${what}`;
    const act = (what) => () => change({ act: what, id: entry.id });
    const of = (what, run) => () => change({ act: what, run });
    const made = [];
    if (entry.waits && many > 1) {
      made.push(button("↑", key("up"), act("up"), "", `${words("Sooner")}: ${entry.name}`, at === 0));
      made.push(button("↓", key("down"), act("down"), "", `${words("Later")}: ${entry.name}`, at === many - 1));
    }
    if (entry.again) made.push(button("Resume", key("resume"), of("resume", entry.run), "", `${words("Resume")}: ${entry.name}`));
    if (MOODS[entry.state] === "busy") made.push(button("Stop", key("stop"), of("after_step", entry.run), "", `${words("Stop")}: ${entry.name}`));
    made.push(button("Duplicate", key("open"), act("open"), "", `${words("Open its settings in the form, to change and add them again")}: ${entry.name}`));
    if (MOODS[entry.state] !== "busy") made.push(button("Remove", key("remove"), act("remove"), "", `${words("Remove")}: ${entry.name}`));
    return made;
  }

  function button(text, key, click, kind = "", label = "", disabled = false) {
    const made = make("button", { type: "button", className: kind, "data-key": key, disabled, title: label, "aria-label": label || undefined }, words(text));
    made.addEventListener("click", click);
    return made;
  }

  return { mount };
})();
