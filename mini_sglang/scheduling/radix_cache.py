"""The prefix cache: a compressed trie from token sequences to the pages that hold their keys and values.

It knows tokens, page ids and locks. It knows no requests, never allocates a page, and does not know which other holders
a page has: `KVCacheManager` counts a reference for every page that enters or leaves the tree.

Token sequences are `array("i")`, whose slices compare and copy at the speed of memory. Sharing KV through a radix tree
with LRU eviction is RadixAttention (Zheng et al., "SGLang", 2024); keying a child by its whole first page is what makes
the tree exact for pages of more than one token.

        root(salt)                                   page_size 4, 2 pages + 1 page | 1 page | a tail of 2 tokens
          ├── [the cat sat on │ the mat and then]
          │      ├── [it slept until noon]
          │      └── [it ran]                        a tail: fewer tokens than a page, always a leaf
          └── [the dog sat on]                       shares two tokens with its sibling, but no page
"""

from __future__ import annotations

import heapq
import struct
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


class Node:
    """A run of pages below its parent. `key` is its first page of tokens (a root's is its salt), as bytes."""

    __slots__ = (
        "children",
        "dead",
        "key",
        "last_used",
        "locks",
        "page_ids",
        "parent",
        "queued",
        "sorted_keys",
        "tokens",
    )

    def __init__(self, parent: Node | None, key: bytes, tokens: array[int], page_ids: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens  # page_size * len(page_ids) of them, fewer in a tail
        self.page_ids = page_ids
        self.children: dict[bytes, Node] = {}
        self.sorted_keys: list[bytes] = []  # of children; neighbours share the longest prefixes
        self.locks = 0  # requests whose deepest node is this one or below
        self.last_used = 0
        self.queued = False  # has an entry in the eviction heap
        self.dead = False  # removed from the tree, though a request may still hold a lock on it


@dataclass(slots=True)
class Match:
    """The longest cached prefix of a token sequence. Valid until the tree changes next.

    `page_ids` are whole pages, the last of them in `node` at `offset - 1`. `partial_page` holds `num_partial_tokens`
    more at its start; to use them, it has to be copied.
    """

    node: Node | None = None
    offset: int = 0
    page_ids: list[int] = field(default_factory=list)
    num_locked_pages: int = 0  # of page_ids: those that running requests hold already
    partial_page: int | None = None
    num_partial_tokens: int = 0
    num_tokens: int = 0


class RadixCache:
    """The tree. Costs are per node and per page, not per token, apart from comparing and copying memory.

    Recency is a counter that rises with every use, so equal histories evict equally.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0  # in the tree
        self.num_locked_pages = 0  # of these, in nodes that are locked
        self.version = 0  # rises when tokens may find another length
        self._roots: dict[bytes, Node] = {}
        self._clock = 0
        self._heap: list[tuple[int, int, Node]] = []  # (last_used when queued, tie-break, unlocked leaf), maybe stale
        self._entries = 0

    # -- finding ------------------------------------------------------------------------------------------------------

    def match(self, salt: bytes, tokens: array[int], limit: int) -> Match:
        """The longest prefix of `tokens[:limit]` that is cached under `salt`. Changes nothing."""
        match = Match(node=self._roots.get(salt))
        node = match.node
        if node is None:
            return match
        size, position = self.page_size, 0
        while position + size <= limit:
            child = node.children.get(tokens[position : position + size].tobytes())
            if child is None:
                break
            pages = self._common_pages(child, tokens, position, (limit - position) // size)
            match.page_ids += child.page_ids[:pages] if pages < len(child.page_ids) else child.page_ids
            if child.locks:
                match.num_locked_pages += pages
            position += pages * size
            node = match.node = child
            match.offset = pages
            if pages < len(child.page_ids):
                break
        self._match_inside_page(match, tokens[position : min(limit, position + size)])
        match.num_tokens = position + match.num_partial_tokens
        return match

    def _common_pages(self, child: Node, tokens: array[int], position: int, limit: int) -> int:
        """The number of leading pages of `child` (at most `limit`) that equal `tokens` from `position` on."""
        pages = min(len(child.page_ids), limit)
        wanted = tokens[position : position + pages * self.page_size]
        held = child.tokens if len(child.tokens) == len(wanted) else child.tokens[: len(wanted)]
        return pages if held == wanted else common_prefix(held, wanted) // self.page_size

    def _match_inside_page(self, match: Match, rest: array[int]) -> None:
        """Find the page below `match` that shares the longest prefix, shorter than a page, with `rest`."""
        node = match.node
        if node is None or not rest or self.page_size == 1:
            return
        if match.offset < len(node.page_ids):  # inside a run there is one way on
            start = match.offset * self.page_size
            shared = common_prefix(node.tokens[start : start + self.page_size], rest)
            if shared:
                match.partial_page, match.num_partial_tokens = node.page_ids[match.offset], shared
            return
        key = rest.tobytes()
        at = bisect_left(node.sorted_keys, key)
        for neighbour in node.sorted_keys[max(at - 1, 0) : at + 1]:
            child = node.children[neighbour]
            shared = common_prefix(child.tokens[: self.page_size], rest)
            if shared > match.num_partial_tokens:
                match.partial_page, match.num_partial_tokens = child.page_ids[0], shared

    # -- locking ------------------------------------------------------------------------------------------------------

    def lock(self, salt: bytes, match: Match) -> Node:
        """Protect the whole pages of a fresh `match` from eviction; returns the node to pass to `unlock`.

        Splits the last node if only its first pages matched, and makes the root of a new salt.
        """
        node = match.node
        if node is None:
            node = self._roots[salt] = Node(None, salt, array("i"), [])
        elif match.offset < len(node.page_ids):
            node = self._split(node, match.offset)
        deepest = node
        self._clock += 1
        while node is not None:
            self._lock_one(node)
            node = node.parent
        return deepest

    def unlock(self, node: Node) -> None:
        """Release the lock on a node that `lock`, or an `extend` from it, returned."""
        self._clock += 1
        current: Node | None = node
        while current is not None:
            current.locks -= 1
            current.last_used = self._clock
            parent = current.parent
            if current.locks == 0 and not current.dead:
                self.num_locked_pages -= len(current.page_ids)
                self._release_leaf(current)
            current = parent

    def _lock_one(self, node: Node) -> None:
        if node.locks == 0:
            self.num_locked_pages += len(node.page_ids)
        node.locks += 1
        node.last_used = self._clock

    def _split(self, node: Node, pages: int) -> Node:
        """Split `node` after `pages` pages and return the new upper part.

        `node` stays the lower part, so that requests which have locked it still hold all of it.
        """
        cut = pages * self.page_size
        upper = Node(node.parent, node.key, node.tokens[:cut], node.page_ids[:pages])
        upper.locks, upper.last_used = node.locks, node.last_used
        assert node.parent is not None  # a root has no pages to split
        node.parent.children[node.key] = upper
        node.tokens = node.tokens[cut:]
        node.page_ids = node.page_ids[pages:]
        node.key = node.tokens[: self.page_size].tobytes()
        node.parent = upper
        upper.children[node.key] = node
        upper.sorted_keys.append(node.key)
        return upper

    # -- growing ------------------------------------------------------------------------------------------------------

    def extend(self, node: Node, tokens: array[int], page_ids: list[int]) -> tuple[Node, list[int]]:
        """Add whole pages below a locked `node` and move the caller's lock down to their end.

        `len(tokens) == page_size * len(page_ids)`. Returns the deepest node and the tree's page ids for these tokens:
        where an equal page was cached already, that one instead of the caller's.
        """
        size, position, canonical = self.page_size, 0, []
        self._clock += 1
        while position < len(tokens):
            child = node.children.get(tokens[position : position + size].tobytes())
            if child is None:
                break
            pages = self._common_pages(child, tokens, position, (len(tokens) - position) // size)
            node = self._split(child, pages) if pages < len(child.page_ids) else child
            self._lock_one(node)
            canonical += node.page_ids
            position += pages * size
        if position < len(tokens):
            added = page_ids[position // size :]
            node = self._append(node, tokens[position:] if position else tokens, added)
            canonical += added
        return node, canonical

    def _append(self, node: Node, tokens: array[int], page_ids: list[int]) -> Node:
        """Put new pages below `node`: into it if it is the caller's alone and a leaf, else as a child."""
        self.version += 1
        self.num_pages += len(page_ids)
        if node.locks == 1 and not node.children and node.parent is not None:
            node.tokens.extend(tokens)
            node.page_ids += page_ids
            node.last_used = self._clock
            self.num_locked_pages += len(page_ids)
            return node
        child = self._add_child(node, tokens, page_ids)
        self._lock_one(child)
        return child

    def add_tail(self, node: Node, tokens: array[int], page_id: int) -> Node | None:
        """Add a started page below a locked `node`, and lock it too.

        Returns None if a page that begins with these tokens is cached there already.
        """
        key = tokens.tobytes()
        at = bisect_left(node.sorted_keys, key)
        if at < len(node.sorted_keys) and node.sorted_keys[at].startswith(key):
            return None
        self.version += 1
        self._clock += 1
        self.num_pages += 1
        tail = self._add_child(node, tokens, [page_id])
        tail.locks, tail.last_used = 1, self._clock
        self.num_locked_pages += 1
        return tail

    def release_tail(self, tail: Node) -> None:
        """Release the lock of `add_tail`; the page stays cached."""
        if not tail.dead:
            tail.locks -= 1
            self.num_locked_pages -= 1
            self._release_leaf(tail)

    def remove_tail(self, tail: Node) -> list[int]:
        """Remove a locked tail from the tree, since its page holds more tokens now. Returns its page id."""
        if tail.dead:
            return []
        tail.locks = 0
        self.num_locked_pages -= 1
        self.num_pages -= 1
        self._unlink(tail)
        return tail.page_ids

    def drop_covered_tails(self, node: Node, key: bytes) -> list[int]:
        """Remove unlocked tails below `node` whose tokens are a prefix of `key`. Returns their page ids."""
        dropped: list[int] = []
        at = bisect_left(node.sorted_keys, key)
        while at > 0 and key.startswith(node.sorted_keys[at - 1]):
            tail = node.children[node.sorted_keys[at - 1]]
            if tail.locks == 0:
                dropped += tail.page_ids
                self.num_pages -= 1
                self._unlink(tail)
            at -= 1
        return dropped

    def _add_child(self, node: Node, tokens: array[int], page_ids: list[int]) -> Node:
        child = Node(node, tokens[: self.page_size].tobytes(), tokens, page_ids)
        node.children[child.key] = child
        insort(node.sorted_keys, child.key)
        return child

    # -- shrinking ----------------------------------------------------------------------------------------------------

    def evict(self, count: int) -> list[int]:
        """Remove up to `count` pages, from the ends of the least recently used unlocked leaves, and return them.

        A leaf shrinks from its end as far as needed, so what is left of it is still a correct prefix. O(log n) a leaf.
        """
        evicted: list[int] = []
        heap = self._heap
        while heap and len(evicted) < count:
            queued_at, _, node = heap[0]
            if node.dead or node.locks or node.children:
                heapq.heappop(heap)
                node.queued = False
            elif node.last_used != queued_at:
                self._entries += 1
                heapq.heapreplace(heap, (node.last_used, self._entries, node))
            else:
                evicted += self._trim(node, count - len(evicted))
        if evicted:
            self.version += 1
        return evicted

    def _trim(self, node: Node, count: int) -> list[int]:
        """Remove up to `count` pages from the end of a leaf, and the leaf with its last page."""
        if count >= len(node.page_ids):
            self.num_pages -= len(node.page_ids)
            self._unlink(node)
            return node.page_ids
        taken = node.page_ids[-count:]
        del node.page_ids[-count:]
        del node.tokens[len(node.page_ids) * self.page_size :]
        self.num_pages -= count
        return taken

    def detach(self, node: Node, num_pages: int, keep: int) -> list[int]:
        """Remove everything beyond the first `keep` pages of the path to `node` from the tree; return the page ids.

        `num_pages` is the number of pages from the root to the end of `node`, which may have been cut off further down
        before. Locks on what was cut off stay valid.
        """
        while num_pages - len(node.page_ids) > keep and node.parent is not None:
            num_pages -= len(node.page_ids)
            node = node.parent
        if node.dead or num_pages <= keep:
            return []
        offset = keep - (num_pages - len(node.page_ids))
        if offset > 0:
            self._split(node, offset)
        return self._cut(node)

    def _cut(self, top: Node) -> list[int]:
        pages: list[int] = []
        for node in walk(top):
            pages += node.page_ids
            if node.locks:
                self.num_locked_pages -= len(node.page_ids)
            node.dead = True
        self.num_pages -= len(pages)
        self.version += 1
        self._unlink(top)
        return pages

    def _unlink(self, node: Node) -> None:
        """Remove `node` from its parent, which may thereby become an evictable leaf, or an empty root."""
        node.dead = True
        parent = node.parent
        if parent is None:
            del self._roots[node.key]
            return
        del parent.children[node.key]
        del parent.sorted_keys[bisect_left(parent.sorted_keys, node.key)]
        if parent.locks == 0:
            self._release_leaf(parent)

    def _release_leaf(self, node: Node) -> None:
        """Queue an unlocked leaf for eviction; remove an empty root at once."""
        if node.children:
            return
        if node.parent is None:
            self._unlink(node)
        elif not node.queued:
            node.queued = True
            self._entries += 1
            heapq.heappush(self._heap, (node.last_used, self._entries, node))

    # -- checking -----------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included."""
        for root in self._roots.values():
            yield from walk(root)

    def check(self) -> None:
        """Raise RuntimeError, saying what is wrong, unless the structure of the tree is sound. O(size of the tree)."""
        nodes = list(self.nodes())
        pages = [page for node in nodes for page in node.page_ids]
        if len(set(pages)) != len(pages):
            raise RuntimeError("a page is held by two nodes")
        if len(pages) != self.num_pages:
            raise RuntimeError(f"the tree holds {len(pages)} pages and counts {self.num_pages}")
        locked = sum(len(node.page_ids) for node in nodes if node.locks)
        if locked != self.num_locked_pages:
            raise RuntimeError(f"the tree has {locked} locked pages and counts {self.num_locked_pages}")
        queued = {id(node) for _, _, node in self._heap}
        for node in nodes:
            self._check_node(node, queued)

    def _check_node(self, node: Node, queued: set[int]) -> None:
        problems = {
            "is dead": node.dead,
            "is an empty root": node.parent is None and not node.children and not node.locks,
            "has the wrong number of tokens": not self._has_right_length(node),
            "has the wrong key": node.parent is not None and node.key != node.tokens[: self.page_size].tobytes(),
            "has unsorted keys": node.sorted_keys != sorted(node.children),
            "has a child of another parent": any(child.parent is not node for child in node.children.values()),
            "has fewer locks than its children": node.locks
            < sum(child.locks for child in node.children.values() if not self._is_tail(child)),
            "could be evicted, but is not queued": bool(
                node.parent and not node.children and not node.locks and id(node) not in queued
            ),
        }
        for problem, found in problems.items():
            if found:
                raise RuntimeError(f"node {node.tokens.tolist()[:8]}... with pages {node.page_ids} {problem}")

    def _is_tail(self, node: Node) -> bool:
        """A tail's lock is its owner's second one, so its parent does not count it."""
        return len(node.tokens) < self.page_size

    def _has_right_length(self, node: Node) -> bool:
        if node.parent is None:
            return not node.tokens and not node.page_ids
        if self._is_tail(node):
            return len(node.page_ids) == 1 and len(node.tokens) > 0 and not node.children
        return len(node.tokens) == self.page_size * len(node.page_ids)


def walk(top: Node) -> Iterator[Node]:
    """`top` and everything below it."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def common_prefix(a: array[int], b: array[int]) -> int:
    """The number of leading tokens `a` and `b` share, by bisection: each step compares memory, not single tokens."""
    high = min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    low = 0
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def token_array(token_ids: Sequence[int]) -> array[int]:
    """The tokens as int32, as the cache keeps them. Packing them at once takes half the time of `array(list)`."""
    tokens = array("i")
    tokens.frombytes(struct.pack(f"{len(token_ids)}i", *token_ids))
    return tokens
