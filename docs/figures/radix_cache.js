// The tree of mini_sglang/scheduling/radix_cache.py, in as much as a figure needs: one salt, no failed steps.
//
// Tokens are characters of a string, so that slices, comparisons and sorted keys are the language's own. Which pages a
// node holds, what a match finds and what goes first is the engine's: tests run both side by side.

export class Node {
  constructor(parent, tokens, pages) {
    this.parent = parent;
    this.tokens = tokens; // pageSize * pages.length of them, fewer in a tail
    this.pages = pages;
    this.children = new Map(); // first page of tokens → Node
    this.locks = 0;
    this.lastUsed = 0;
  }
}

export class RadixCache {
  constructor(pageSize) {
    this.pageSize = pageSize;
    this.root = new Node(null, "", []);
    this.clock = 0;
  }

  // -- finding --------------------------------------------------------------------------------------------------------

  /** The longest cached beginning of `tokens.slice(0, limit)`. Changes nothing. */
  match(tokens, limit) {
    const size = this.pageSize;
    const match = { node: this.root, offset: 0, pages: [], lockedPages: 0, partialPage: null, partialTokens: 0 };
    let position = 0;
    while (position + size <= limit) {
      const child = match.node.children.get(tokens.slice(position, position + size));
      if (!child) break;
      const pages = this.commonPages(child, tokens, position, Math.floor((limit - position) / size));
      match.pages.push(...child.pages.slice(0, pages));
      if (child.locks) match.lockedPages += pages;
      position += pages * size;
      match.node = child;
      match.offset = pages;
      if (pages < child.pages.length) break;
    }
    this.matchInsidePage(match, tokens.slice(position, Math.min(limit, position + size)));
    match.numTokens = position + match.partialTokens;
    return match;
  }

  commonPages(child, tokens, position, limit) {
    const most = Math.min(child.pages.length, limit) * this.pageSize;
    return Math.floor(commonPrefix(child.tokens.slice(0, most), tokens.slice(position)) / this.pageSize);
  }

  /** Find the page below the match that shares the longest beginning, shorter than a page, with `rest`. */
  matchInsidePage(match, rest) {
    const { node, offset } = match;
    if (!rest || this.pageSize === 1) return;
    const consider = (page, tokens) => {
      const shared = commonPrefix(tokens, rest);
      if (shared > match.partialTokens) [match.partialPage, match.partialTokens] = [page, shared];
    };
    if (offset < node.pages.length) {
      const start = offset * this.pageSize;
      consider(node.pages[offset], node.tokens.slice(start, start + this.pageSize));
      return;
    }
    const keys = [...node.children.keys()].sort();
    const at = keys.filter((key) => key < rest).length;
    for (const key of keys.slice(Math.max(at - 1, 0), at + 1)) consider(node.children.get(key).pages[0], key);
  }

  // -- locking --------------------------------------------------------------------------------------------------------

  /** Protect the whole pages of a fresh match; returns the node to pass to `unlock`. */
  lock(match) {
    const inside = match.offset < match.node.pages.length;
    const deepest = inside ? this.split(match.node, match.offset) : match.node;
    this.clock += 1;
    for (let node = deepest; node; node = node.parent) this.lockOne(node);
    return deepest;
  }

  lockOne(node) {
    node.locks += 1;
    node.lastUsed = this.clock;
  }

  unlock(deepest) {
    this.clock += 1;
    for (let node = deepest; node; node = node.parent) {
      node.locks -= 1;
      node.lastUsed = this.clock;
    }
  }

  /** Cut a node after some pages; returns the new upper part. The node itself stays the lower one. */
  split(node, pages) {
    const cut = pages * this.pageSize;
    const upper = new Node(node.parent, node.tokens.slice(0, cut), node.pages.slice(0, pages));
    upper.locks = node.locks;
    upper.lastUsed = node.lastUsed;
    node.parent.children.set(this.key(node), upper);
    node.tokens = node.tokens.slice(cut);
    node.pages = node.pages.slice(pages);
    node.parent = upper;
    upper.children.set(this.key(node), node);
    return upper;
  }

