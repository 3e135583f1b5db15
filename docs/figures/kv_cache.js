// Who holds which page: mini_sglang/scheduling/kv_cache.py and page_allocator.py, in as much as a figure needs.
//
// What the engine's manager keeps of a request beside it (its locked node, how many pages are published, its tail) lies
// in the request here. Every step is read before the next one is scheduled.

import { RadixCache } from "./radix_cache.js";

/** A request as the figures have it: `prompt` and `output` are strings, one character a token. */
export function newRequest(name, prompt, maxTokens = 1) {
  return { name, prompt, output: "", maxTokens, pages: [], computed: 0, node: null, published: 0, tail: null };
}

export const knownTokens = (request) => request.prompt + request.output;

export class KVCache {
  constructor(numPages, pageSize, tree = new RadixCache(pageSize)) {
    this.numPages = numPages;
    this.pageSize = pageSize;
    this.tree = tree;
    this.free = Array.from({ length: numPages }, (_, i) => numPages - 1 - i); // a stack: freed last is taken first
    this.counts = Array(numPages).fill(0);
    this.copies = []; // [source, destination] since the last step
    this.evicted = []; // pages, since the last step
    this.replaced = []; // own pages that were exchanged for cached ones in this step
  }

  get numCached() {
    return this.tree.numUnlockedPages;
  }

  get numAvailable() {
    return this.free.length + this.numCached;
  }

  pagesFor(numTokens) {
    return Math.ceil(numTokens / this.pageSize);
  }

  // -- the allocator --------------------------------------------------------------------------------------------------

  take(count) {
    const missing = count - this.free.length;
    if (missing > 0) {
      const pages = this.tree.evict(missing);
      this.evicted.push(...pages);
      this.letGo(pages);
    }
    const pages = Array.from({ length: count }, () => this.free.pop());
    this.retain(pages);
    return pages;
  }

  retain(pages) {
    for (const page of pages) this.counts[page] += 1;
  }

  letGo(pages) {
    for (const page of pages) {
      this.counts[page] -= 1;
      if (this.counts[page] === 0) this.free.push(page);
    }
  }

  // -- getting pages --------------------------------------------------------------------------------------------------

  /** The longest cached beginning that leaves a token to compute. */
  match(request) {
    const tokens = knownTokens(request);
    return this.tree.match(tokens, tokens.length - 1);
  }

  /** Give a request the pages of its fresh match and own ones up to `numTokens`; false if too few can be had. */
  admit(request, match, numTokens) {
    const node = this.tree.lock(match);
    const needed = this.pagesFor(numTokens) - match.pages.length;
    if (needed > this.numAvailable) {
      this.tree.unlock(node);
      return false;
    }
    request.node = node;
    request.published = match.pages.length;
    this.retain(match.pages);
    const own = this.take(needed);
    if (match.partialPage !== null && match.partialPage !== own[0]) this.copies.push([match.partialPage, own[0]]);
    request.pages = [...match.pages, ...own];
    request.computed = match.numTokens;
    return true;
  }

  /** Extend the page table to `numTokens`; false if too few pages can be had. */
  reserve(request, numTokens) {
    const needed = this.pagesFor(numTokens) - request.pages.length;
    if (needed <= 0) return true;
    if (needed > this.numAvailable) return false;
    request.pages.push(...this.take(needed));
    return true;
  }

  // -- sharing pages --------------------------------------------------------------------------------------------------

  /** Publish computed pages; what the cache has already is exchanged for the cache's. */
  commit(request, tail) {
    this.replaced.push(...this.publish(request, tail));
  }

  publish(request, tail) {
    if (!request.node) return [];
    const size = this.pageSize;
    const start = request.published;
    const tokens = knownTokens(request);
    const computed = Math.min(tokens.length, request.computed);
    const full = Math.floor(computed / size);
    if (request.tail && (full > start || tail)) {
      this.letGo(this.tree.unlink(request.tail));
      request.tail = null;
    }
    const own = request.pages.slice(start, full);
    if (own.length) {
      const added = tokens.slice(start * size, full * size);
      this.letGo(this.tree.dropCoveredTails(request.node, added.slice(0, size)));
      const [node, published] = this.tree.extend(request.node, added, own);
      this.retain(published);
      request.pages.splice(start, own.length, ...published);
      request.node = node;
      request.published = full;
    }
    if (tail && computed > full * size) {
      const rest = tokens.slice(full * size, computed);
      this.letGo(this.tree.dropCoveredTails(request.node, rest));
      request.tail = this.tree.addTail(request.node, rest, request.pages[full]);
      if (request.tail) this.retain(request.tail.pages);
    }
    return own.filter((page, i) => page !== request.pages[start + i]);
  }

  /** Pages that were exchanged become free once the step that used them was read. */
  stepRead() {
    this.letGo(this.replaced);
    this.replaced = [];
  }

  // -- giving pages back ----------------------------------------------------------------------------------------------

  /** Take all pages back, leaving what they hold in the cache. */
  release(request) {
    this.letGo(this.publish(request, true));
    if (request.tail) request.tail.locks -= 1;
    if (request.node) this.tree.unlock(request.node);
    this.letGo([...request.pages].reverse());
    Object.assign(request, { pages: [], computed: 0, node: null, published: 0, tail: null });
  }
}
