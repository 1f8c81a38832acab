"use strict";
// The data set tab: a folder's images in pages, their captions, and changes that can be taken back.
window.kohyaImages = (() => {
  const { ask, address, make, say, wait, count } = window.kohyaAsk;
  const PAGE = 48;
  let root, now = null, view = { start: 0, show: "all", place: null, words: "" }, chosen = new Set(), turn = 0, working = "";
  const one = (selector) => root.querySelector(selector);
  const all = (selector) => [...root.querySelectorAll(selector)];

  let saying = 0;
  /** A message stays in view while one scrolls; a good one goes by itself. */
  function said(kind, text) {
    const mine = ++saying;
    say(one(":scope > .said-of"), kind, text);
    if (kind === "good" && text) setTimeout(() => mine === saying && say(one(":scope > .said-of"), kind, ""), 9000);
  }
  const trigger = () => one("#images-trigger").value;
  const described = () => one("[data-setting=dataset_config]").value.trim();
  const asked = (more = {}) => ({ folder: now.folder, album: now.album, trigger: trigger(), show: view.show, place: view.place, words: view.words, ...more });

  function settings() {
    return Object.fromEntries(all("[data-setting]").map((field) => [field.dataset.setting, field.type === "checkbox" ? field.checked : field.value.trim()]));
  }

  /** Ask for work, and wait for its end; its progress is shown, and it can be stopped. */
  async function work(name, question) {
    const bar = one(".working");
    let answer = await ask(name, question);
    try {
      while (answer.work) {
        working = answer.work;
        bar.hidden = false;
        bar.querySelector("span").textContent = answer.total ? `${answer.phase} ${answer.done.toLocaleString("en")} / ${answer.total.toLocaleString("en")}` : "Looking";
        bar.querySelector("i").style.width = `${answer.total ? (100 * answer.done) / answer.total : 0}%`;
        answer = await ask("images_work", { work: answer.work });
      }
    } finally {
      working = "";
      bar.hidden = true;
    }
    return answer;
  }

  async function attempt(what) {
    try {
      return await what();
    } catch (error) {
      said("bad", error.message);
      return null;
    }
  }

  async function open(keep = false) {
    const found = await attempt(() => work("images_open", { folder: one("#images-folder").value, settings: settings(), trigger: trigger(), ...window.kohyaImageSources.question() }));
    if (!found) return;
    if (!keep) {
      Object.assign(view, { start: 0, show: "all", place: null, words: "" });
      chosen.clear();
      one(".sieve .words").value = "";
    }
    said("good", "");
    overview(found);
    await page();
    panels();
    remember();
  }

  const KEY = "images-tab";

  /** A reload shows the same folder again. */
  function remember() {
    try {
      sessionStorage.setItem(KEY, JSON.stringify({ folder: one("#images-folder").value, trigger: trigger(), settings: settings(), taken: window.kohyaImageSources.state() }));
    } catch {} // a browser that keeps nothing only forgets
  }

  function recall() {
    let before = null;
    try {
      before = JSON.parse(sessionStorage.getItem(KEY));
    } catch {}
    if (!before) return;
    one("#images-folder").value = before.folder;
    one("#images-trigger").value = before.trigger;
    for (const field of all("[data-setting]")) {
      const value = before.settings[field.dataset.setting];
      if (field.type === "checkbox") field.checked = value;
      else field.value = value ?? "";
    }
    window.kohyaImageSources.restore(before.taken);
    new IntersectionObserver((seen, watch) => {
      if (!seen.some((entry) => entry.isIntersecting)) return;
      watch.disconnect();
      if (!now) open();
    }).observe(root);
  }

  /** What changed a folder answers with the folder as it is now. */
  async function change(name, question, tell) {
    const found = await attempt(() => work(name, asked(question)));
    if (!found) return false;
    overview(found);
    said("good", tell(found));
    await page();
    panels();
    return true;
  }

  function overview(found) {
    now = found;
    if (!described()) one("#images-folder").value = found.folder;
    one(".album").hidden = false;
    one(".album").classList.toggle("fixed", Boolean(found.fixed));
    one("[data-do=give]").hidden = Boolean(found.fixed);
    window.kohyaImageSources.show(found);
    const { count: told, kinds } = found;
    const numbers = [
      ["Images used", `${told.images.toLocaleString("en")} of ${kinds.all.toLocaleString("en")}`],
      ["With a caption", `${found.captioned.toLocaleString("en")} of ${kinds.all.toLocaleString("en")}`],
      ["Steps per epoch", told.steps_per_epoch.toLocaleString("en")],
      ["Buckets", told.buckets.length.toLocaleString("en")],
    ];
    if ("trigger" in kinds) numbers.push(["With the trigger word", `${(kinds.all - kinds.trigger).toLocaleString("en")} of ${kinds.all.toLocaleString("en")}`]);
    one(".numbers").replaceChildren(...numbers.map(([title, text]) => make("div", {}, make("dt", {}, title), make("dd", {}, text))));
    one(".steps").textContent = told.repeats
      ? `${count(told.images, "image")} with repeats are ${count(told.repeats, "picture")} per epoch; in batches of ${told.batch} that is ${count(told.steps_per_epoch, "step")}. ${count(told.steps, "step")} are ${count(told.epochs, "epoch")}.`
      : "A training would find no images here.";
    one(".findings").replaceChildren(...Object.entries(kinds).filter(([kind, n]) => (n || kind === view.show) && kind !== "all").map(([kind, n]) => {
      const chip = make("button", { type: "button", "data-kind": kind, "aria-pressed": String(view.show === kind), className: ["broken", "foreign"].includes(kind) ? "bad" : ["reg", "held"].includes(kind) ? "calm" : "" }, make("b", {}, n.toLocaleString("en")), make("span", {}, found.titles[kind]));
      chip.onclick = () => sieve({ show: view.show === kind ? "all" : kind });
      return chip;
    }));
    one(".notes").replaceChildren(...found.notes.map((note) => make("li", {}, note)));
    one(".buckets").hidden = !told.buckets.length;
    one(".buckets summary").textContent = `${count(told.buckets.length, "bucket")}: number of images per epoch`;
    const several = told.buckets.some((bucket) => bucket.dataset);
    one(".buckets .chips").replaceChildren(...told.buckets.map((bucket) => make("span", { title: several ? `Data set ${bucket.dataset + 1}` : "" }, `${bucket.size[0]} × ${bucket.size[1]}`, make("b", {}, bucket.repeats.toLocaleString("en")))));
    const places = [["", "All folders"], ...found.places.map((place) => [`/${place.folder}`, place.folder || "the folder itself", ` (${place.images.toLocaleString("en")})`])];
    fill(one(".sieve .place"), places, view.place === null ? "" : `/${view.place}`);
    fill(one(".sieve .show"), Object.entries(kinds).map(([kind, n]) => [kind, found.titles[kind], ` (${n.toLocaleString("en")})`]), view.show);
    one("[data-do=compare]").textContent = found.compared ? "Find duplicates again" : "Find duplicates";
    history(found.past);
  }

  function fill(select, entries, value) {
    select.replaceChildren(...entries.map(([key, ...texts]) => make("option", { value: key, selected: key === value }, texts)));
  }

  function history(past) {
    now.past = past;
    const undo = one("[data-do=undo]");
    undo.disabled = !past.length;
    undo.title = past.length ? `Take back: ${past[0].title}` : "Nothing to take back";
    one("[data-panel=past] summary small").textContent = past.length ? `${past.length} can be taken back, last: ${past[0].title}` : "nothing to take back";
    one(".past").replaceChildren(...past.map((entry) => make("li", {}, make("span", {}, entry.title), make("small", {}, new Date(entry.when * 1000).toLocaleString()))));
  }

  function sieve(changes) {
    Object.assign(view, { start: 0 }, changes);
    one(".sieve .show").value = view.show;
    for (const chip of all(".findings button")) chip.setAttribute("aria-pressed", String(chip.dataset.kind === view.show));
    page();
    window.kohyaImagePanels.tags();
  }

  // ---- the cards

  async function page() {
    const mine = ++turn;
    const found = await attempt(() => ask("images_page", asked({ start: view.start, count: PAGE })));
    if (!found || mine !== turn) return;
    view.start = found.start;
    one(".cards").replaceChildren(...found.rows.map(card));
    if (!found.rows.length) one(".cards").append(make("p", { className: "quiet" }, "No image matches."));
    for (const pager of all(".pager")) pager.replaceChildren(...turns(found));
    now.rows = found.rows;
    selection();
  }

  function turns({ start, total }) {
    if (total <= PAGE) return [make("span", {}, count(total, "image"))];
    const pages = Math.ceil(total / PAGE), at = Math.floor(start / PAGE);
    const go = (to) => {
      view.start = Math.max(0, Math.min(pages - 1, to)) * PAGE;
      page().then(() => one(".sieve").scrollIntoView({ block: "start" }));
    };
    const button = (text, to, off) => Object.assign(make("button", { type: "button", disabled: off }, text), { onclick: () => go(to) });
    const where = make("input", { value: String(at + 1), inputMode: "numeric", "aria-label": "Page" });
    where.onchange = () => go((parseInt(where.value, 10) || 1) - 1);
    return [button("Previous", at - 1, at === 0), make("span", {}, where, ` of ${pages.toLocaleString("en")} · ${(start + 1).toLocaleString("en")} to ${Math.min(start + PAGE, total).toLocaleString("en")} of ${count(total, "image")}`), button("Next", at + 1, at === pages - 1)];
  }

  const source = (row, side) => address("images_thumb", { path: row.path, side, v: row.version });

  /** A picture, and in shade what the bucket cuts away. */
  function frame(row, side) {
    if (row.broken) return make("div", { className: "frame none" }, "no picture");
    const picture = make("img", { src: source(row, side), loading: "lazy", decoding: "async", alt: row.name });
    if (row.size[0]) picture.style.aspectRatio = `${row.size[0]} / ${row.size[1]}`;
    const made = make("div", { className: "frame" }, picture);
    picture.onerror = () => made.replaceChildren("no picture");
    const [left, top, width, height] = row.seen;
    if (width < 0.999 || height < 0.999) {
      const shade = make("i", { className: "seen" });
      Object.assign(shade.style, { left: `${left * 100}%`, top: `${top * 100}%`, width: `${width * 100}%`, height: `${height * 100}%` });
      made.append(shade);
    }
    return made;
  }

  function badges(row) {
    const found = [];
    if (row.broken) found.push(["bad", row.broken]);
    if (row.role) found.push(["", row.role === "reg" ? "regularisation" : "used for validation"]);
    if (row.unused) found.push(["warn", `not used: ${row.unused}`]);
    if (row.foreign) found.push(["bad", "caption is no UTF-8"]);
    if (row.caption === null) found.push(["warn", "no caption"]);
    else if (!row.caption.trim()) found.push(["warn", "empty caption"]);
    if (row.trigger === false) found.push(["warn", "no trigger word"]);
    if (row.double) found.push(["warn", row.double === "alike" ? `similar to others (group ${row.group + 1})` : `duplicate of others (group ${row.group + 1})`]);
    if (row.cut > 0.02) found.push([row.cut > 0.2 ? "warn" : "", `${Math.round(row.cut * 100)} % cropped`]);
    if (row.larger > 1.5) found.push(["warn", `enlarged ${row.larger.toFixed(1)} times`]);
    if (row.turned) found.push(["warn", "EXIF rotation, ignored"]);
    return found.map(([kind, text]) => make("span", { className: `badge ${kind}` }, text));
  }

  function facts(row) {
    if (!row.bucket) return row.size[0] ? `${row.size[0]} × ${row.size[1]}` : "";
    return `${row.size[0]} × ${row.size[1]} → ${row.bucket[0]} × ${row.bucket[1]}, ${count(row.repeats, "repeat")}`;
  }

  function card(row) {
    const box = make("input", { type: "checkbox", hidden: Boolean(row.fixed), checked: chosen.has(row.name), "aria-label": `Choose ${row.name}` });
    box.onchange = () => (box.checked ? chosen.add(row.name) : chosen.delete(row.name), selection());
    const picture = make("button", { type: "button", className: "look", title: "Enlarge" }, frame(row, 320));
    picture.onclick = () => window.kohyaImagePanels.closer(row);
    const made = make("article", { "data-name": row.name }, picture,
      make("div", { className: "about" }, make("label", { className: "name" }, box, make("span", {}, row.name)), writer(row),
        make("small", { className: "quiet" }, facts(row)), make("div", { className: "badges" }, badges(row))));
    return made;
  }

  /** A caption to write in. It is stored when one leaves it, or presses Ctrl+Enter. */
  function writer(row) {
    const text = make("textarea", { value: row.caption ?? "", rows: 4, "aria-label": `Caption of ${row.name}`, placeholder: row.caption === null ? "no caption" : "empty", spellcheck: true, readOnly: row.foreign || Boolean(row.fixed), title: row.fixed });
    text.onchange = () => store(row, text);
    text.onkeydown = (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) text.blur();
      if (event.key === "Escape") text.value = row.caption ?? "";
    };
    return text;
  }

  async function store(row, text) {
    if (text.value === (row.caption ?? "")) return;
    text.dataset.state = "storing";
    const answer = await attempt(() => ask("images_caption", { folder: now.folder, album: now.album, name: row.name, text: text.value, expected: row.caption, trigger: trigger() }));
    text.dataset.state = answer && !answer.said ? "stored" : "failed";
    if (!answer) return;
    Object.assign(row, answer.row);
    if (answer.said) {
      said("bad", answer.said);
      text.value = row.caption ?? "";
    } else overview({ ...answer, rows: now.rows });
    const about = one(`.cards [data-name="${CSS.escape(row.name)}"] .about`);
    about?.querySelector(".badges").replaceChildren(...badges(row));
    const other = about?.querySelector("textarea");
    if (other && other !== text) other.value = row.caption ?? "";
    window.kohyaImagePanels.tags();
  }

  function selection() {
    one(".chosen").hidden = !chosen.size;
    one(".chosen span").textContent = `${count(chosen.size, "image")} chosen`;
  }

  function undone(found) {
    const left = `${count(found.lefts, "file")} had been changed since and were left: ${found.left.join(", ")}`;
    return `Taken back: ${found.undone}.${found.lefts ? "\n" + left : ""}`;
  }

  const panels = () => window.kohyaImagePanels.refresh();

  const acts = {
    open: () => open(),
    halt: () => working && ask("images_stop", { work: working }).catch(() => {}),
    compare: () => change("images_compare", {}, (found) => found.kinds.double ? `${count(found.kinds.double, "image")} are duplicates of others, or similar to them.` : "No duplicates and no similar images were found.").then((done) => done && now.kinds.double && sieve({ show: "double" })),
    undo: () => change("images_undo", {}, undone),
    remove: () => change("images_remove", { names: [...chosen] }, (found) => `${count(found.done, "image")} moved to the trash. Undo brings back what was moved.`).then((done) => done && (chosen.clear(), selection())),
    none: () => (chosen.clear(), page()),
  };

  function mount(element) {
    root = element.querySelector(".images");
    root.addEventListener("click", ({ target }) => acts[target.closest("[data-do]")?.dataset.do]?.());
    one("#images-folder").addEventListener("keydown", ({ key }) => key === "Enter" && open());
    one(".how").addEventListener("change", () => now && open(true));
    one(".sieve .show").onchange = ({ target }) => sieve({ show: target.value });
    one(".sieve .place").onchange = ({ target }) => sieve({ place: target.value ? target.value.slice(1) : null });
    let pause;
    one(".sieve .words").oninput = ({ target }) => {
      clearTimeout(pause);
      pause = setTimeout(() => sieve({ words: target.value }), 200);
    };
    now = null;
    window.kohyaImageSources.mount(root, { said, open, acts, described, work, attempt });
    recall();
    window.kohyaImagePanels.mount(root, { ask, asked, change, attempt, said, state: () => now, reload: () => open(true), frame, writer, facts, badges, sieve, acts });
  }
  return { mount, wait };
})();
