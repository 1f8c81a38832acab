"use strict";
// The live panel in the browser: its buttons, the support bundle, and comparing two samples.
window.kohyaMonitor = (() => {
  const { ask, make, wait } = window.kohyaAsk;
  const words = (text) => window.kohyaWords?.of(text) ?? text;

  /** Put settings that the server sent into the form of their tab, and show it. */
  async function open({ tab, fill, launch }) {
    const title = { lora: "LoRA", dreambooth: "DreamBooth", finetune: "Finetune" }[tab];
    const tabs = document.querySelectorAll('button[role="tab"]');
    [...tabs].find((button) => [title, words(title)].includes(button.textContent.trim()))?.click();
    for (let i = 0; i < 100 && !document.getElementById(`${tab}-form`); i++) await wait(50);
    window.kohya.fill(tab, fill);
    const form = document.getElementById(`${tab}-form`);
    for (const field of form.querySelectorAll("[data-launch]")) {
      const value = launch[field.dataset.launch] ?? field.dataset.default;
      if (field.type === "checkbox") field.checked = value.toLowerCase() === "true";
      else field.value = value;
    }
    form.dispatchEvent(new Event("input", { bubbles: true }));
    form.querySelector("[data-option]").dispatchEvent(new Event("input", { bubbles: true }));
    form.scrollIntoView({ block: "start" });
  }

  async function act(button) {
    const where = button.closest(".acts"), said = where.querySelector(".answer");
    const tell = (text, bad) => Object.assign(said, { textContent: text }).classList.toggle("bad", Boolean(bad));
    button.disabled = true;
    try {
      if (button.dataset.act === "bundle") await bundle(where.dataset.run, tell);
      else {
        const answer = await ask("act", { act: button.dataset.act, run: where.dataset.run, sure: button.dataset.sure === "true" });
        if (answer.ask) question(button, said, answer.ask);
        if (answer.fill) await open(answer);
        if (!answer.ask) tell(words(answer.said ?? "The form holds the settings of this run: change what you like."));
      }
    } catch (error) {
      tell(error.message, true);
    }
    button.disabled = false;
  }

  /** Ask what is to be known first; yes is the same button once more. */
  function question(button, said, text) {
    const yes = make("button", { type: "button", className: "stop", "data-act": button.dataset.act, "data-sure": "true" }, button.textContent);
    const no = make("button", { type: "button", className: "no" }, words("Cancel"));
    no.onclick = () => said.replaceChildren();
    said.classList.remove("bad");
    said.replaceChildren(words(text), " ", yes, " ", no);
    no.focus();
  }

  async function bundle(run, tell) {
    tell(words("Collecting, which takes some seconds …"));
    const answer = await fetch(window.kohyaAsk.address("bundle", { run }));
    if (!answer.ok) throw new Error(await answer.text());
    const name = /filename="([\w.-]+)"/.exec(answer.headers.get("content-disposition"))?.[1] ?? "support.zip";
    const link = make("a", { href: URL.createObjectURL(await answer.blob()), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    tell(`${name}: ${words("no captions, images, names or tokens are in it. Look through it before you pass it on.")}`);
  }

  // ---- two samples, one over the other

  let dialog;

  function compare(sample) {
    const row = [...sample.parentElement.querySelectorAll(".sample")];
    const place = row.indexOf(sample);
    dialog ??= build();
    dialog.row = row.map(({ dataset }) => ({ step: dataset.step, large: dataset.large }));
    dialog.querySelector("p").textContent = sample.dataset.prompt;
    const [first, second] = dialog.querySelectorAll("select");
    for (const choice of [first, second])
      choice.replaceChildren(...dialog.row.map(({ step }, i) => make("option", { value: String(i) }, `${words("Step")} ${step}`)));
    second.value = String(place);
    first.value = String(Math.min(place + 1, row.length - 1)); // the one before it, as the newest comes first
    dialog.classList.toggle("single", row.length < 2);
    draw();
    dialog.showModal();
  }

  function build() {
    const made = make("dialog", { className: "compare", "aria-label": words("Compare samples") },
      make("header", {}, make("p"), make("button", { type: "button", className: "close", "aria-label": words("Close") }, "✕")),
      make("div", { className: "pair" }, make("img", { alt: "" }), make("img", { alt: "" })),
      make("div", { className: "between" },
        make("select", { "aria-label": words("Left") }),
        make("input", { type: "range", min: 0, max: 100, value: 50, "aria-label": words("Where the left one ends") }),
        make("select", { "aria-label": words("Right") })));
    made.addEventListener("input", draw);
    made.addEventListener("click", ({ target }) => { if (target === made || target.closest(".close")) made.close(); });
    document.body.append(made);
    return made;
  }

  function draw() {
    const [first, second] = dialog.querySelectorAll("select"), images = dialog.querySelectorAll(".pair img");
    const shown = [dialog.row[second.value], dialog.row[first.value]]; // below: the right one; above it: the left one
    images.forEach((image, i) => {
      if (image.getAttribute("src") !== shown[i].large) image.src = shown[i].large;
      image.alt = `${words("Step")} ${shown[i].step}`;
    });
    dialog.querySelector(".pair").style.setProperty("--at", `${dialog.querySelector("input").value}%`);
  }

  // ---- which run, and how much of it

  /** The id of the run that was chosen, "" for the newest. */
  const picked = () => document.querySelector("select.runs")?.value ?? "";

  document.addEventListener("change", ({ target }) => {
    if (target.matches?.("select.runs")) document.querySelector("button.chosen")?.click();
  });

  document.addEventListener("click", async ({ target }) => {
    const fold = target.closest?.(".unfold");
    if (fold) fold.setAttribute("aria-expanded", String(fold.closest(".live").classList.toggle("open")));
    const button = target.closest?.("[data-act]");
    if (button) act(button);
    const sample = target.closest?.(".sample");
    if (sample) compare(sample);
    const go = target.closest?.("[data-queue]");
    if (go) {
      go.disabled = true;
      await ask("queue-act", { act: go.dataset.queue }).catch(() => (go.disabled = false));
    }
  });

  return { open, picked };
})();
