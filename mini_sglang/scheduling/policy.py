"""The order in which waiting requests are admitted and running ones keep their pages.

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
        """The key by which waiting and running requests are sorted. The last running request is preempted first."""
        return (0, request.arrival)

    def order(self, waiting: Sequence[Request], cached_tokens: Callable[[Request], int]) -> list[Request]:
        """Return the next candidates, best first. `waiting` is sorted; `cached_tokens` looks up the prefix cache."""
        return list(itertools.islice(waiting, WINDOW))

    def admitted(self, request: Request, waiting: Sequence[Request]) -> None:
        """Learn that `request` is about to be taken from `waiting`."""


class PriorityPolicy(Policy):
    """Smaller `priority` first, equal ones in order of arrival. A request with a large one may wait for ever."""

    def sort_key(self, request: Request) -> SortKey:
        return (request.priority, request.arrival)


class LongestPrefixPolicy(Policy):
    """Longest cached prefix first among the first WINDOW waiting requests, so that cached pages are used before they
    are evicted. The request that has waited longest is passed over at most MAX_OVERTAKEN times.
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
