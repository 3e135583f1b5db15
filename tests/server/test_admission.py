"""Places for requests: how many there are, who gets one, and that who comes again as told gets one too."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from contextlib import ExitStack, suppress

import pytest

from mini_sglang.server.context import (
    FIRST_SECONDS,
    GRACE_S,
    LONGEST_WAIT_S,
    MAX_PROMISES,
    SECONDS_WEIGHT,
    Admission,
    FullError,
)


class Door:
    """An Admission with a clock that the test sets."""

    def __init__(self, running: int = 4, waiting: int = 8, *, has_shares: bool = False) -> None:
        self.now = 0.0
        self.admission = Admission(running, waiting, has_shares=has_shares, clock=lambda: self.now)
        self._inside: list[ExitStack] = []

    def enter(self, work: object = None, client: str = "", count: int = 1) -> int | None:
        """None, or after how many seconds to come again."""
        stack = ExitStack()
        try:
            stack.enter_context(self.admission.places(client, count, work))
        except FullError as full:
            return full.retry_after_s
        self._inside.append(stack)
        return None

    def leave(self, count: int = 1) -> None:
        for _ in range(count):
            self._inside.pop(0).close()

    def fill(self) -> None:
        while self.enter() is None:
            pass
        self.now += GRACE_S + 2  # the last one's promise is over
        assert len(self._inside) == self.admission.limit


def test_there_are_as_many_places_as_may_run_and_wait() -> None:
    door = Door(running=2, waiting=3)
    assert [door.enter(work) for work in range(7)] == [None] * 5 + [1, 1]
    assert Door(running=2, waiting=3).enter(count=5) is None
    assert Door(running=2, waiting=3).enter(count=6) == 1


def test_a_place_comes_back_when_its_request_ends_however() -> None:
    door = Door(running=1, waiting=1)
    for _ in range(3):
        with suppress(KeyError), door.admission.places("", 2, None):
            assert door.enter() == 1
            raise KeyError
        door.now += 10
    assert door.enter(count=2) is None


def test_one_that_comes_again_as_told_passes_those_that_come_first() -> None:
    door = Door()
    door.fill()
    told = door.enter("again")
    assert told == 1
    door.leave()
    assert door.enter("first time") is not None  # the one free place is promised
    assert door.enter("again") is not None  # too early
    door.now += told
    assert door.enter("first time too") is not None
    assert door.enter("again") is None


def test_a_promise_is_kept_once() -> None:
    door = Door(waiting=2)
    door.fill()
    told = door.enter("again")
    assert told is not None
    door.now += told
    door.leave(2)
    assert door.enter("again") is None
    assert door.enter("other") is None  # nothing is promised any more


def test_at_most_half_of_the_waiting_room_is_kept() -> None:
    door = Door(running=4, waiting=8)
    door.fill()
    for work in range(20):
        door.enter(work)
    door.leave(8)
    assert [door.enter("new") for _ in range(5)].count(None) == 4


@pytest.mark.parametrize(("late", "answer"), [(GRACE_S, 1), (GRACE_S + 0.01, None)])
def test_a_promise_ends_some_time_after_it_was_due(late: float, answer: int | None) -> None:
    door = Door()
    door.fill()
    told = door.enter("again")
    assert told is not None
    door.leave()
    door.now += told + late
    assert door.enter("new") == answer


def test_the_wait_follows_the_rate_at_which_requests_end() -> None:
    door = Door(running=4, waiting=40)
    door.fill()
    for _ in range(20):
        door.now += 0.5
        door.leave()
    door.now += 0.5
    while door.enter() is None:
        pass
    waits = [door.enter(work) for work in range(9)]
    assert waits == [1, 2, 2, 3, 3, 4, 4, 5, 5]  # a place comes each half second, and one was promised before
    door.now += 3.5  # no place has come for four seconds
    assert door.enter("later") == 11 * 4


def test_the_first_wait_is_guessed_from_how_long_requests_take() -> None:
    door = Door(running=1, waiting=1)
    for _ in range(200):
        door.enter()
        door.now += 6
        door.leave()
    assert door.enter(count=2) is None
    assert [door.enter(work) for work in range(3)] == [6, 12, 18]
    seconds = FIRST_SECONDS
    door = Door(running=1, waiting=1)
    door.enter()
    door.now += 33
    door.leave()
    seconds += SECONDS_WEIGHT * (33 - seconds)
    assert door.enter(count=2) is None
    assert door.enter() == int(seconds) == 3


def test_the_rate_is_that_of_a_full_engine() -> None:
    door = Door(running=2, waiting=20)
    door.fill()
    for _ in range(20):  # one each second
        door.now += 1
        door.leave()
    for _ in range(20):  # with room for others the time between two says nothing
        door.now += 100
        door.leave(1 if door.now < 1500 else 0)
        door.enter()
    door.fill()
    for _ in range(8):
        door.now += 0.1
        door.leave()
    while door.enter() is None:
        pass
    assert door.enter("again") == 1


def test_no_wait_is_longer_than_clients_obey_and_promises_are_bounded() -> None:
    door = Door(running=1, waiting=1)
    door.fill()
    waits = [door.enter(work) for work in range(MAX_PROMISES + 10)]
    assert max(wait for wait in waits if wait) == LONGEST_WAIT_S
    assert len(door.admission._promises) == MAX_PROMISES


def test_one_of_several_clients_fills_half_of_the_places() -> None:
    door = Door(running=4, waiting=8, has_shares=True)
    assert [door.enter(client="a") for _ in range(20)].count(None) == 6
    door.now += 100
    assert [door.enter(client="b") for _ in range(20)].count(None) == 3
    door.now += 100
    assert door.enter(client="c") is None
    assert [Door(running=4, waiting=8).enter(client="a") for _ in range(20)].count(None) == 20


@pytest.mark.parametrize("comes_again", [True, False])
def test_under_three_times_the_load_places_are_taken_and_promises_kept(comes_again: bool) -> None:
    """A place comes every 0.1 s and clients come every 0.033 s; each comes again as told, or none does."""
    door, chance, tried = Door(running=8, waiting=32), random.Random(0), Counter[str]()
    coming = [(index / 30, 0, index) for index in range(30 * 60)]
    heapq.heapify(coming)
    next_end = 0.1
    while coming and coming[0][0] < 60:
        at, times, work = heapq.heappop(coming)
        while next_end < at:
            door.now = next_end
            door.leave(min(len(door._inside), 1))
            next_end += 0.1
        door.now = at
        told = door.enter(work)
        kind = "again" if times else "first"
        tried[f"{kind} {'in' if told is None else 'out'}"] += 1
        if told is not None and comes_again:
            heapq.heappush(coming, (at + told + chance.uniform(0.001, 0.2), times + 1, work))
    accepted = tried["first in"] + tried["again in"]
    assert accepted >= 0.95 * 600
    if comes_again:
        assert tried["again in"] / (tried["again in"] + tried["again out"]) >= 0.9
        assert tried["again in"] > 200
