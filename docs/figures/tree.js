// The figure of the radix cache's lesson: prompts come and leave, and the tree is drawn after every act: match, lock (and
// split), evict, compute, unlock. It decides nothing itself: radix_cache.js and kv_cache.js do.

import { Player, chip, drawPool, element, hue, legend, listed, pagesNamed, plural, prefersStillness, replaceButtons } from "./dom.js";
import { KVCache, newRequest } from "./kv_cache.js";
import { RadixCache } from "./radix_cache.js";

const PAGE_SIZE = 4;
const NUM_PAGES = 15;
const PAUSE_MS = 1400;
const MOST_WORDS = 40;
const SYSTEM = "You are a terse helpful bot .";

export const PROMPTS = {
  A: `${SYSTEM} User : name a river in France`,
  B: `${SYSTEM} User : name a river in Egypt please`,
  C: `${SYSTEM} User : tell me a joke about trees`,
  D: `${SYSTEM} User : name a river in France again`,
  E: "Once upon a time there was a tree that knew every beginning and forgot every end , as trees do in the long winters of the far north where nobody asks them anything",
};

/** A vocabulary that grows as words are met: one token per word, as one character. */
export class Words {
  constructor() {
    this.words = [];
  }

  encode(text) {
    const ids = text.trim().split(/\s+/).filter(Boolean).map((word) => {
      if (!this.words.includes(word)) this.words.push(word);
      return this.words.indexOf(word);
    });
    return String.fromCharCode(...ids.map((id) => id + 1));
  }

  decode(tokens) {
    return [...tokens].map((token) => this.words[token.charCodeAt(0) - 1]).join(" ");
  }
}

/** Tells when it was locked and when pages left it. */
class WatchedTree extends RadixCache {
  lock(match) {
    const cut = match.offset < match.node.pages.length ? match.node : null;
    const node = super.lock(match);
    this.onLock(node, cut);
    return node;
  }

  evict(count) {
    const pages = super.evict(count);
    this.onEvict(pages);
    return pages;
  }
}

export function mount(place) {
  place.replaceChildren();
  new TreeFigure(place);
}

class TreeFigure {
  constructor(place) {
    this.prompts = element("div", { class: "fig-tray", role: "group", "aria-label": "Prompts to send" });
    this.own = element("input", { type: "text", "aria-label": "A prompt of your own", placeholder: "or type a prompt of your own", maxlength: "300" });
    this.form = element("form", { class: "fig-form", onsubmit: (event) => this.sendOwn(event) }, this.own, element("button", { class: "fig-button" }, "Send"));
    this.requests = element("div", { class: "fig-drop", role: "group", "aria-label": "Running requests" });
    this.title = element("h4", { class: "fig-act" });
    this.story = element("p", { class: "fig-story", "aria-live": "polite" });
    this.tree = element("div", { class: "fig-scroll fig-tree", tabindex: "0", role: "region", "aria-label": "The tree" });
    this.pool = element("div");
    this.reset();
    const controls = {
      next: () => this.show(this.at + 1),
      back: () => this.show(this.at - 1),
      hasNext: () => this.at < this.frames.length - 1,
      hasBack: () => this.at > 0,
      restart: () => this.reset(),
    };
    this.player = new Player(place, controls, PAUSE_MS);
    place.append(
      element("h4", {}, "Prompts"), this.prompts, this.form,
      element("h4", {}, "Running"), this.requests,
      this.player.element, this.title, this.story, this.tree,
      element("h4", {}, `Pages of ${PAGE_SIZE} words`), this.pool, legend(),
    );
  }

  reset() {
    this.words = new Words();
    this.kv = new KVCache(NUM_PAGES, PAGE_SIZE, new WatchedTree(PAGE_SIZE));
    this.running = new Map();
    this.texts = { ...PROMPTS };
    this.numbers = new WeakMap();
    this.frames = [];
    this.frame("Empty", "Nothing is cached. Send A, then B, and watch where they part.");
    this.show(0);
  }

  // -- acts -----------------------------------------------------------------------------------------------------------

  act(change) {
    const first = this.frames.length;
    this.player.pause();
    change();
    if (prefersStillness()) this.show(this.frames.length - 1);
    else {
      this.show(first);
      this.player.play();
    }
    this.player.refresh();
  }

  send(name) {
    if (!this.running.has(name)) this.act(() => this.come(name));
  }

  sendOwn(event) {
    event.preventDefault();
    const words = this.own.value.trim().split(/\s+/).filter(Boolean);
    if (!words.length) return;
    const name = String.fromCharCode(65 + Object.keys(this.texts).length);
    if (name > "Z") return;
    this.texts[name] = words.slice(0, MOST_WORDS).join(" ");
    this.own.value = "";
    this.send(name);
  }

