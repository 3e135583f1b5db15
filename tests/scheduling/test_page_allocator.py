"""PageAllocator: pages are free or counted, never both, never lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from mini_sglang.scheduling.page_allocator import PageAllocator


def test_allocated_pages_are_distinct_and_have_one_holder() -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(3) + allocator.allocate(2)
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert [allocator.count(page) for page in pages] == [1] * 5
    assert allocator.num_free == 0


def test_a_page_is_free_when_its_last_holder_is_gone() -> None:
    allocator = PageAllocator(2)
    (page,) = allocator.allocate(1)
    allocator.retain([page])
    allocator.release([page])
    assert (allocator.count(page), allocator.num_free) == (1, 1)
    allocator.release([page])
    assert (allocator.count(page), allocator.num_free) == (0, 2)


def test_more_pages_than_are_free_are_refused_with_both_numbers() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(1)
    with pytest.raises(ValueError, match="4 pages were asked for, 3 of 4 are free"):
        allocator.allocate(4)
    assert allocator.num_free == 3


def test_a_free_page_can_neither_be_retained_nor_released() -> None:
    allocator = PageAllocator(1)
    with pytest.raises(ValueError, match="page 0 is free"):
        allocator.retain([0])
    with pytest.raises(ValueError, match="page 0 is free already"):
        allocator.release([0])


def test_check_finds_a_holder_that_was_not_counted() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    allocator.check([page])
    with pytest.raises(RuntimeError, match=f"page {page} counts 1 holders, but 2 hold it"):
        allocator.check([page, page])


def test_check_finds_a_page_that_is_free_twice() -> None:
    allocator = PageAllocator(3)
    allocator._free.append(2)
    with pytest.raises(RuntimeError, match="the free list is not the set of pages without a holder"):
        allocator.check([])


class AllocatorMachine(RuleBasedStateMachine):
    """Against a plain list with one entry per holder."""

    def __init__(self, num_pages: int = 12) -> None:
        super().__init__()
        self.allocator = PageAllocator(num_pages)
        self.holders: list[int] = []

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count <= self.allocator.num_free:
            pages = self.allocator.allocate(count)
            assert not set(pages) & set(self.holders)
            self.holders += pages

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 100))
    def retain(self, which: int) -> None:
        page = self.holders[which % len(self.holders)]
        self.allocator.retain([page])
        self.holders.append(page)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        self.allocator.release([self.holders.pop(which % len(self.holders))])

    @invariant()
    def accounts_for_every_page(self) -> None:
        self.allocator.check(self.holders)
        assert self.allocator.num_free + len(set(self.holders)) == self.allocator.num_pages


def test_any_history_accounts_for_every_page(stateful: settings) -> None:
    run_state_machine_as_test(AllocatorMachine, settings=stateful)
