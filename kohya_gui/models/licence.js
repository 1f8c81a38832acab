// The licence of a model: some may be downloaded only by those who have accepted it, with a token of theirs.
import { make, makeButton } from "../server/elements.js";
import { ask } from "../server/http.js";

/**
 * @typedef {{ files: { what: string, size: number, left: number, path: string }[], closed: string[], free: number,
 *   token: boolean }} Plan `closed`: the repositories whose licence is to be accepted; `token`: whether one is stored
 */

/** @param {string} href */
export const link = (href) => make("a", { href, target: "_blank", rel: "noopener" }, href);

/** The steps to accept it, in the dialog for base models. */
export class Licence {
  element = make("div", { className: "gate", hidden: true });
  token = make("input", { id: "models-token", type: "password", autocomplete: "new-password", spellcheck: false });

  /** @param {() => unknown} keep called to store the token, and to look again */
  constructor(keep) {
    this.keep = keep;
  }

  /** @param {Plan} plan */
  show({ closed, token }) {
    this.element.replaceChildren(
      make("h3", {}, "First accept the licence of this model"),
      make("ol", {},
        ...closed.map((name) =>
          make("li", {},
            make("span", {}, "Sign in, read the licence and press Agree:"),
            " ",
            link(`https://huggingface.co/${name}`),
          )),
        make("li", {},
          make("span", {}, "Make a token with the right to read, and copy it:"),
          " ",
          link("https://huggingface.co/settings/tokens"),
        ),
        make("li", {},
          make("label", { for: "models-token" },
            token ? "Paste another token here, or check again:" : "Paste it here:"),
          this.token,
          makeButton("Keep and check again", this.keep, { className: "look" }))));
    this.element.hidden = false;
  }

  /**
   * Store the token that was pasted. Returns a sentence about it, "" without one.
   * @returns {Promise<string>}
   */
  async storeToken() {
    const token = this.token.value, { said } = token ? await ask("models_token", { token }) : { said: "" };
    this.token.value = "";
    return said;
  }
}
