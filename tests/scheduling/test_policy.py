"""Policies: who is admitted next, who gives way first."""

from __future__ import annotations

from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.policy import (
    FIRST_EXPECTED_OUTPUT,
    MAX_OVERTAKEN,
    POLICIES,
    WINDOW,
    LongestPrefixPolicy,
    Policy,
    PriorityPolicy,
)


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


class Queue:
    """Requests that wait, in their policy's order."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.waiting: list[Request] = []
        self._arrivals = 0

    def arrive(self, client: str, num_tokens: int = 100, count: int = 1, max_tokens: int = 0) -> list[Request]:
        arriving = []
        for _ in range(count):
            self._arrivals += 1
            request = Request(str(self._arrivals), [0] * num_tokens, SamplingParams(), arrival=self._arrivals)
            request.client, request.max_num_tokens = client, num_tokens + max_tokens
            self.policy.arrived(request)
            arriving.append(request)
        self.waiting = sorted([*self.waiting, *arriving], key=self.policy.sort_key)
        return arriving

    def admit(self, count: int) -> str:
        """The clients of the next requests that are admitted, in their order."""
        admitted = self.waiting[:count]
        for request in admitted:
            self.policy.admitted(request, self.waiting)
            self.waiting.remove(request)
        return "".join(request.client for request in admitted)


def test_one_client_is_served_as_its_requests_come() -> None:
    queue = Queue(Policy())
    for num_tokens in (500, 1, 50, 7, 300):
        queue.arrive("a", num_tokens, max_tokens=num_tokens)
        queue.admit(1 if num_tokens == 50 else 0)
    assert [request.arrival for request in queue.waiting] == [2, 3, 4, 5]


def test_a_client_with_one_request_does_not_wait_for_all_of_another() -> None:
    queue = Queue(Policy())
    queue.arrive("a", count=50)
    queue.arrive("b")
    assert queue.admit(3) == "aba"


def test_clients_get_equally_many_tokens_not_requests() -> None:
    queue = Queue(Policy())
    queue.arrive("a", num_tokens=400, count=50)
    queue.arrive("b", num_tokens=100, count=50)
    assert queue.admit(25).count("b") == 20


def test_a_client_that_was_away_is_owed_nothing() -> None:
    for policy in POLICIES.values():
        queue = Queue(policy())
        queue.arrive("a", count=40)
        assert queue.admit(20) == "a" * 20
        queue.arrive("b", count=20)
        assert sorted(queue.admit(10)) == list("aaaaabbbbb"), policy


def test_the_latest_turn_never_goes_back() -> None:
    queue = Queue(Policy())
    [first, second] = queue.arrive("a", count=2)
    for request in (second, first):  # a preempted one is admitted again
        queue.policy.admitted(request, [first, second])
    [other] = queue.arrive("b")
    assert other.turn == second.turn == 100


def test_a_request_asks_for_an_answer_as_long_as_its_client_gets() -> None:
    queue = Queue(Policy())
    turns = [request.turn for request in queue.arrive("a", num_tokens=10, count=2, max_tokens=1000)]
    assert turns == [0, 10 + FIRST_EXPECTED_OUTPUT]
    [short, after] = queue.arrive("b", num_tokens=10, count=2, max_tokens=5)
    assert after.turn - short.turn == 15
    short.output_ids = [0] * 4
    for _ in range(100):
        queue.policy.ended(short)
    [third, fourth] = queue.arrive("b", num_tokens=10, count=2, max_tokens=1000)
    assert fourth.turn - third.turn == 14
    [fifth, sixth] = queue.arrive("a", num_tokens=10, count=2, max_tokens=1000)
    assert sixth.turn - fifth.turn == 10 + FIRST_EXPECTED_OUTPUT


def test_equal_priorities_take_turns() -> None:
    queue = Queue(PriorityPolicy())
    queue.arrive("a", count=5)
    queue.arrive("b", count=5)
    assert queue.admit(4) == "abab"
