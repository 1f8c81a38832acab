"use strict";
// Questions to the server, and elements from its answers. What comes from files is always set as text, never as HTML.
window.kohyaAsk = (() => {
  const root = () => new URL(window.gradio_config?.root || "/", location.href).pathname.replace(/\/$/, "");

  const asking = new Map(); // a sentence of the server -> the folder that it asks to allow

  /** Ask a question; what the user can mend is thrown as an Error whose message is the sentence. */
  async function ask(name, question = {}) {
    let answer;
    try {
      const sent = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question) };
      answer = await (await fetch(`${root()}/own/${name}`, sent)).json();
    } catch {
      throw new Error("The page's server does not answer: is it still running?");
    }
    for (const [sentence, folder] of Object.entries(answer.allow ?? {})) asking.set(sentence, folder);
    if (answer.error) throw new Error(answer.error);
    return answer;
  }

  /** The address of a picture that the server shows. */
  const address = (name, query) => `${root()}/own/${name}?${new URLSearchParams(query)}`;

  /** An element with properties (data-*, aria-* and role as attributes) and children. */
  function make(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (value === undefined || value === null || value === false) continue;
      if (/^(data-|aria-|role$|for$|list$)/.test(name)) made.setAttribute(name, value === true ? "true" : value);
      else made[name] = value;
    }
    made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
    return made;
  }

  /** A message as the rest of the page shows it: kind is good, bad or plain. */
  function say(where, kind, text) {
    const lines = String(text).split("\n").filter(Boolean);
    const body = lines.length > 1 ? make("ul", {}, lines.map((line) => make("li", {}, ...offered(line)))) : make("p", {}, ...offered(lines[0] ?? ""));
    where.replaceChildren(...(text ? [make("div", { className: `message ${kind}`, role: kind === "bad" ? "alert" : "status" }, body)] : []));
  }

  /** A sentence and, where it asks whether a folder may be used, the button that allows it. */
  function offered(line) {
    const folder = asking.get(line);
    return folder ? [line, " ", make("button", { type: "button", className: "allow", "data-allow": folder }, "Allow this folder")] : [line];
  }

  /** The pieces of a text that stand between commas, each by itself, as that is how they are translated. */
  const pieces = (text) => String(text).split(/([,;] )/).map((piece) => make("span", {}, piece));

  let pressed; // what asked for the last thing that can be refused for want of a folder

  /** Let the page use a folder; when nothing else is asked in the same place, what was refused is done again. */
  async function allow(button) {
    const place = button.closest(".message") ?? button.parentElement;
    button.disabled = true;
    try {
      button.replaceWith(make("b", { className: "allowed" }, (await ask("allow", { folder: button.dataset.allow })).said));
    } catch (error) {
      button.after(make("b", {}, error.message));
      return;
    }
    if (place.querySelector(".allow:not(:disabled)")) return;
    if (place.closest("dialog")) place.dispatchEvent(new Event("kohya:allowed", { bubbles: true }));
    else if (pressed?.isConnected && (pressed.closest(".bar") ?? pressed).checkVisibility()) pressed.click(); // Probe is behind its answer
  }

  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.("button");
    if (button?.matches(".allow")) allow(button);
    else if (button?.matches(".bar .row button, .begin button:not(.opens), .bar .keep, .bar .probe, [data-do], [data-go], .lab button")) pressed = button;
  }, true);

  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
  return { ask, address, make, say, offered, pieces, wait, count };
})();