  come(name) {
    const { kv } = this;
    const request = newRequest(name, this.words.encode(this.texts[name]));
    const length = request.prompt.length;
    const match = kv.match(request);
    this.frame(`${name} · match`, this.tellMatch(name, match, length), { match });
    kv.tree.onLock = (node, cut) => {
      const split = cut ? " The run was cut where the match ends; the old node is the lower half." : "";
      this.frame(`${name} · lock${cut ? " and split" : ""}`, `From the matched node up to the root, each node has a lock more.${split}`, { fresh: cut ? [node] : [], holder: [name, node] });
    };
    kv.tree.onEvict = (pages) => {
      this.frame(`${name} · evict`, `Too few pages are free. From the end of the leaf that was used least recently: ${pagesNamed(pages)}.`, { evicted: pages });
    };
    kv.copies = [];
    if (!kv.admit(request, match, length)) {
      this.frame(`${name} · has to wait`, `${name} needs ${kv.pagesFor(length) - match.pages.length} pages of its own, and ${kv.numAvailable} are free or evictable. Its locks are taken back. Let somebody leave, and send it again.`);
      return;
    }
    this.running.set(name, request);
    request.computed = length;
    const known = new Set(kv.tree.nodes());
    kv.commit(request, true);
    kv.stepRead();
    const copied = kv.copies.map(([from, to]) => ` Page ${from} was copied to page ${to}, to begin with.`).join("");
    const computed = plural(length - match.numTokens, "word");
    const fresh = [...kv.tree.nodes()].filter((node) => !known.has(node));
    this.frame(`${name} · compute`, `${computed} computed, in pages of ${name}’s own; they are in the tree now.${copied}`, { fresh });
  }

  tellMatch(name, match, length) {
    const has = `${name} has ${plural(length, "word")}.`;
    if (!match.numTokens) return `${has} No beginning of it is cached.`;
    const whole = match.pages.length ? `${plural(match.pages.length, "whole page")} (${listed(match.pages)})` : "no whole page";
    const part = match.partialTokens ? `, and ${plural(match.partialTokens, "word")} of page ${match.partialPage}, to copy` : "";
    return `${has} ${match.numTokens} are found: ${whole}${part}.`;
  }

  leave(name) {
    const request = this.running.get(name);
    this.running.delete(name);
    this.kv.release(request);
    this.frame(`${name} · unlock`, `${name} has left. What it computed stays: cached, and nobody’s.`);
  }

  // -- frames ---------------------------------------------------------------------------------------------------------

  /** Keep what is to be drawn of this moment. `marks`: match, fresh nodes, evicted pages, who holds a node already. */
  frame(title, text, marks = {}) {
    const { kv } = this;
    const deepest = new Map([...this.running].map(([name, request]) => [name, request.node]));
    if (marks.holder) deepest.set(...marks.holder);
    const matched = new Set(marks.match?.pages ?? []);
    const describe = (node) => ({
      number: this.number(node),
      locks: node.locks,
      isFresh: marks.fresh?.includes(node) ?? false,
      holders: [...deepest].filter(([, other]) => other === node).map(([name]) => name),
      pages: node.pages.map((page, i) => ({
        page,
        text: this.words.decode(node.tokens.slice(i * PAGE_SIZE, (i + 1) * PAGE_SIZE)),
        isMatched: matched.has(page),
        isPart: marks.match?.partialPage === page,
      })),
      children: [...node.children.values()].sort((a, b) => (a.tokens < b.tokens ? -1 : 1)).map(describe),
    });
    const holders = Array.from({ length: NUM_PAGES }, (_, page) => [...this.running].filter(([, r]) => r.pages.includes(page)).map(([name]) => name));
    this.frames.push({ title, text, root: describe(kv.tree.root), holders, free: [...kv.free, ...(marks.evicted ?? [])], running: [...this.running.keys()], evicted: marks.evicted ?? [] });
  }

  number(node) {
    if (!this.numbers.has(node)) this.numbers.set(node, this.frames.length);
    return this.numbers.get(node);
  }

  show(index) {
    this.at = index;
    const frame = this.frames[index];
    const free = new Set(frame.free);
    this.title.textContent = frame.title;
    this.story.textContent = frame.text;
    this.tree.replaceChildren(element("ul", {}, this.drawNode(frame.root, true)));
    this.pool.replaceChildren(drawPool(NUM_PAGES, (page) => frame.holders[page], (page) => free.has(page)));
    for (const page of frame.evicted) this.pool.querySelectorAll(".fig-page")[page].classList.add("is-evicted");
    this.drawControls();
  }

  drawControls() {
    const cards = Object.entries(this.texts).map(([name, text]) =>
      element("button",
        { type: "button", class: "fig-card", "data-request": name, title: text, disabled: this.running.has(name), style: `--hue: ${hue(name)}`, onclick: () => this.send(name) },
        element("b", {}, name), ` ${text.startsWith(SYSTEM) ? `…${text.slice(SYSTEM.length + 7)}` : `${text.slice(0, 34)}${text.length > 34 ? "…" : ""}`}`));
    replaceButtons(this.prompts, cards, this.own);
    const leaving = [...this.running.keys()].map((name) =>
      element("button",
        { type: "button", class: "fig-card is-running", "data-leave": name, style: `--hue: ${hue(name)}`, onclick: () => this.act(() => this.leave(name)) },
        element("b", {}, name), " leaves"));
    replaceButtons(this.requests, leaving.length ? leaving : [element("span", { class: "fig-empty" }, "nobody")], this.own);
  }

  drawNode(node, isRoot = false) {
    const locks = element("span", { class: "fig-locks" }, node.locks ? plural(node.locks, "lock") : isRoot ? "" : "evictable");
    const pages = node.pages.map(({ page, text, isMatched, isPart }) =>
      element("span", { class: `fig-run${isMatched ? " is-matched" : ""}${isPart ? " is-part" : ""}` }, text, element("small", {}, `page ${page}`)));
    const box = element("div", { class: `fig-node${node.locks ? " is-locked" : ""}${node.isFresh ? " is-fresh" : ""}` },
      ...(isRoot ? [element("b", {}, "root")] : pages), locks, ...node.holders.map(chip));
    const children = node.children.length ? [element("ul", {}, ...node.children.map((child) => this.drawNode(child)))] : [];
    return element("li", {}, box, ...children);
  }
}
