"""The checks of lesson L2."""

from __future__ import annotations

from mini_sglang.learn.checking import expect, guards
from mini_sglang.scheduling.page_allocator import PageAllocator


@guards("freed-while-held")
def test_a_page_is_free_only_when_its_last_holder_lets_go() -> None:
    allocator = PageAllocator(3)
    [page] = allocator.allocate(1)
    allocator.retain([page])
    allocator.release([page])
    expect(
        allocator.num_free,
        2,
        "free pages after one of two holders let go",
        invariant="a page with a holder is not free",
        read="L2: Who holds a page",
    )
