"""What the best prefix cache can find, without a limit and in a pool, against hand-made and exhaustive counts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_sglang.bench.optimal_cache import belady_hits, number_beginnings, unlimited_hits

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=7)


def exhaustive_hits(prompts: list[list[int]], capacity: int) -> int:
    """The most that any choice of what to forget finds: every cache of every size after every prompt is tried."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for beginnings in prompts:
        after: dict[frozenset[int], int] = {}
        for cache, hits in best.items():
            found = sum(1 for _ in itertools.takewhile(cache.__contains__, beginnings))
            others = cache - set(beginnings)
            for count in range(min(len(others), capacity - len(beginnings)) + 1):
                for kept in itertools.combinations(sorted(others), count):
                    state = frozenset(kept) | frozenset(beginnings)
                    after[state] = max(after.get(state, 0), hits + found)
        best = after
    return max(best.values())


def test_equal_blocks_after_different_beginnings_are_different_beginnings() -> None:
    assert number_beginnings([[7, 8], [9, 8], [7, 8, 9]]) == [[0, 1], [2, 3], [0, 1, 4]]


def test_without_a_limit_all_but_first_appearances_are_found() -> None:
    assert unlimited_hits([[0, 1], [0, 2], [0, 1, 3], [0, 1, 3]]) == 0 + 1 + 2 + 3


def test_the_optimum_forgets_what_is_used_again_last() -> None:
    prompts = [[0], [1], [2], [0], [1]]
    assert belady_hits(prompts, 3) == 2
    assert belady_hits(prompts, 2) == 1  # 1 makes room for 2, as 0 comes sooner; then 2 goes, which never comes
    assert belady_hits(prompts, 1) == 0


def test_all_blocks_of_a_prompt_take_room_while_it_runs_even_those_never_used_again() -> None:
    assert belady_hits([[0, 1], [2, 3], [0, 1]], 4) == 2
    assert belady_hits([[0, 1], [2, 3], [0, 1]], 3) == 1
    with pytest.raises(ValueError, match="a prompt of 2 blocks does not fit in a cache of 1"):
        belady_hits([[0, 1]], 1)


@given(blocks=PROMPTS, capacity=st.integers(3, 6))
def test_no_choice_of_what_to_forget_finds_more(blocks: list[list[int]], capacity: int) -> None:
    prompts = number_beginnings(blocks)
    assert belady_hits(prompts, capacity) == exhaustive_hits(prompts, capacity)
    assert belady_hits(prompts, 100) == unlimited_hits(prompts)