  key(node) {
    return node.tokens.slice(0, this.pageSize);
  }

  // -- growing --------------------------------------------------------------------------------------------------------

  /** Add whole pages below a locked node and move the lock down; returns the deepest node and the tree's own pages. */
  extend(node, tokens, pages) {
    const size = this.pageSize;
    const canonical = [];
    let position = 0;
    this.clock += 1;
    while (position < tokens.length) {
      const child = node.children.get(tokens.slice(position, position + size));
      if (!child) break;
      const common = this.commonPages(child, tokens, position, (tokens.length - position) / size);
      node = common < child.pages.length ? this.split(child, common) : child;
      this.lockOne(node);
      canonical.push(...node.pages);
      position += common * size;
    }
    if (position < tokens.length) {
      const added = pages.slice(position / size);
      node = this.append(node, tokens.slice(position), added);
      canonical.push(...added);
    }
    return [node, canonical];
  }

  append(node, tokens, pages) {
    if (node.locks === 1 && !node.children.size && node.parent) {
      node.tokens += tokens;
      node.pages.push(...pages);
      node.lastUsed = this.clock;
      return node;
    }
    const child = this.addChild(node, tokens, [...pages]);
    this.lockOne(child);
    return child;
  }

  addChild(node, tokens, pages) {
    const child = new Node(node, tokens, pages);
    node.children.set(this.key(child), child);
    return child;
  }

  /** Add a locked page of fewer tokens than a page; null if one that begins with these tokens is there already. */
  addTail(node, tokens, page) {
    if ([...node.children.keys()].some((key) => key.startsWith(tokens))) return null;
    this.clock += 1;
    const tail = this.addChild(node, tokens, [page]);
    this.lockOne(tail);
    return tail;
  }

  unlink(node) {
    node.parent.children.delete(this.key(node));
    return node.pages;
  }

  /** Remove unlocked tails below a node that hold nothing but a beginning of `key`; returns their pages. */
  dropCoveredTails(node, key) {
    const dropped = [];
    const before = [...node.children.keys()].sort().filter((other) => other < key);
    while (before.length && key.startsWith(before.at(-1))) {
      const tail = node.children.get(before.pop());
      if (!tail.locks) dropped.push(...this.unlink(tail));
    }
    return dropped;
  }

  // -- shrinking ------------------------------------------------------------------------------------------------------

  /** Forget up to `count` pages, from the ends of the least recently used unlocked leaves; returns them. */
  evict(count) {
    const evicted = [];
    while (evicted.length < count) {
      const leaves = [...this.nodes()].filter((node) => node.parent && !node.locks && !node.children.size);
      if (!leaves.length) break;
      const oldest = leaves.reduce((a, b) => (b.lastUsed < a.lastUsed ? b : a));
      evicted.push(...this.trim(oldest, count - evicted.length));
    }
    return evicted;
  }

  trim(leaf, count) {
    if (count >= leaf.pages.length) return this.unlink(leaf);
    const taken = leaf.pages.splice(-count);
    leaf.tokens = leaf.tokens.slice(0, leaf.pages.length * this.pageSize);
    return taken;
  }

  /** Every node, the root first. */
  *nodes(top = this.root) {
    yield top;
    for (const child of top.children.values()) yield* this.nodes(child);
  }

  /** Pages that could be evicted. */
  get numUnlockedPages() {
    return [...this.nodes()].reduce((sum, node) => sum + (node.locks ? 0 : node.pages.length), 0);
  }
}

export function commonPrefix(a, b) {
  const most = Math.min(a.length, b.length);
  for (let i = 0; i < most; i += 1) if (a[i] !== b[i]) return i;
  return most;
}
