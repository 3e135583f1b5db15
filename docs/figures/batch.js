// The figure of the scheduler's lesson: requests are dragged (or pressed) into the queue, and every step shows whom the
// scheduler picks, with how many tokens, and whose pages they are. It decides nothing itself: scheduler.js does.

import { Player, chip, drawPool, element, hue, legend, listed, pagesNamed, plural, replaceButtons } from "./dom.js";
import { knownTokens, newRequest } from "./kv_cache.js";
import { Scheduler } from "./scheduler.js";

const PAGE_SIZE = 4;
const SLOTS = 8;
const PAUSE_MS = 900;

/** Prompts as [own tokens, tokens shared with the others], answers in tokens. */
export const PRESETS = [
  {
    title: "Chunks beside streams",
    hint: "The table of “By hand”: send A, step, send B, step, send C, and go on.",
    budget: 8,
    numPages: 16,
    expectedOutput: 0,
    cards: { A: [5, 0, 8], B: [14, 0, 6], C: [9, 0, 4], D: [24, 0, 3] },
  },
  {
    title: "Pages run out",
    hint: "Send A and B, and play. Then restart, let the scheduler expect 8 tokens, and see what caution costs.",
    budget: 16,
    numPages: 6,
    expectedOutput: 0,
    cards: { A: [6, 0, 10], B: [6, 0, 10], C: [3, 0, 6] },
  },
  {
    title: "The same beginning",
    hint: "Send A, B and C together: who waits, and what for? D shares nothing.",
    budget: 32,
    numPages: 24,
    expectedOutput: 0,
    cards: { A: [3, 12, 5], B: [4, 12, 5], C: [2, 12, 5], D: [6, 0, 5] },
  },
  {
    title: "A long prompt",
    hint: "A streams. Send B at step 3, with a budget of 32 and then of 8: how long is A’s step, and when does B begin?",
    budget: 32,
    numPages: 36,
    expectedOutput: 0,
    cards: { A: [6, 0, 18], B: [60, 0, 4], C: [12, 0, 8] },
  },
];

/** What a card stands for. */
export function requestOf(preset, name) {
  const [own, shared, answer] = preset.cards[name];
  return newRequest(name, "*".repeat(shared) + name.repeat(own), answer);
}

export function mount(place) {
  place.replaceChildren();
  new BatchFigure(place);
}

class BatchFigure {
  constructor(place) {
    this.preset = PRESETS[0];
    this.settings = { ...PRESETS[0] };
    this.tray = element("div", { class: "fig-tray", role: "group", "aria-label": "Requests to send" });
    this.queue = element("div", { class: "fig-drop", "aria-label": "Waiting requests" });
    this.hint = element("p", { class: "fig-hint" });
    this.step = element("div", { class: "fig-step" });
    this.story = element("p", { class: "fig-story", "aria-live": "polite" });
    this.lines = element("div", { class: "fig-scroll", tabindex: "0", role: "region", "aria-label": "Steps so far" });
    this.pool = element("div");
    this.acceptDrops();
    this.restart();
    const controls = { next: () => this.next(), hasNext: () => this.scheduler.hasWork, restart: () => this.restart() };
    this.player = new Player(place, controls, PAUSE_MS);
    place.append(
      this.drawSettings(), this.hint,
      element("div", { class: "fig-columns" },
        element("div", {}, element("h4", {}, "Requests"), this.tray),
        element("div", {}, element("h4", {}, "Waiting"), this.queue)),
      this.player.element, this.story,
      element("h4", {}, "This step’s tokens"), this.step,
      element("h4", {}, "Steps so far"), this.lines,
      element("p", { class: "fig-legend" }, "number: tokens of a prompt · 1 bright: a stream’s token · “·” waits · × gave way and waits again · ■ its last"),
      element("h4", {}, `Pages of ${PAGE_SIZE} tokens`), this.pool, legend(),
    );
  }

  drawSettings() {
    const choice = (label, name, values) => {
      const options = values.map((value) => element("option", { value }, String(value)));
      const select = element("select", { "data-setting": name, onchange: () => this.change(name, Number(select.value)) }, ...options);
      this.selects = { ...this.selects, [name]: select };
      select.value = this.settings[name];
      return element("label", {}, label, " ", select);
    };
    const titles = PRESETS.map((preset, i) => element("option", { value: i }, preset.title));
    const scene = element("select", { "data-setting": "scene", onchange: () => this.choose(PRESETS[scene.value]) }, ...titles);
    return element("div", { class: "fig-settings" },
      element("label", {}, "Scene ", scene),
      choice("Token budget", "budget", [1, 4, 8, 16, 32, 64]),
      choice("Pages", "numPages", [6, 8, 12, 16, 24, 36]),
      choice("Expected answer", "expectedOutput", [0, 4, 8, 16]));
  }

  choose(preset) {
    this.preset = preset;
    this.settings = { ...preset };
    for (const [name, select] of Object.entries(this.selects)) select.value = preset[name];
    this.player.byHand(() => this.restart());
  }

  change(name, value) {
    this.settings[name] = value;
    this.player.byHand(() => this.restart());
  }

  acceptDrops() {
    this.queue.addEventListener("dragover", (event) => event.preventDefault());
    this.queue.addEventListener("drop", (event) => {
      event.preventDefault();
      this.send(event.dataTransfer.getData("text/plain"));
    });
  }

  restart() {
    const { budget, numPages, expectedOutput } = this.settings;
    this.scheduler = new Scheduler({ budget, numPages, expectedOutput, pageSize: PAGE_SIZE, slots: SLOTS });
    this.requests = [];
    this.history = []; // per step: request → [text, kind]
    this.hint.textContent = this.preset.hint;
    this.story.textContent = "Nothing has run yet. Drag a request to the queue, or press it.";
    this.batch = null;
    this.draw();
  }

