"""Routing policies, whatever the replicas are: who gets a request, and what keeps load and memory bounded."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_sglang.routing import (
    FREE_LOAD,
    MOST_LOAD,
    POLICIES,
    LeastLoaded,
    Loads,
    PrefixAffinity,
    Replica,
    RoundRobin,
    RoutingPolicy,
)

SYSTEM = "You are a helpful assistant. " * 20  # shared by everybody
names = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True)
prompts = st.one_of(st.text(max_size=300), st.lists(st.integers(0, 3), max_size=300))


def conversation(number: int, turns: int) -> str:
    """The prompt of one turn of a chat: everything that was said before, and what is new."""
    return SYSTEM + "".join(
        f"turn {turn} of chat {number}: " + f"{number * 100 + turn:06d}" * 30 for turn in range(turns)
    )


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_policy_chooses_a_replica_that_is_there(name: str, data: st.DataObject) -> None:
    policy = POLICIES[name]()
    for _ in range(data.draw(st.integers(1, 12))):
        loads = {replica: data.draw(st.integers(0, 50)) for replica in data.draw(names)}
        assert policy.choose(data.draw(prompts), loads) in loads


@pytest.mark.parametrize("name", POLICIES)
def test_without_a_replica_there_is_nothing_to_choose(name: str) -> None:
    with pytest.raises(ValueError, match="no replica"):
        POLICIES[name]().choose("hello", {})


def test_round_robin_gives_each_its_turn() -> None:
    policy = RoundRobin()
    assert [policy.choose("", {"a": 9, "b": 0, "c": 0}) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


@settings(max_examples=100, deadline=None)
@given(loads=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 9), min_size=1))
def test_the_least_loaded_has_the_fewest_requests(loads: dict[Replica, int]) -> None:
    assert loads[LeastLoaded().choose("", loads)] == min(loads.values())


def test_equal_loads_are_shared_out_evenly_and_a_new_replica_does_not_get_everything() -> None:
    policy = LeastLoaded()
    sent = Counter(policy.choose("", {"a": 0, "b": 0}) for _ in range(100))
    assert sent == {"a": 50, "b": 50}
    sent = Counter(policy.choose("", {"a": 0, "b": 0, "new": 0}) for _ in range(99))
    assert sent == {"a": 33, "b": 33, "new": 33}


def test_the_turns_of_a_conversation_stay_on_one_replica() -> None:
    policy = PrefixAffinity()
    where = {number: policy.choose(conversation(number, 1), {"a": 0, "b": 0}) for number in range(20)}
    assert Counter(where.values()) == {"a": 10, "b": 10}
    for turns in range(2, 6):
        for number in range(20):
            assert policy.choose(conversation(number, turns), {"a": 1, "b": 1}) == where[number]


def test_tokens_are_followed_like_text() -> None:
    policy = PrefixAffinity(block=16)
    chance = random.Random(0)
    tokens = [chance.randrange(1000) for _ in range(320)]
    first = policy.choose(tokens, {"a": 0, "b": 0})
    assert policy.choose([*tokens, 1, 2, 3], {"a": 0, "b": 0}) == first
    assert policy.choose([7, *tokens], {"a": 0, "b": 0}) != first  # nothing in common: the other has got fewer


def test_a_beginning_that_all_prompts_share_attracts_nobody() -> None:
    policy = PrefixAffinity()
    sent = Counter(policy.choose(conversation(number, 5), {"a": 0, "b": 0, "c": 0}) for number in range(30))
    assert sent == {"a": 10, "b": 10, "c": 10}


def simulate(
    policy: RoutingPolicy, ask: list[str], replicas: str, under_way: int, seed: int
) -> tuple[Counter[Replica], int]:
    """Send prompts, with `under_way` of them running at any time; what each replica got, and the highest excess load.

    The excess is what a chosen replica had beyond the bound on loads when it was chosen, 0 if it never was.
    """
    chance = random.Random(seed)
    loads: dict[Replica, int] = dict.fromkeys(replicas, 0)
    running: list[Replica] = []
    sent: Counter[Replica] = Counter()
    excess = 0
    for prompt in ask:
        if len(running) >= under_way:
            loads[running.pop(chance.randrange(len(running)))] -= 1
        bound = max(FREE_LOAD, math.ceil(MOST_LOAD * (sum(loads.values()) + 1) / len(loads)))
        chosen = policy.choose(prompt, loads)
        loads[chosen] += 1
        excess = max(excess, loads[chosen] - bound)
        running.append(chosen)
        sent[chosen] += 1
    return sent, excess


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), under_way=st.integers(1, 60), hot=st.floats(0, 1))
def test_no_replica_is_loaded_beyond_the_bound_however_hot_a_prefix_is(seed: int, under_way: int, hot: float) -> None:
    chance = random.Random(seed)
    ask = [conversation(0 if chance.random() < hot else chance.randrange(1, 30), 3) for _ in range(200)]
    _, excess = simulate(PrefixAffinity(), ask, "abcd", under_way, seed)
    assert excess <= 0


def test_a_hot_prefix_spreads_over_all_replicas() -> None:
    chance = random.Random(1)
    ask = [conversation(0 if chance.random() < 0.8 else chance.randrange(1, 30), 3) for _ in range(1000)]
    sent, _ = simulate(PrefixAffinity(), ask, "abcd", under_way=40, seed=1)
    assert max(sent.values()) <= 1.3 * 1000 / 4


@settings(max_examples=25, deadline=None)
@given(prompts=st.lists(st.text(max_size=200), min_size=1, max_size=40), most=st.integers(1, 20))
def test_what_is_remembered_is_bounded(prompts: list[str], most: int) -> None:
    policy = PrefixAffinity(block=4, most_blocks=most)
    for prompt in prompts:
        policy.choose(prompt, {"a": 0, "b": 0})
        assert policy.num_blocks <= most


def test_the_beginning_of_a_prefix_is_forgotten_last() -> None:
    policy = PrefixAffinity(block=1, most_blocks=4)
    first = policy.choose("abcd", {"a": 0, "b": 0})
    policy.choose("xy", {"a": 0, "b": 0})  # goes to the other, and takes the place of "cd"
    assert policy.choose("ab", {"a": 1, "b": 1}) == first


def test_a_replica_that_has_left_is_forgotten() -> None:
    policy = PrefixAffinity()
    loads: Loads = {"a": 0, "b": 0}
    first = policy.choose(conversation(1, 3), loads)
    [other] = set(loads) - {first}
    assert policy.choose(conversation(1, 3), {other: 0}) == other
    policy.forget(first)
    policy.forget(other)
    assert policy.num_blocks == 0


def test_a_tree_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PrefixAffinity(block=0)
