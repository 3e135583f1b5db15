"""Moves pages between requests, the prefix cache and the free list. No other code does.

It knows requests, pages and the tree; it does not decide which requests run, and never sees the memory behind a page
id. It relies on this: steps run in the order in which they were scheduled, and a step copies pages before it computes.

One request with 11 computed tokens, page_size 4:

    tokens      0 1 2 3 │ 4 5 6 7 │ 8 9 10
    page_ids        5   │    2    │   7          each page counts one holder for this request ...
    tree        ────────┴─────────┤   ·          ... and one for the tree, if it is published there
                     locked path  │  tail        (full pages of the prompt when their step is scheduled, those of the
                                  │               answer before the next match; the rest of a page at the end of the
                                  │               prompt and when the request leaves)

    free ──reserve, admit──▶ held by a request ──commit──▶ held and cached ──release──▶ cached ──evict──▶ free
                                     ▲                            ▲                       │
                                     └────── copy of a part ──────┴────────admit──────────┘

Invariant, walked by `check()`: every page's count is the number of its holders (requests, tree, and the pages that wait
for a step to be read), and `free + cached but held by no request + held by requests = num_pages`.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from mini_sglang.request import Request
from mini_sglang.scheduling.batch import NewPages
from mini_sglang.scheduling.page_allocator import PageAllocator
from mini_sglang.scheduling.radix_cache import Match, Node, RadixCache, token_array


class CacheListener(Protocol):
    """Is told which whole pages are cached. The started ones, tails, are not its concern."""

    def stored(self, salt: bytes, parent_page: int | None, tokens: array[int], page_ids: list[int]) -> None:
        """These pages, new and in this order, continue `parent_page`; None: they begin a prompt with this salt."""

    def removed(self, page_ids: list[int]) -> None:
        """These pages are cached no more. Tails may be among them."""

    def cleared(self) -> None:
        """No page is cached."""

    def check(self, page_ids: set[int]) -> None:
        """Raise RuntimeError unless these are the pages that are cached by all that it was told."""


@dataclass(slots=True, eq=False)
class _Holding:
    """What the manager knows of one request beyond its page ids."""

    salt: bytes
    tokens: array[int]  # the known tokens, prompt first; `_holding` brings them up to date
    node: Node | None = None  # the deepest node whose pages the request holds, locked; None: it holds none
    num_pages: int = 0  # pages from the root to the end of `node`; the same pages as in the page table
    tail: Node | None = None  # the request's own page in the tree with fewer tokens than a page, locked
    invalid: bool = False  # a step that should have filled its pages failed
    last_match: tuple[int, int] = (-1, 0)  # (version of the tree, tokens matched), looked up once per version


class KVCacheManager:
    """Pages for requests, with reuse of cached prefixes (`cache="radix"`) or without (`"naive"`)."""

    def __init__(
        self, num_pages: int, page_size: int, *, reuse: bool = True, listener: CacheListener | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.reuse = reuse
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixCache(page_size)
        self._holdings: dict[Request, _Holding] = {}
        self._new_pages: dict[Request, list[tuple[int, list[int]]]] = {}  # (first index, ids) for the next step to send
        self._copies: list[tuple[int, int]] = []
        self._replaced: deque[tuple[int, int]] = deque()  # (step, page): free once that step was read
        self._listener = listener
        if listener is not None:
            listener.cleared()

    # -- counting -----------------------------------------------------------------------------------------------------

    @property
    def num_free_pages(self) -> int:
        return self._allocator.num_free

    @property
    def num_cached_pages(self) -> int:
        """Pages that are cached and held by no request: `evict` can free all of them."""
        return self._tree.num_pages - self._tree.num_locked_pages

    @property
    def num_available_pages(self) -> int:
        return self._allocator.num_free + self.num_cached_pages

    @property
    def num_returning_pages(self) -> int:
        """Pages that become free once the launched steps have been read."""
        return len(self._replaced)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def tokens(self, request: Request) -> array[int]:
        """The known tokens of a request, prompt first. The caller must not change them."""
        return self._holding(request).tokens

    def _holding(self, request: Request) -> _Holding:
        """Return the record of a request with its tokens brought up to date."""
        holding = self._holdings.get(request)
        if holding is None:
            salt = request.cache_salt.encode("utf-8", "surrogatepass")
            holding = self._holdings[request] = _Holding(salt, token_array(request.prompt_ids))
        holding.tokens.extend(request.output_ids[len(holding.tokens) - len(request.prompt_ids) :])
        return holding

    # -- getting pages ------------------------------------------------------------------------------------------------

    def match(self, request: Request) -> Match:
        """Find the longest cached prefix that leaves the request a token to compute. Changes nothing."""
        holding = self._holding(request)
        if not self.reuse:
            return Match()
        limit = 0 if request.wants_prompt_logprobs else len(holding.tokens) - 1
        return self._tree.match(holding.salt, holding.tokens, limit)

    def cached_tokens(self, request: Request) -> int:
        """`match(request).num_tokens`, remembered as long as the tree does not change."""
        holding = self._holding(request)
        if holding.last_match[0] != self._tree.version:
            holding.last_match = (self._tree.version, self.match(request).num_tokens)
        return holding.last_match[1]

    def admit(self, request: Request, match: Match, num_tokens: int) -> bool:
        """Give a request without pages those of its fresh `match`, and pages of its own for up to `num_tokens` tokens.

        Returns False and changes nothing if too few pages are free or evictable. On success `num_computed_tokens` is
        the match's. A page that matched in part is copied to the first own page (copy on write). Making room may evict
        the source: that does no harm, since a step copies before it writes.
        """
        if not self.reuse:
            return self.reserve(request, num_tokens)
        holding = self._holding(request)
        node = self._tree.lock(holding.salt, match)
        shared = match.page_ids
        needed = self.pages_for(num_tokens) - len(shared)
        if needed > self.num_available_pages:
            self._tree.unlock(node)
            return False
        holding.node, holding.num_pages = node, len(shared)
        self._allocator.retain(shared)
        own = self._allocate(needed)
        if match.partial_page is not None and match.partial_page != own[0]:  # evicted, it may be own[0] itself
            self._copies.append((match.partial_page, own[0]))
        request.page_ids = shared + own
        request.num_computed_tokens = match.num_tokens
        self._send_pages(request, 0, request.page_ids.copy())
        return True

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Extend the page table to `num_tokens` tokens. False, and nothing is changed, if there are too few pages."""
        needed = self.pages_for(num_tokens) - len(request.page_ids)
        if needed <= 0:
            return True
        if needed > self.num_available_pages:
            return False
        first, pages = len(request.page_ids), self._allocate(needed)
        request.page_ids += pages
        self._send_pages(request, first, pages)
        return True

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Take back the pages behind a request's first `num_tokens` tokens, which hold nothing that was published."""
        kept = self.pages_for(num_tokens)
        self._allocator.release(reversed(request.page_ids[kept:]))
        del request.page_ids[kept:]

    def _allocate(self, count: int) -> list[int]:
        missing = count - self._allocator.num_free
        if missing > 0:
            self.evict(missing)
        return self._allocator.allocate(count)

    def evict(self, count: int) -> int:
        """Free up to `count` cached pages that no request holds, least recently used first; return their number."""
        pages = self._tree.evict(count)
        self._allocator.release(pages)
        if self._listener is not None:
            self._listener.removed(pages)
        return len(pages)

    def flush(self) -> int:
        """Free every cached page that no request holds; return their number."""
        freed = self.evict(self.num_cached_pages)
        if self._listener is not None and self._tree.num_pages == 0:
            self._listener.cleared()
        return freed

    def _send_pages(self, request: Request, first: int, pages: list[int]) -> None:
        self._new_pages.setdefault(request, []).append((first, pages))

    def take_changes(self) -> tuple[list[NewPages], list[tuple[int, int]]]:
        """Return what the next step tells the executor: page table entries, and (source, destination) copies."""
        new_pages = []
        for request, entries in self._new_pages.items():
            slot = request.slot
            if slot is None:
                raise RuntimeError(f"request {request.request_id} has pages but no slot")
            for first, pages in entries:
                new_pages.append(NewPages(slot, first, pages))
        self._new_pages.clear()
        copies, self._copies = self._copies, []
        return new_pages, copies

    # -- sharing pages ------------------------------------------------------------------------------------------------

    def commit(self, request: Request, step: int, *, tail: bool = False) -> None:
        """Publish the pages whose tokens are known and computed by steps up to `step`, the latest that was scheduled.

        Later steps may read them at once, since steps run in order.

        With `tail`, the started last page too. Where the cache has an equal page already, the request changes over to
        that one; its own stays held until `step` has been read, since launched steps use it.
        """
        holding = self._holding(request)
        for index, page in self._publish(request, holding, tail):
            self._replaced.append((step, page))
            self._send_pages(request, index, [request.page_ids[index]])

    def _publish(self, request: Request, holding: _Holding, tail: bool) -> list[tuple[int, int]]:
        """Put computed pages into the tree; return (index in the page table, own page) for each page replaced."""
        size, start, node = self.page_size, holding.num_pages, holding.node
        if node is None:
            return []
        computed = min(len(holding.tokens), request.num_computed_tokens)
        full = computed // size
        if holding.tail is not None and (full > start or tail):
            self._allocator.release(self._tree.remove_tail(holding.tail))
            holding.tail = None
        own = request.page_ids[start:full]
        if own:
            tokens = holding.tokens[start * size : full * size]
            self._drop_covered_tails(node, tokens[:size])
            node, published = self._tree.extend(node, tokens, own)
            self._allocator.retain(published)  # the holder is the tree of an own page, the request of a cached one
            request.page_ids[start:full] = published
            if self._listener is not None:
                self._tell_stored(request, holding, own, start)
            holding.node, holding.num_pages = node, full
        if tail and computed > full * size:
            tokens = holding.tokens[full * size : computed]
            self._drop_covered_tails(node, tokens)
            holding.tail = self._tree.add_tail(node, tokens, request.page_ids[full])
            if holding.tail is not None:
                self._allocator.retain(holding.tail.page_ids)
        if own == request.page_ids[start:full]:  # nearly always
            return []
        return [(index, page) for index, page in enumerate(own, start) if page != request.page_ids[index]]

    def _tell_stored(self, request: Request, holding: _Holding, own: list[int], start: int) -> None:
        """Tell the listener which pages the tree has taken from `own`, a request's from index `start` on: the last."""
        pages, size, end = request.page_ids, self.page_size, start + len(own)
        first = next((index for index, page in enumerate(own, start) if pages[index] == page), end)
        if self._listener is not None and first < end:
            parent = pages[first - 1] if first else None
            self._listener.stored(holding.salt, parent, holding.tokens[first * size : end * size], pages[first:end])

    def _drop_covered_tails(self, node: Node, tokens: array[int]) -> None:
        if self.page_size > 1:
            self._allocator.release(self._tree.drop_covered_tails(node, tokens.tobytes()))

    # -- giving pages back --------------------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Take all pages from a request and leave their contents in the cache. No launched step may contain it."""
        holding = self._holding(request)
        if not self.is_invalid(request):
            replaced = self._publish(request, holding, tail=True)
            self._allocator.release(page for _, page in replaced)
        self._new_pages.pop(request, None)
        if holding.tail is not None:
            self._tree.release_tail(holding.tail)
        if holding.node is not None:
            self._tree.unlock(holding.node)
        self._allocator.release(reversed(request.page_ids))
        request.page_ids = []
        request.num_computed_tokens = 0
        holding.node, holding.num_pages, holding.tail, holding.invalid = None, 0, None, False

    def forget(self, request: Request) -> None:
        """Drop the record of a request that has ended and holds no pages."""
        self._holdings.pop(request, None)

    def steps_read(self, step: int) -> None:
        """Free the replaced pages that were kept for steps up to `step`, which have been read."""
        while self._replaced and self._replaced[0][0] <= step:
            self._allocator.release([self._replaced.popleft()[1]])

    def invalidate(self, request: Request, num_tokens: int) -> None:
        """Unpublish a request's pages beyond its first `num_tokens` tokens, since a failed step left them undefined."""
        holding = self._holdings[request]
        holding.invalid = True
        keep = num_tokens // self.page_size
        if holding.tail is not None:
            self._allocator.release(self._tree.remove_tail(holding.tail))
            holding.tail = None
        if holding.node is not None and holding.num_pages > keep:
            pages = self._tree.detach(holding.node, holding.num_pages, keep)
            self._allocator.release(pages)
            if self._listener is not None:
                self._listener.removed(pages)

    def resend_page_table(self, request: Request) -> None:
        """Send the whole page table with the next step, since the executor may have missed the last one."""
        self._new_pages[request] = [(0, request.page_ids.copy())]

    def is_invalid(self, request: Request) -> bool:
        """Whether the request uses pages that `invalidate` has removed from the cache."""
        holding = self._holdings[request]
        return holding.invalid or (holding.node is not None and holding.node.dead)

    # -- checking -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RuntimeError, saying what is wrong, unless the invariant above holds. O(pages)."""
        self._tree.check()
        held = [page for request in self._holdings for page in request.page_ids]
        cached = [page for node in self._tree.nodes() for page in node.page_ids]
        replaced = [page for _, page in self._replaced]
        self._allocator.check(held + cached + replaced)
        unreferenced = len(set(cached) - {*held, *replaced})
        if unreferenced != self.num_cached_pages:
            raise RuntimeError(f"{unreferenced} cached pages have no other holder, {self.num_cached_pages} are counted")
        for request, holding in self._holdings.items():
            self._check_path(request, holding)
        if self._listener is not None:
            whole = (node for node in self._tree.nodes() if len(node.tokens) >= self.page_size)
            self._listener.check({page for node in whole for page in node.page_ids})

    def _check_path(self, request: Request, holding: _Holding) -> None:
        """Check that a request's published pages are those of its locked path, with the same tokens."""
        path: list[Node] = []
        node = holding.node
        while node is not None:
            path.append(node)
            node = node.parent
        pages = [page for node in reversed(path) for page in node.page_ids]
        tokens = [token for node in reversed(path) for token in node.tokens]
        if any(node.locks < 1 for node in path):
            raise RuntimeError(f"request {request.request_id} holds a path that is not locked")
        if holding.invalid or (path and path[0].dead):
            return
        if pages != request.page_ids[: holding.num_pages] or tokens != holding.tokens[: len(tokens)].tolist():
            raise RuntimeError(f"request {request.request_id} does not hold the pages of its path")
