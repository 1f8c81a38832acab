"use strict";
// Questions to the server, and elements from its answers. What comes from files is always set as text, never as HTML.
window.kohyaAsk = (() => {
  const root = () => new URL(window.gradio_config?.root || "/", location.href).pathname.replace(/\/$/, "");

  /** Ask a question; what the user can mend is thrown as an Error whose message is the sentence. */
  async function ask(name, question = {}) {
    let answer;
    try {
      const sent = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question) };
      answer = await (await fetch(`${root()}/own/${name}`, sent)).json();
    } catch {
      throw new Error("The page's server does not answer: is it still running?");
    }
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
    const body = lines.length > 1 ? make("ul", {}, lines.map((line) => make("li", {}, line))) : make("p", {}, lines[0] ?? "");
    where.replaceChildren(...(text ? [make("div", { className: `message ${kind}`, role: kind === "bad" ? "alert" : "status" }, body)] : []));
  }

  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
  return { ask, address, make, say, wait, count };
})();
