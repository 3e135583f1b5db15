// The decisions of mini_sglang/scheduling/scheduler.py, in as much as a figure needs: first come, first served, every
// step read before the next one, its time not bounded, nothing aborted. Who runs, how many tokens, which pages: the engine's own, and tests
// run both side by side.

import { KVCache, knownTokens } from "./kv_cache.js";
import { commonPrefix } from "./radix_cache.js";

const EXPECTED_OUTPUT_WEIGHT = 1 / 16;
const LONG_PROMPT = 2; // steps
const WORTH_SEARCHING = 16;
const WORTH_WAITING = 16;

/** The token that stands for what a model would sample: a letter by position. */
export const nextToken = (request) => String.fromCharCode(97 + (knownTokens(request).length % 26));

export class Scheduler {
  constructor({ budget, numPages, pageSize, slots, expectedOutput }) {
    this.kv = new KVCache(numPages, pageSize);
    this.budget = budget;
    this.slots = slots;
    this.expectedOutput = expectedOutput;
    this.waiting = []; // both in order of arrival
    this.running = [];
    this.arrivals = 0;
    this.isFull = false;
    this.preempted = [];
    this.step = 0;
  }

  get hasWork() {
    return this.waiting.length + this.running.length > 0;
  }

  /** Queue a request. Throws if its prompt can never fit. */
  add(request) {
    const cells = this.kv.numPages * this.kv.pageSize;
    if (request.prompt.length > cells) {
      throw new RangeError(`${request.name} has ${request.prompt.length} prompt tokens, the pool holds ${cells}`);
    }
    request.limit = Math.min(cells + 1, request.prompt.length + request.maxTokens);
    request.arrival = this.arrivals += 1;
    insert(this.waiting, request);
    this.isFull = false;
  }

  /** Schedule a step and read it. Null if there is nothing to compute. */
  run() {
    this.preempted = [];
    this.kv.copies = [];
    this.kv.evicted = [];
    const batch = this.schedule();
    if (batch) this.update(batch);
    return batch;
  }

  // -- before a step --------------------------------------------------------------------------------------------------

  schedule() {
    const plan = new Map();
    let [enoughPages, prefilling] = this.planStreams(plan);
    const budget = new PromptBudget(this.budget - plan.size);
    for (const request of prefilling) {
      if (!this.running.includes(request)) continue; // preempted meanwhile
      const count = budget.chunk(numTokens(request) - request.computed);
      if (!count) continue;
      if (this.makeRoom(request, request.computed + count, plan)) {
        plan.set(request, count);
        budget.take(count, numTokens(request) - request.computed);
      } else enoughPages = false;
    }
    const admitted = [];
    if (this.waiting.length && this.running.length < this.slots && enoughPages && !this.isFull && budget.most()) {
      this.admitWaiting(plan, budget, admitted);
    }
    if (budget.isShared) this.extendLongPrompt(plan, budget);
    return plan.size ? this.launch(plan, admitted) : null;
  }

  /** What shorter prompts leave of the step is for the one that left them half of it. */
  extendLongPrompt(plan, budget) {
    const lacks = ([request, count]) => numTokens(request) - request.computed - count;
    const long = [...plan].find((row) => lacks(row) > 0);
    if (!long) return;
    const [request, count] = long;
    const extra = Math.min(lacks(long), budget.most());
    if (extra && this.kv.reserve(request, request.computed + count + extra)) plan.set(request, count + extra);
  }

  /** One token for every running request that lacks just one, and a page if it begins one. */
  planStreams(plan) {
    const prefilling = [];
    let enoughPages = true;
    for (const request of [...this.running]) {
      if (!this.running.includes(request)) continue; // preempted by one before it
      const tokens = numTokens(request);
      if (tokens - request.computed > 1) prefilling.push(request);
      else if (this.makeRoom(request, tokens, plan)) plan.set(request, 1);
      else enoughPages = false;
    }
    return [enoughPages, prefilling];
  }

  /** Get pages up to `tokens`, if need be from those that came last. If false, the request skips this step. */
  makeRoom(request, tokens, plan) {
    while (!this.kv.reserve(request, tokens)) {
      const victim = this.running.at(-1);
      if (victim === request) return false;
      plan.delete(victim);
      this.preempt(victim);
    }
    return true;
  }

  preempt(request) {
    this.stop(request);
    this.preempted.push({ request, pages: [...request.pages] });
    this.kv.release(request);
    insert(this.waiting, request);
  }