  send(name) {
    if (!(name in this.preset.cards) || this.requests.some((request) => request.name === name)) return;
    const request = requestOf(this.preset, name);
    try {
      this.scheduler.add(request);
    } catch (error) {
      this.story.textContent = `Refused: ${error.message}.`;
      return;
    }
    this.requests.push(request);
    this.draw();
    this.player.refresh();
  }

  next() {
    this.batch = this.scheduler.run();
    const cells = new Map();
    for (const request of this.scheduler.waiting) cells.set(request, request.output ? ["×", "out"] : ["·", "waits"]);
    for (const { request, count, decodes } of this.batch.rows) {
      cells.set(request, [String(count), decodes ? "decode" : "chunk"]);
    }
    this.history.push({ cells, ended: new Set(this.batch.ended) });
    this.story.textContent = this.tell();
    this.draw();
  }

  tell() {
    const { step, admitted, preempted, ended } = this.batch;
    const decodes = this.batch.rows.filter((row) => row.decodes);
    const chunks = this.batch.rows.filter((row) => !row.decodes);
    const names = (rows) => listed(rows.map(({ request }) => request.name));
    const said = [];
    for (const { request, pages } of preempted) {
      said.push(`A page was missing, so ${request.name}, who came last, gives way: its ${plural(pages.length, "page")} go to the cache.`);
    }
    if (this.scheduler.kv.evicted.length) said.push(`Evicted from the cache: ${pagesNamed(this.scheduler.kv.evicted)}.`);
    for (const { request, found } of admitted) {
      const again = request.output.length > 1 || preempted.some((entry) => entry.request === request);
      said.push(`${request.name} ${again ? "resumes" : "starts"}${found ? ` with ${found} tokens found in the cache` : ""}.`);
    }
    if (decodes.length) said.push(`${names(decodes)} ${decodes.length === 1 ? "decodes" : "decode"} one token${decodes.length === 1 ? "" : " each"}.`);
    for (const { request, start, count, samples } of chunks) {
      const what = count === 1 ? `token ${start}` : `tokens ${start} to ${start + count - 1}`;
      said.push(`${request.name} computes ${what}${samples ? " and samples" : ""}.`);
    }
    if (ended.length) said.push(`${listed(ended.map((request) => request.name))} ${ended.length === 1 ? "has" : "have"} ended.`);
    return `Step ${step}. ${said.join(" ")}`;
  }

  draw() {
    this.drawTray();
    this.drawStep();
    this.drawLines();
    const { kv, running } = this.scheduler;
    const holders = (page) => running.filter((request) => request.pages.includes(page)).map((request) => request.name);
    this.pool.replaceChildren(drawPool(kv.numPages, holders, (page) => kv.free.includes(page)));
  }

  drawTray() {
    const cards = Object.entries(this.preset.cards).map(([name, [own, shared, answer]]) => {
      const sent = this.requests.some((request) => request.name === name);
      const prompt = shared ? `prompt ${shared} shared + ${own}` : `prompt ${own}`;
      const ondragstart = (event) => event.dataTransfer.setData("text/plain", name);
      return element("button",
        { type: "button", class: "fig-card", "data-request": name, draggable: String(!sent), disabled: sent, style: `--hue: ${hue(name)}`, ondragstart, onclick: () => this.send(name) },
        element("b", {}, name), ` ${prompt}, answer ${answer}`);
    });
    replaceButtons(this.tray, cards, this.lines);
    const waiting = this.scheduler.waiting.map((request) => chip(request.name));
    this.queue.replaceChildren(...(waiting.length ? waiting : [element("span", { class: "fig-empty" }, "drop here")]));
  }

  drawStep() {
    const rows = this.batch ? this.batch.rows : [];
    const cells = rows.flatMap(({ request, start, count, decodes }) =>
      Array.from({ length: count }, (_, i) => {
        const kind = decodes ? "decode" : "chunk";
        const title = `${request.name}, token ${start + i}: ${kind === "decode" ? "a stream" : "a chunk"}`;
        return element("span", { class: `fig-cell is-${kind}`, style: `--hue: ${hue(request.name)}`, title },
          element("b", {}, request.name), element("small", {}, String(start + i)));
      }));
    const left = Math.max(this.scheduler.budget - cells.length, 0);
    const unused = Array.from({ length: left }, () => element("span", { class: "fig-cell is-unused" }));
    this.step.replaceChildren(...cells, ...unused);
    this.step.setAttribute("aria-label", `${cells.length} of ${this.scheduler.budget} tokens`);
    this.step.setAttribute("role", "img");
  }

  drawLines() {
    const head = element("tr", {}, element("th", {}, ""), ...this.history.map((_, i) => element("th", { scope: "col" }, String(i + 1))));
    const rows = this.requests.map((request) => {
      const cells = this.history.map(({ cells, ended }) => {
        const [text, kind] = cells.get(request) ?? ["", "none"];
        const last = ended.has(request);
        return element("td", { class: `is-${kind}`, title: last ? "its last" : null }, last ? `${text}■` : text);
      });
      const done = `${knownTokens(request).length - request.prompt.length} of ${request.maxTokens}`;
      return element("tr", { style: `--hue: ${hue(request.name)}`, "data-request": request.name },
        element("th", { scope: "row", title: `${done} tokens of its answer` }, chip(request.name)), ...cells);
    });
    const table = element("table", { class: "fig-lines" }, element("thead", {}, head), element("tbody", {}, ...rows));
    this.lines.replaceChildren(rows.length ? table : element("span", { class: "fig-empty" }, "none yet"));
    this.lines.scrollLeft = this.lines.scrollWidth;
  }
}
