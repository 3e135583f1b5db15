"""In which order waiting requests are admitted, and which running one gives way first when pages run out.

A policy orders; it never looks at pages or budgets. Everything is a list sorted by a total order, so the same requests
in the same order give the same schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from mini_sglang.request import Request

WINDOW = 128  # waiting requests looked at in one step
MAX_OVERTAKEN = 32  # admissions that may pass the longest waiting request under lpm

SortKey = tuple[int, int]


class Policy:
    """First come, first served."""

    def sort_key(self, request: Request) -> SortKey:
        """Sorts the queue of waiting requests and the list of running ones. Of the latter the last is preempted."""
        return (0, request.arrival)

    def order(self, waiting: Sequence[Request], cached_tokens: Callable[[Request], int]) -> list[Request]:
        """The next candidates, best first. `waiting` is sorted by rank; `cached_tokens` looks up the prefix cache."""
        return list(itertools.islice(waiting, WINDOW))

    def admitted(self, request: Request, waiting: Sequence[Request]) -> None:
        """Called with each request that is taken from `waiting`, just before it is."""


class PriorityPolicy(Policy):
    """Smaller `priority` first, equal ones in order of arrival. A large one may wait for ever: that is what it asks."""

    def sort_key(self, request: Request) -> SortKey:
        return (request.priority, request.arrival)


class LongestPrefixPolicy(Policy):
    """Longest cached prefix first, among the first WINDOW waiting, so that what is cached is used before it is evicted.

    The longest waiting request is passed over at most MAX_OVERTAKEN times.
    """

    def __init__(self) -> None:
        self._oldest: Request | None = None
        self._overtaken = 0

    def order(self, waiting: Sequence[Request], cached_tokens: Callable[[Request], int]) -> list[Request]:
        window = list(itertools.islice(waiting, WINDOW))
        if window and window[0] is self._oldest and self._overtaken >= MAX_OVERTAKEN:
            return window
        return sorted(window, key=cached_tokens, reverse=True)  # stable: equal prefixes stay in order of arrival

    def admitted(self, request: Request, waiting: Sequence[Request]) -> None:
        if waiting[0] is not self._oldest:
            self._oldest, self._overtaken = waiting[0], 0
        if request is not self._oldest:
            self._overtaken += 1


POLICIES: dict[str, type[Policy]] = {"fcfs": Policy, "lpm": LongestPrefixPolicy, "priority": PriorityPolicy}
