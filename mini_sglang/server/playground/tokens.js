// Text made of tokens that tell how likely they were: the one card that says it, and how pointer and keys reach it.

import { byId, element } from "./dom.js";

const card = byId("token-card");
const entriesOf = new WeakMap(); // a token's element → the log-probability entries behind it

/** Text that grows, as it is or token by token, in `parent`. */
export class TokenText {
  #decoder = new TextDecoder();
  #part = []; // entries whose bytes make no whole character yet

  constructor(parent) {
    this.parent = parent;
  }

  addText(text) {
    this.parent.append(text);
  }

  /** Entries as chat completions have them: {token, logprob, bytes, top_logprobs}. */
  addTokens(entries, className = "token") {
    for (const entry of entries) {
      this.#part.push(entry);
      const text = entry.bytes ? this.#decoder.decode(Uint8Array.from(entry.bytes), { stream: true }) : entry.token;
      if (text) this.#append(text, className);
    }
  }

  /** No more tokens will come: shows what is left of a character. */
  end() {
    if (this.#part.length) this.#append(this.#decoder.decode() || "\ufffd", "token");
  }

  #append(text, className) {
    const isFirst = !this.parent.querySelector(".token");
    const token = element("span", { className, tabIndex: isFirst ? 0 : -1 }, text);
    const probability = Math.exp(this.#part.reduce((sum, entry) => sum + entry.logprob, 0));
    token.style.setProperty("--unlikely", (1 - probability).toFixed(3));
    entriesOf.set(token, this.#part);
    this.#part = [];
    this.parent.append(token);
  }
}

/** Lets pointer, touch and keys open the card for tokens inside `root`. */
export function showCardsIn(root) {
  const tokenAt = (event) => event.target.closest?.(".token");
  root.addEventListener("pointerover", (event) => tokenAt(event) && open(tokenAt(event)));
  root.addEventListener("pointerout", (event) => tokenAt(event) && close());
  root.addEventListener("focusin", (event) => tokenAt(event) && open(tokenAt(event)));
  root.addEventListener("focusout", close);
  root.addEventListener("scroll", place, { passive: true });
  root.addEventListener("keydown", (event) => {
    const token = tokenAt(event);
    if (event.key === "Escape") close();
    if (token) moveFocus(token, event);
  });
}

/** Arrow keys move among the tokens of one text, of which only one is a stop of the Tab key. */
function moveFocus(token, event) {
  const tokens = [...token.parentElement.querySelectorAll(".token")];
  const here = tokens.indexOf(token);
  const last = tokens.length - 1;
  const target = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: last }[event.key];
  if (target === undefined) return;
  event.preventDefault();
  const next = tokens[Math.min(Math.max(target, 0), last)];
  token.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

let described = null; // the token that the card is open for

function open(token) {
  close();
  described = token;
  token.setAttribute("aria-describedby", card.id);
  card.replaceChildren(...entriesOf.get(token).map(describe));
  card.hidden = false;
  place();
}

/** Puts the card above its token, or below where there is no room. */
function place() {
  if (!described) return;
  const { left, top, bottom } = described.getClientRects()[0];
  const { width, height } = card.getBoundingClientRect();
  const above = top - height - 8;
  card.style.left = `${Math.max(8, Math.min(left, document.documentElement.clientWidth - width - 8))}px`;
  card.style.top = `${above > 8 ? above : bottom + 8}px`;
}

function close() {
  described?.removeAttribute("aria-describedby");
  described = null;
  card.hidden = true;
}

function describe(entry) {
  const others = entry.top_logprobs.map((other) => row(other, other.token === entry.token));
  return element(
    "div",
    {},
    element("p", {}, element("code", {}, visible(entry.token)), ` ${percent(entry)}`),
    element("p", { className: "quiet" }, `log-probability ${entry.logprob.toFixed(3)}`),
    others.length ? element("ul", { ariaLabel: "Likeliest tokens" }, ...others) : "",
  );
}

function row(entry, isChosen) {
  const bar = element("span", { className: "bar" });
  bar.style.setProperty("--p", Math.exp(entry.logprob).toFixed(4));
  const name = element("code", {}, visible(entry.token));
  return element("li", { className: isChosen ? "chosen" : "" }, name, bar, element("span", {}, percent(entry)));
}

const percent = ({ logprob }) => {
  const value = 100 * Math.exp(logprob);
  return value > 0 && value < 0.1 ? "< 0.1 %" : `${value.toFixed(1)} %`;
};

const visible = (text) => text.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "∅";
