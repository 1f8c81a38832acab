// Upload files to a folder of the server in pieces: pieces are retried, and an interrupted upload resumes.
import { count, say } from "../i18n/sentences.js";
import { address, ask, messageOf, UNANSWERED, wait } from "./http.js";

/** @typedef {{ name: string, size: number, modified: number, sums: Record<string, number> }} Facts of a file */
/**
 * @typedef {{ state: "send" | "check" | "there" | "refused", name: string, why?: string, bytes?: number, id?: string,
 *   offset?: number }} Verdict
 */
/**
 * @typedef {{ sent: string[], there: string[], wrong: [string, string][] }} Outcome names in the folder, and
 *   the problem of each file, or of the folder ("")
 */
/** @typedef {(bytes: number, of: number, done: number, files: number) => void} Report */

const PIECE = 4_000_000, TRIES = 6, FILES = 2000; // bytes of a piece, tries of a request, files in a request

// CRC-32 of each single byte, with the reversed polynomial 0x04c11db7.
const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});

/**
 * CRC-32, continued from the checksum of the preceding bytes.
 * @param {Uint8Array} bytes
 * @param {number} [before]
 */
export function checksum(bytes, before = 0) {
  let sum = ~before;
  for (const byte of bytes) sum = TABLE[(sum ^ byte) & 255] ^ (sum >>> 8);
  return ~sum >>> 0;
}

/**
 * The CRC-32 of the first bytes of a file.
 * @param {File} file
 * @param {number} bytes
 */
async function checksumOf(file, bytes) {
  let sum = 0;
  for (let at = 0; at < bytes; at += PIECE)
    sum = checksum(new Uint8Array(await file.slice(at, Math.min(bytes, at + PIECE)).arrayBuffer()), sum);
  return sum;
}

/** The upload of files to one folder. */
export class Sending {
  /** @type {Outcome} */
  outcome = { sent: [], there: [], wrong: [] };
  stopped = new AbortController();
  arrived = 0; // bytes
  done = 0; // files

  /**
   * @param {File[]} files
   * @param {string} folder
   * @param {Report} report
   */
  constructor(files, folder, report) {
    // keeps an image and its caption in one request
    this.files = [...files].sort((a, b) => (a.name < b.name ? -1 : 1));
    this.folder = folder;
    this.report = report;
    this.size = this.files.reduce((sum, file) => sum + file.size, 0);
    /** @type {Map<File, Facts>} */
    this.facts = new Map(
      this.files.map((file) => [
        file,
        { name: file.name, size: file.size, modified: Math.max(0, Math.floor(file.lastModified || 0)), sums: {} },
      ]));
  }

  stop() {
    this.stopped.abort();
  }

  /** Upload all files that are not there yet. Where the folder cannot be used, the outcome says why. */
  async run() {
    this.tell();
    try {
      await this.all();
    } catch (error) {
      if (!this.stopped.signal.aborted) this.outcome.wrong.push(["", messageOf(error)]);
    }
    return this.outcome;
  }

  async all() {
    for (let at = 0; at < this.files.length; at += FILES) {
      const some = this.files.slice(at, at + FILES), verdicts = await this.verdicts(some);
      for (const [i, file] of some.entries()) {
        if (this.stopped.signal.aborted) return;
        await this.one(file, verdicts[i]);
        this.done++;
        this.tell();
      }
    }
  }

  /** @param {number} [bytes] of the file that is being sent */
  tell(bytes = 0) {
    this.report(this.arrived + bytes, this.size, this.done, this.files.length);
  }

  /**
   * The server's verdict on each file; for files that may be there already it first requests checksums.
   * @param {File[]} files
   * @returns {Promise<Verdict[]>}
   */
  async verdicts(files) {
    for (;;) {
      /** @type {{ folder: string, files: Verdict[] }} */
      const answer = await this.patiently(() =>
        ask("upload", { folder: this.folder, files: files.map((file) => this.facts.get(file)) }));
      this.folder = answer.folder;
      const doubtful = files.filter((_, i) => answer.files[i].state === "check");
      if (!doubtful.length) return answer.files;
      for (const [i, file] of files.entries()) {
        const { state, bytes = 0 } = answer.files[i], facts = this.facts.get(file);
        if (state === "check" && facts) facts.sums[String(bytes)] = await checksumOf(file, bytes);
      }
    }
  }

  /**
   * @param {File} file
   * @param {Verdict} verdict
   */
  async one(file, verdict) {
    try {
      while (verdict.state === "send") {
        const name = await this.pieces(file, verdict);
        if (name) {
          this.outcome.sent.push(name);
          break;
        }
        if (this.stopped.signal.aborted) return;
        // somebody else uploads a file of that name, or the server was restarted
        [verdict] = await this.verdicts([file]);
      }
      if (verdict.state === "there") this.outcome.there.push(verdict.name);
      if (verdict.state === "refused") this.outcome.wrong.push([file.name, verdict.why ?? ""]);
    } catch (error) {
      if (this.stopped.signal.aborted) return;
      this.outcome.wrong.push([file.name, messageOf(error)]);
    }
    this.arrived += file.size;
  }

