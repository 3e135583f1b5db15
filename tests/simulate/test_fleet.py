"""Requests on simulated replicas: times that can be worked out by hand, and what holds for any load."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_sglang.bench.load_generator import LoadRequest, Outcome
from mini_sglang.routing import POLICIES, RoundRobin
from mini_sglang.simulate.cost import DeviceTimes, HostTimes, ReplicaCost
from mini_sglang.simulate.fleet import Fleet
from tests.simulate.conftest import SETTINGS


def request(seed: int, length: int, output: int = 4, *, after: int | None = None) -> LoadRequest:
    tokens = np.random.default_rng(seed).integers(100, 10_000, length).tolist()
    return LoadRequest(lambda: tokens, output, after=after)


def run(cost: ReplicaCost, requests: Sequence[LoadRequest], times: Sequence[float], **how: bool) -> list[Outcome]:
    return Fleet(cost, 1, RoundRobin(), requests).at_times(times, **how).load.outcomes


def test_one_request_alone_takes_what_its_steps_take(cost: ReplicaCost) -> None:
    [outcome] = run(cost, [request(0, 300, output=3)], [2.0])
    # two steps for the prompt: 256 tokens and 44, and then one for each other token; the host has 1 ms of each
    assert outcome.ttft == pytest.approx(0.011 + 0.0256 + 0.011 + 0.0044)
    assert outcome.gaps == pytest.approx([0.011, 0.011])
    assert outcome.e2e == pytest.approx(outcome.ttft + 0.022)
    assert (outcome.due, outcome.input_tokens, outcome.output_tokens, outcome.cached_tokens) == (2.0, 300, 3, 0)


def test_running_ahead_hides_the_host(cost: ReplicaCost) -> None:
    [outcome] = run(cost.with_settings({"run_ahead": 1}), [request(0, 100, output=10)], [0.0])
    assert outcome.gaps[1:] == pytest.approx(0.010)
    slow_host = msgspec.structs.replace(cost.with_settings({"run_ahead": 1}), host_us=HostTimes(15_000))
    [outcome] = run(slow_host, [request(0, 100, output=10)], [0.0])
    assert outcome.gaps[2:-1] == pytest.approx(0.015)


def test_a_request_that_comes_during_a_step_waits_for_its_end(cost: ReplicaCost) -> None:
    first, second = run(cost, [request(0, 200), request(1, 100)], [0.0, 0.005])
    first_step = 0.011 + 0.020
    assert first.ttft == pytest.approx(first_step)
    assert second.ttft == pytest.approx(first_step - 0.005 + 0.011 + 0.010)


def test_what_a_prompt_shares_with_an_earlier_one_is_not_computed(cost: ReplicaCost) -> None:
    tokens = list(range(100, 340))
    requests = [LoadRequest(lambda: tokens, 2), LoadRequest(lambda: [*tokens, 1, 2, 3], 2)]
    first, second = run(cost, requests, [0.0, 1.0])
    assert (first.cached_tokens, second.cached_tokens) == (0, 240)
    assert second.ttft == pytest.approx(0.011 + 3 * 0.0001)


def test_time_outside_of_the_engine_comes_before_the_first_token(cost: ReplicaCost) -> None:
    requests = [request(0, 100), request(1, 100, after=0)]
    plain = run(cost, requests, [0.0, 0.0], in_turn=True)
    slower = run(msgspec.structs.replace(cost, request_us=5000), requests, [0.0, 0.0], in_turn=True)
    assert [outcome.ttft for outcome in slower] == pytest.approx([outcome.ttft + 0.005 for outcome in plain])
    assert [outcome.due for outcome in slower] == pytest.approx([0.0, plain[0].e2e + 0.005])
    assert slower[0].gaps == pytest.approx(plain[0].gaps)


def test_a_turn_comes_when_the_answer_before_it_has_ended(cost: ReplicaCost) -> None:
    requests = [request(0, 100, output=50), request(1, 50, after=0), request(2, 50, after=0)]
    first, second, third = run(cost, requests, [0.0, 0.1, 9.0], in_turn=True)
    assert second.due == pytest.approx(first.e2e)
    assert third.due == 9.0
    assert run(cost, requests, [0.0, 0.1, 9.0])[1].due == 0.1


def test_a_closed_loop_keeps_its_number_under_way(cost: ReplicaCost) -> None:
    outcomes = Fleet(cost, 2, RoundRobin(), [request(i, 50) for i in range(20)]).at_concurrency(3).load.outcomes
    assert len(outcomes) == 20
    for outcome in outcomes:
        assert sum(other.due <= outcome.due < other.due + other.e2e for other in outcomes) <= 3


def test_a_prompt_that_can_never_fit_is_refused_and_the_others_are_served(cost: ReplicaCost) -> None:
    small = cost.with_settings({"context_length": 64})
    refused, served = run(small, [request(0, 100), request(1, 20, after=0)], [0.0, 0.0], in_turn=True)
    assert (refused.error, refused.output_tokens) == ("HTTP 400", 0)
    assert "context length" in refused.detail
    assert served.error is None


def test_chance_spreads_steps_around_what_they_take_and_is_the_same_each_time(cost: ReplicaCost) -> None:
    uneven = msgspec.structs.replace(cost, spread=0.05)
    first, second = (run(uneven, [request(0, 100, output=1000)], [0.0])[0] for _ in range(2))
    assert first.gaps.tolist() == second.gaps.tolist()
    assert (first.gaps - 0.001).mean() == pytest.approx(0.010, rel=0.01)
    assert (first.gaps - 0.001).std() == pytest.approx(0.0005, rel=0.1)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 30)), min_size=1, max_size=40),
    replicas=st.integers(1, 5),
    routing=st.sampled_from(sorted(POLICIES)),
    run_ahead=st.integers(0, 2),
    pages=st.integers(30, 100),
)
def test_every_request_gets_its_tokens_in_order_whatever_the_load(
    lengths: list[tuple[int, int]], replicas: int, routing: str, run_ahead: int, pages: int
) -> None:
    some = {**SETTINGS, "run_ahead": run_ahead, "num_pages": pages, "max_step_ms": 30}
    cost = ReplicaCost(some, DeviceTimes(10_000, 50, 0.1, 100, 0.01, 5), HostTimes(500, 5, 1), spread=0.1)
    requests = [request(i % 7, length, output) for i, (length, output) in enumerate(lengths)]
    fleet = Fleet(cost, replicas, POLICIES[routing](), requests)
    done = fleet.at_times([i * 0.01 for i in range(len(requests))])
    assert sum(done.num_requests) == len(requests)
    assert all(0 <= busy <= 1 for busy in done.busy)
    for outcome, (length, output) in zip(done.load.outcomes, lengths, strict=True):
        assert (outcome.error, outcome.input_tokens, outcome.output_tokens) == (None, length, output)
        assert outcome.ttft > 0
        assert (outcome.gaps >= 0).all()
        assert outcome.e2e == pytest.approx(outcome.ttft + outcome.gaps.sum())


def conversations(count: int, turns: int) -> list[LoadRequest]:
    """Chats whose prompts grow by 160 tokens with each turn, the turns of all chats one after another."""
    chats = [np.random.default_rng(chat).integers(100, 10_000, 160 * turns).tolist() for chat in range(count)]
    return [
        LoadRequest(partial(chat.__getitem__, slice(160 * (turn + 1))), 4) for turn in range(turns) for chat in chats
    ]


def test_prefix_affinity_saves_what_round_robin_computes_again(cost: ReplicaCost) -> None:
    def computed(routing: str, replicas: int) -> int:
        requests = conversations(count=5, turns=8)
        load = Fleet(cost, replicas, POLICIES[routing](), requests).at_times([i * 0.2 for i in range(40)]).load
        return sum((outcome.input_tokens or 0) - (outcome.cached_tokens or 0) for outcome in load.outcomes)

    joint = computed("round_robin", 1)
    assert computed("prefix", 2) <= 1.05 * joint
    assert computed("round_robin", 2) > 1.5 * joint


def test_more_replicas_make_a_queue_shorter(cost: ReplicaCost) -> None:
    requests = [request(i, 200, 20) for i in range(200)]
    medians = []
    for replicas in (1, 2, 4, 8):
        load = (
            Fleet(cost, replicas, POLICIES["least_loaded"](), requests).at_times([i * 0.005 for i in range(200)]).load
        )
        medians.append(float(np.median([outcome.ttft for outcome in load.outcomes])))
    assert medians == sorted(medians, reverse=True)
    assert medians[0] > 3 * medians[-1]


def test_equal_loads_give_equal_outcomes(cost: ReplicaCost) -> None:
    requests = [request(i % 5, 100 + i, 10) for i in range(50)]
    runs = [Fleet(cost, 3, POLICIES["prefix"](), requests).at_times([i * 0.01 for i in range(50)]) for _ in range(2)]
    first, second = ([(outcome.ttft, outcome.gaps.tolist()) for outcome in run.load.outcomes] for run in runs)
    assert first == second
    assert runs[0].num_requests == runs[1].num_requests