  stop(request) {
    remove(this.running, request);
    this.isFull = false;
  }

  admitWaiting(plan, budget, admitted) {
    for (const request of this.running) this.kv.commit(request, false);
    this.kv.stepRead();
    const computing = [...plan].filter(([r, count]) => count > 1 || r.computed < r.prompt.length).map(([r]) => r);
    const growthOf = (request) => this.expectedPages(request) - request.pages.length;
    let growth = this.running.reduce((sum, request) => sum + growthOf(request), 0);
    for (const request of [...this.waiting]) {
      if (this.running.length === this.slots || budget.most() < (budget.isShared ? WORTH_SEARCHING : 1)) break;
      const match = this.kv.match(request);
      if (this.isBeingComputed(request, match, computing)) continue;
      const count = budget.chunk(numTokens(request) - match.numTokens);
      if (!count) continue; // there may be shorter ones behind it
      const fits = this.expectedToFit(request, match, growth);
      if (!fits || !this.kv.admit(request, match, match.numTokens + count)) {
        this.isFull = true;
        break;
      }
      remove(this.waiting, request);
      insert(this.running, request);
      admitted.push({ request, found: match.numTokens });
      growth += growthOf(request);
      plan.set(request, count);
      computing.push(request);
      budget.take(count, numTokens(request) - match.numTokens);
    }
  }

  /** Whether a request of this very step computes more of the same beginning than the cache has: then it waits. */
  isBeingComputed(request, match, computing) {
    const mine = knownTokens(request);
    const cached = match.numTokens;
    const left = mine.length - cached;
    return left >= 2 && computing.some((other) => {
      const saved = Math.min(commonPrefix(mine, knownTokens(other)), mine.length - 1) - cached;
      return saved > 0 && (saved >= WORTH_WAITING || 2 * saved >= left);
    });
  }

  expectedPages(request) {
    const left = Math.max(this.expectedOutput - request.output.length, this.kv.pageSize);
    const known = knownTokens(request).length;
    return this.kv.pagesFor(Math.min(known + Math.floor(left), request.limit - 1));
  }

  expectedToFit(request, match, growth) {
    if (!this.running.length) return true; // alone it always fits
    return this.expectedPages(request) - match.lockedPages + growth <= this.kv.numAvailable;
  }

  launch(plan, admitted) {
    this.step += 1;
    const rows = [...plan].map(([request, count]) => {
      const start = request.computed;
      const samples = start + count === numTokens(request);
      const decodes = count === 1 && samples && start >= request.prompt.length;
      request.computed += count;
      if (start < request.prompt.length || count > 1) {
        this.kv.commit(request, samples);
        this.isFull = false;
      }
      return { request, start, count, samples, decodes };
    });
    return { step: this.step, rows, admitted, preempted: this.preempted, ended: [] };
  }

  // -- after a step ---------------------------------------------------------------------------------------------------

  update(batch) {
    for (const { request, samples } of batch.rows) {
      if (!samples) continue;
      request.output += nextToken(request);
      if (knownTokens(request).length >= request.limit) {
        this.expectedOutput += EXPECTED_OUTPUT_WEIGHT * (request.output.length - this.expectedOutput);
        this.stop(request);
        this.kv.release(request);
        batch.ended.push(request);
      }
    }
    this.kv.stepRead();
  }
}

/** What a step has left for prompts, as in scheduling/step_cost.py. */
class PromptBudget {
  constructor(tokens) {
    this.tokens = this.all = tokens;
    this.isShared = false; // a long prompt has its half
  }

  chunk(wanted) {
    const most = this.most();
    if (this.isShared) return wanted <= most ? wanted : 0;
    return this.isLong(wanted) ? Math.ceil(most / 2) : Math.min(wanted, most);
  }

  most() {
    return Math.max(this.tokens, this.tokens === this.all ? 1 : 0);
  }

  take(count, wanted) {
    this.tokens -= count;
    if (count < wanted) this.isShared ||= this.isLong(wanted);
  }

  isLong(wanted) {
    return wanted > LONG_PROMPT * Math.max(this.all, 0);
  }
}

/** Those not sampled yet included: whoever computes the last token samples one more. */
export const numTokens = (request) => Math.max(knownTokens(request).length, request.computed + 1);

const byArrival = (a, b) => a.arrival - b.arrival;

function insert(requests, request) {
  requests.push(request);
  requests.sort(byArrival);
}

function remove(requests, request) {
  requests.splice(requests.indexOf(request), 1);
}
