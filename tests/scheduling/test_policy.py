"""Policies: who is admitted next, who gives way first."""

from __future__ import annotations

from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.policy import MAX_OVERTAKEN, WINDOW, LongestPrefixPolicy, Policy, PriorityPolicy


def requests(count: int) -> list[Request]:
    return [Request(str(i), [0], SamplingParams(), arrival=i, priority=i % 3) for i in range(count)]


def test_fcfs_keeps_the_order_of_arrival() -> None:
    waiting = requests(5)
    assert Policy().order(waiting, lambda request: request.arrival) == waiting


def test_only_a_window_of_the_queue_is_looked_at() -> None:
    assert len(Policy().order(requests(WINDOW + 50), lambda request: 0)) == WINDOW


def test_priority_ranks_by_priority_then_arrival() -> None:
    ranked = sorted(requests(7), key=PriorityPolicy().sort_key)
    assert [request.arrival for request in ranked] == [0, 3, 6, 1, 4, 2, 5]


def test_lpm_takes_the_longest_cached_prefix_and_equal_ones_in_order() -> None:
    waiting = requests(4)
    cached = {0: 5, 1: 9, 2: 9, 3: 7}
    order = LongestPrefixPolicy().order(waiting, lambda request: cached[request.arrival])
    assert [request.arrival for request in order] == [1, 2, 3, 0]


def test_lpm_passes_over_the_oldest_a_bounded_number_of_times() -> None:
    policy, (oldest, *others) = LongestPrefixPolicy(), requests(MAX_OVERTAKEN + 10)
    waiting, admitted = [oldest, *others], []
    while oldest in waiting:
        first = policy.order(waiting, lambda request: request.arrival)[0]
        policy.admitted(first, waiting)
        waiting.remove(first)
        admitted.append(first)
    assert len(admitted) == MAX_OVERTAKEN + 1
