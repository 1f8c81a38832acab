// The licence of a model: some can be downloaded only with the token of a user who has accepted it.
import { make, makeButton } from "../server/elements.js";
import { ask } from "../server/http.js";

/**
 * @typedef {{ files: { what: string, size: number, left: number, path: string }[], closed: string[], free: number,
 *   token: boolean }} Plan `closed`: repositories whose licence is not accepted; `token`: whether one is stored
 */

/** @param {string} href */
export const link = (href) => make("a", { href, target: "_blank", rel: "noopener" }, href);

/** The steps to accept a licence, in the dialog for base models. */
export class Licence {
  element = make("div", { className: "gate", hidden: true });
  token = make("input", { id: "models-token", type: "password", autocomplete: "new-password", spellcheck: false });

  /** @param {() => unknown} keep stores the token and checks again */
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
   * Store the pasted token. Returns a sentence about it, "" if there is none.
   * @returns {Promise<string>}
   */
  async storeToken() {
    const token = this.token.value, { said } = token ? await ask("models_token", { token }) : { said: "" };
    this.token.value = "";
    return said;
  }
}
