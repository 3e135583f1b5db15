"""The policies that the prefix cache's is compared with: bounded by the optimum, and its own among them."""

from __future__ import annotations

import random

import pytest

from benchmarks.eviction_policies import POLICIES, by_age, hindsight_hits, policy_hits
from mini_sglang.bench.optimal_cache import belady_hits, number_beginnings
from mini_sglang.bench.prefix import count_hits
from mini_sglang.bench.traces import TraceRow

CHATS = [
    [chat, *range(10 * chat, 10 * chat + turn)]
    for turn in (1, 3, 5)
    for chat in random.Random(0).sample(range(1, 40), 39)
]
PROMPTS = number_beginnings(CHATS)


@pytest.mark.parametrize("pool", [6, 30, 90])
def test_what_is_called_the_engines_policy_finds_what_the_engine_finds(pool: int) -> None:
    rows = [TraceRow(i, len(ids) * 16, 1, tuple(ids), 16) for i, ids in enumerate(CHATS)]
    assert [policy_hits(PROMPTS, pool, by_age, remembers=False)] == count_hits(rows, [pool])


@pytest.mark.parametrize("pool", [6, 30, 90])
def test_no_policy_beats_the_optimum(pool: int) -> None:
    best = belady_hits(PROMPTS, pool)
    for worth, remembers in POLICIES.values():
        assert policy_hits(PROMPTS, pool, worth, remembers) <= best


def test_with_hindsight_a_large_pool_finds_all() -> None:
    assert hindsight_hits(PROMPTS, 10_000) == belady_hits(PROMPTS, 10_000)
