"""Pages being taken, shared, copied, given back and evicted by the engine's own KVCacheManager, word by word."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.kv_cache import KVCacheManager

PAGE_SIZE, NUM_PAGES, PAGES_PER_LINE = 4, 8, 4
PAUSE_S = 1.0
COLOURS = {"A": "white on blue", "B": "black on yellow", "C": "black on green", "": "white on bright_black"}


class Pool:
    """The manager, with what its pages hold: the words that an executor would have written as keys and values."""

    def __init__(self) -> None:
        self.kv = KVCacheManager(NUM_PAGES, PAGE_SIZE)
        self.words: list[list[str]] = [[] for _ in range(NUM_PAGES)]
        self.ids: dict[str, int] = {}
        self.running: list[Request] = []
        self.step = itertools.count(1)

    def admit(self, name: str, text: str) -> Request | None:
        tokens = [self.ids.setdefault(word, len(self.ids)) for word in text.split()]
        request = Request(request_id=name, prompt_ids=tokens, params=SamplingParams())
        if not self.kv.admit(request, self.kv.match(request), len(tokens)):
            return None
        request.slot = len(self.running)
        self.running.append(request)
        return request

    def compute(self, request: Request) -> None:
        """What a step does: copies first, then every token that is not computed yet."""
        _, copies = self.kv.take_changes()
        held = {source: self.words[source].copy() for source, _ in copies}
        for source, destination in copies:
            self.words[destination] = held[source]
        words = list(self.ids)
        tokens = request.token_ids
        for position in range(request.num_computed_tokens, len(tokens)):
            page = request.page_ids[position // PAGE_SIZE]
            self.words[page][position % PAGE_SIZE :] = [words[tokens[position]]]
        request.num_computed_tokens = len(tokens)
        step = next(self.step)
        self.kv.commit(request, step, tail=True)
        self.kv.steps_read(step)

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.release(request)
        self.kv.forget(request)
        self.kv.check()

    # -- drawing --

    def draw(self, story: str) -> RenderableType:
        pages = Table.grid()
        for first in range(0, NUM_PAGES, PAGES_PER_LINE):
            pages.add_row(*[self._draw_page(page) for page in range(first, first + PAGES_PER_LINE)])
        tables = [
            Text.assemble((f" {request.request_id} ", COLOURS[request.request_id]), f" page table {request.page_ids}")
            for request in self.running
        ]
        counts = f"{self.kv.num_free_pages} free · {self.kv.num_cached_pages} cached, held by nobody"
        return Group(Text(story, style="bold"), Text(), pages, *tables, Text(counts, style="dim"), Text())

    def _draw_page(self, page: int) -> RenderableType:
        holders = [request.request_id for request in self.running if page in request.page_ids]
        free = self.kv._allocator.count(page) == 0  # no part of the engine may look there; a drawing has to
        label = "free" if free else " and ".join(holders) or "cache only"
        style = "dim" if free else COLOURS[holders[0] if len(holders) == 1 else ""]
        words = [*self.words[page], *[""] * (PAGE_SIZE - len(self.words[page]))]
        cells = Text.assemble((" ".join(f"{word:<4.4}" for word in words), style), " ")
        return Group(Text(f"page {page} · {label}", style="dim"), cells, Text())


def main() -> None:
    console = Console()
    pool = Pool()
    with Live(console=console, auto_refresh=False) as live:

        def show(story: str) -> None:
            if console.is_terminal:
                live.update(pool.draw(story), refresh=True)
                time.sleep(PAUSE_S)
            else:
                live.console.print(pool.draw(story))

        tell(pool, show)


def tell(pool: Pool, show: Callable[[str], None]) -> None:
    show("An empty pool: eight pages of four cells. Here a token is a word.")
    a = pool.admit("A", "the cat sat on a warm mat by the old door")
    assert a is not None
    show("A is admitted: eleven tokens need three pages. Any free ones will do.")
    pool.compute(a)
    show("Its step has run: every cell has its key and value.")
    b = pool.admit("B", "the cat sat on a warm day")
    assert b is not None
    show("B begins like A. The first page is shared; “a warm” lies inside a page, so B gets its own.")
    pool.compute(b)
    show("Copy on write: two tokens were copied, and B wrote “day” behind them.")
    pool.leave(a)
    show("A has ended. The cache keeps what it computed; B still holds the shared page.")
    pool.leave(b)
    show("B has ended too. Nobody holds a page, and none is lost: all can be found again.")
    c = pool.admit("C", "one day a tiny bot went to see how many more page ids it can hold")
    assert c is not None
    pool.compute(c)
    show("C is long and shares nothing: the least recently used pages were evicted for it.")
    pool.leave(c)
    show("And `check()` has held after each of these.")
