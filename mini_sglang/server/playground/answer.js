// One answer on the page: its text while it streams, and its figures.

import { element } from "./dom.js";
import { TokenText } from "./tokens.js";

const MEANINGS = {
  TTFT: "time to first token",
  "tokens/s": "tokens per second after the first",
  prompt: "tokens of the conversation so far",
  cached: "of those, tokens that the prefix cache held",
};

/** What the model says, from its first chunk to its last. */
export class Answer {
  content = ""; // as a message of the conversation
  #start = performance.now();
  #first = 0; // arrival of the first and of the latest token
  #latest = 0;
  #numTokens = 0;
  #pending = []; // tokens that have not become text yet
  #usage = null;
  #finishReason = null;
  #reasoning = null;
  #text;

  constructor() {
    this.body = element("div", { className: "text" });
    this.stats = element("dl", { className: "stats" });
    this.actions = element("div", { className: "actions" });
    const label = element("h3", { className: "for-screen-readers" }, "Answer");
    this.node = element("article", { className: "answer streaming" }, label, this.body, this.stats, this.actions);
    this.#text = new TokenText(this.body);
  }

  /** Shows what a chunk adds. */
  add(chunk) {
    this.#usage = chunk.usage ?? this.#usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    this.#finishReason = choice.finish_reason ?? this.#finishReason;
    const reasoning = choice.delta.reasoning_content ?? choice.delta.reasoning ?? "";
    const text = choice.delta.content ?? "";
    const tokens = choice.logprobs?.content ?? [];
    if (reasoning || text || tokens.length) this.#note(tokens.length || 1);
    this.content += text;
    this.#pending.push(...tokens);
    if (reasoning) this.#show(this.#reasoningText(), reasoning);
    if (text) this.#show(this.#text, text);
    this.#showStats();
  }

  /** The stream has ended; `reason` says why if the model did not. */
  end(reason = null) {
    this.#text.addTokens(this.#pending.splice(0), "token marker"); // an end token, or the beginning of a stop string
    this.#text.end();
    this.#finishReason = reason ?? this.#finishReason;
    this.node.classList.remove("streaming");
    this.#showStats();
  }

  /** A sentence for those who do not see the figures. */
  get summary() {
    return `Answer ended (${this.#finishReason ?? "incomplete"}), ${this.#count} tokens.`;
  }

  get #count() {
    return this.#usage?.completion_tokens ?? this.#numTokens;
  }

  #note(numTokens) {
    this.#latest = performance.now();
    this.#first ||= this.#latest;
    this.#numTokens += numTokens;
  }

  #show(target, text) {
    if (this.#pending.length) target.addTokens(this.#pending.splice(0));
    else target.addText(text);
  }

  #reasoningText() {
    if (!this.#reasoning) {
      const text = element("div", { className: "text" });
      this.body.before(element("details", { className: "reasoning", open: true }, element("summary", {}, "Reasoning"), text));
      this.#reasoning = new TokenText(text);
    }
    return this.#reasoning;
  }

  #showStats() {
    if (!this.#first) return;
    const seconds = (this.#latest - this.#first) / 1000;
    const figures = {
      TTFT: `${Math.round(this.#first - this.#start)} ms`,
      "tokens/s": seconds > 0 ? ((this.#count - 1) / seconds).toFixed(1) : "–",
      tokens: String(this.#count),
    };
    if (this.#usage) {
      figures.prompt = String(this.#usage.prompt_tokens);
      figures.cached = String(this.#usage.prompt_tokens_details?.cached_tokens ?? 0);
    }
    if (this.#finishReason) figures["ended by"] = this.#finishReason;
    this.stats.replaceChildren(
      ...Object.entries(figures).map(([name, value]) =>
        element("div", {}, element("dt", { title: MEANINGS[name] ?? "" }, name), element("dd", {}, value)),
      ),
    );
  }
}