  /**
   * Upload a file from the server's offset. Returns its name there, or "" if the server needs to be asked again.
   * @param {File} file
   * @param {Verdict} verdict
   * @returns {Promise<string>}
   */
  async pieces(file, { id = "", offset = 0 }) {
    let sum = offset ? await checksumOf(file, offset) : 0;
    for (let at = offset; at <= file.size && !this.stopped.signal.aborted;) {
      const piece = new Uint8Array(await file.slice(at, at + PIECE).arrayBuffer());
      if (!piece.length && at < file.size)
        throw new Error(say("{name} was changed on its way: send it again", { name: file.name }));
      sum = checksum(piece, sum);
      const query = { id, offset: String(at), sum: at + piece.length === file.size ? String(sum) : "" };
      const answer = await this.patiently(() => this.send(query, piece));
      if (answer.error) throw new Error(answer.error);
      if (answer.done) return answer.done;
      if (answer.again) return "";
      at = answer.offset;
      this.tell(at);
    }
    return "";
  }

  /**
   * @param {Record<string, string>} query
   * @param {Uint8Array<ArrayBuffer>} piece
   */
  async send(query, piece) {
    const sent = {
      method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: piece, signal: this.stopped.signal,
    };
    return (await fetch(address("upload", query), sent)).json();
  }

  /**
   * Retry a request for a while if the network fails.
   * @template T
   * @param {() => Promise<T>} what
   * @returns {Promise<T>}
   */
  async patiently(what) {
    for (let tries = 1; ; tries++) {
      try {
        return await what();
      } catch (error) {
        const isNetwork = error instanceof TypeError || messageOf(error) === UNANSWERED;
        if (!isNetwork || tries === TRIES || this.stopped.signal.aborted) throw error;
        await wait(300 * 2 ** tries); // from 0.6 to 9.6 seconds
      }
    }
  }
}

/** @typedef {{ path: string, files: File[] }} Folder files that were dropped, and the folder they were in, or "" */

// Files that systems, editors and trainers (caches) keep beside the images of a folder.
const BESIDE_IMAGES = /^(\.|Thumbs\.db$|desktop\.ini$)|\.(npz|safetensors)$/i;

/**
 * The files that were dropped, by folder: folders may be in others, and those without files are left out.
 * @param {DataTransfer} dropped
 * @returns {Promise<Folder[]>}
 */
export async function foldersOf(dropped) {
  const entries = [...dropped.items]
    .map((item) => item.webkitGetAsEntry?.())
    .filter((entry) => entry !== null && entry !== undefined);
  const single = entries.some((entry) => entry.isDirectory)
    ? await Promise.all(
        entries.filter((entry) => entry.isFile).map((entry) => fileOf(/** @type {FileSystemFileEntry} */ (entry))))
    : [...dropped.files];
  const folders = entries.filter((entry) => entry.isDirectory);
  const inside = await Promise.all(
    folders.map((entry) => foldersIn(/** @type {FileSystemDirectoryEntry} */ (entry), entry.name)));
  return [{ path: "", files: single }, ...inside.flat()].filter(({ files }) => files.length);
}

/**
 * @param {FileSystemFileEntry} entry
 * @returns {Promise<File>}
 */
const fileOf = (entry) =>
  new Promise((done, fail) =>
    entry.file(done, () => fail(new Error(say("{name} cannot be read: drop the others", { name: entry.name })))));

/**
 * A folder and all that are in it.
 * @param {FileSystemDirectoryEntry} entry
 * @param {string} path
 * @returns {Promise<Folder[]>}
 */
async function foldersIn(entry, path) {
  const reader = entry.createReader();
  /** @type {Folder[]} */
  const folders = [{ path, files: [] }];
  for (;;) { // the reader returns about a hundred at a time
    /** @type {FileSystemEntry[]} */
    const some = await new Promise((done, fail) => reader.readEntries(done, fail));
    if (!some.length) return folders;
    for (const child of some) {
      if (BESIDE_IMAGES.test(child.name)) continue;
      if (child.isFile) folders[0].files.push(await fileOf(/** @type {FileSystemFileEntry} */ (child)));
      else
        folders.push(
          ...await foldersIn(/** @type {FileSystemDirectoryEntry} */ (child), `${path}/${child.name}`));
    }
  }
}

const REPEATED = /^\d+_/; // a folder name with the number of repeats

/**
 * The names that dropped folders get within a folder. "" is that folder itself, for what is not in several folders and
 * has no repeats in its name.
 * @param {Folder[]} folders
 * @returns {Promise<string[]>}
 */
export async function namesOf(folders) {
  const last = folders.map(({ path }) => path.split("/").at(-1) || "images");
  if (folders.length === 1 && !REPEATED.test(last[0])) return [""];
  return (await ask("upload_names", { names: last })).names;
}

/** @param {string[]} names whether each says how often its images are seen, as trainings read them */
export const areRepeated = (names) => names.every((name) => REPEATED.test(name));

const MAX_REFUSED = 5; // sentences about files that were not sent
export const BUSY = "Files are being sent: drop these again when they are there.";

/**
 * The messages about files: those that are in a folder now, and why others are not.
 * @param {Outcome[]} outcomes
 * @param {string[]} folders that each was sent to
 */
export function describe(outcomes, folders) {
  const said = outcomes.flatMap(({ sent, there }, at) => [
    sent.length && say("Sent to {folder}: {files}.", { files: count(sent.length, "file"), folder: folders[at] }),
    there.length && say("Already there: {files}.", { files: count(there.length, "file") }),
  ]);
  const sentences = outcomes
    .flatMap(({ wrong }) => wrong)
    .map(([file, why]) => (why.startsWith(file) ? why : say("{file} {why}", { file, why })));
  const refused = [...new Set(sentences)];
  const more = refused.splice(MAX_REFUSED).length;
  if (more) refused.push(say("and {count} more like these", { count: more }));
  return { said: said.filter(Boolean).join("\n"), refused: refused.join("\n") };
}
