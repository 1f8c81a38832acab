// Requests to the page's own server.
import { remember } from "../i18n/sentences.js";

// This file is SCRIPTS/HASH/server/http.js below the page, so its address includes a proxy's path.
const PAGE = new URL("../../../", import.meta.url);

/**
 * The address of a request; of a GET request, such as for an image, with its query.
 * @param {string} name
 * @param {Record<string, string>} [query]
 */
export const address = (name, query) =>
  new URL(`own/${name}${query ? `?${new URLSearchParams(query)}` : ""}`, PAGE).href;

/** The message about a request without an answer. */
export const UNANSWERED = "The page's server does not answer: is it still running?";

/** @type {Map<string, string>} a sentence from the server -> the folder that it asks to allow */
const foldersToAllow = new Map();

/**
 * The folder that a sentence from the server asks to allow, if any.
 * @param {string} sentence
 */
export const folderToAllow = (sentence) => foldersToAllow.get(sentence);

/**
 * Send a request to the page's own API. The answer is JSON, whose shape the callers declare.
 * @param {string} name
 * @param {Record<string, unknown>} [question]
 * @returns {Promise<any>}
 * @throws {Error} whose message is a sentence for the user
 */
export const ask = (name, question = {}) => answerOf(address(name), question);

/** A request that was refused: a mistake of its `field`; of "sure", a question to confirm. */
export class Refusal extends Error {
  /** @param {{ error: string, field?: string, next?: string }} answer */
  constructor({ error, field = "", next = "" }) {
    super(error);
    this.field = field;
    this.next = next;
  }
}

/**
 * An address of the public API, such as of an image.
 * @param {string} path below /api/v1
 */
export const addressOfApi = (path) => new URL(`api/v1/${path}`, PAGE).href;

/**
 * Send a request to the public API: POST with a body, GET without one.
 * @param {string} path below /api/v1
 * @param {Record<string, unknown>} [body]
 * @returns {Promise<any>}
 * @throws {Error} whose message is a sentence for the user
 */
export const call = (path, body) => answerOf(addressOfApi(path), body);

/**
 * The path of a run in the public API.
 * @param {string} run
 * @param {string} [rest]
 */
export const pathOfRun = (run, rest = "") => `runs/${encodeURIComponent(run)}/${rest}`;

/**
 * @param {string} where
 * @param {Record<string, unknown>} [body]
 */
async function answerOf(where, body) {
  let answer, status = 0, failed = false;
  const began = performance.now();
  try {
    // Mistakes have status 200, as browsers log every other status as an error in the console.
    const headers = { Prefer: "status=200", ...(body && { "Content-Type": "application/json" }) };
    const sent = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) };
    const response = await fetch(where, sent);
    status = response.status;
    answer = await response.json();
  } catch {
    failed = true;
    throw new Error(UNANSWERED);
  } finally {
    document.dispatchEvent(new CustomEvent("kohya:answered", { detail: { status, failed, began } }));
  }
  remember(answer.texts ?? []);
  for (const [sentence, folder] of Object.entries(answer.allow ?? {})) foldersToAllow.set(sentence, folder);
  if (answer.error) throw new Refusal(answer);
  return answer;
}

/** @param {number} ms */
export const wait = (ms) => new Promise((done) => setTimeout(done, ms));

/**
 * The message of an error.
 * @param {unknown} error
 */
export const messageOf = (error) => (error instanceof Error ? error.message : String(error));
