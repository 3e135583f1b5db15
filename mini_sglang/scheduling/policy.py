"""The order in which waiting requests are admitted and running ones keep their pages.

A policy orders; it never looks at pages or budgets. Everything is a list sorted by a total order, so the same requests
in the same order give the same schedule.

Clients take turns: a request's turn is the number of tokens that its client has asked for before it, so whoever asked
for less comes first, however many requests another one has waiting. A client alone is served as requests come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from mini_sglang.request import Request

WINDOW = 128  # waiting requests looked at in one step
MAX_OVERTAKEN = 32  # admissions that may pass the longest waiting request under lpm

FIRST_EXPECTED_OUTPUT = 128.0  # tokens of an answer, before any request has ended
EXPECTED_OUTPUT_WEIGHT = 1 / 16  # of the latest ended request in the running mean

SortKey = tuple[int, ...]


class Policy:
    """First come, first served among the requests of a client."""

    def __init__(self) -> None:
        self._turn = 0  # the latest one of an admitted request: a client that comes back is owed nothing from before
        self._next_turns: dict[str, int] = {}  # of each client's next request, unless `_turn` is further
        self._expected_outputs: dict[str, float] = {}  # tokens of each client's answers: a running mean

    def sort_key(self, request: Request) -> SortKey:
        """The key by which waiting and running requests are sorted. The last running request is preempted first."""
        return (request.turn, request.arrival)

    def arrived(self, request: Request) -> None:
        """Give a request its turn, before it is sorted in. It asks for its prompt and an answer of average length."""
        client, num_prompt_tokens = request.client, len(request.prompt_ids)
        request.turn = max(self._turn, self._next_turns.get(client, 0))
        expected = int(self._expected_outputs.get(client, FIRST_EXPECTED_OUTPUT))
        num_tokens = min(num_prompt_tokens + expected, request.max_num_tokens)
        self._next_turns[client] = request.turn + num_tokens

    def ended(self, request: Request) -> None:
        """Learn how long the answer was that a client has got."""
        expected = self._expected_outputs.get(request.client, FIRST_EXPECTED_OUTPUT)
        expected += EXPECTED_OUTPUT_WEIGHT * (len(request.output_ids) - expected)
        self._expected_outputs[request.client] = expected

    def order(self, waiting: Sequence[Request], cached_tokens: Callable[[Request], int]) -> list[Request]:
        """Return the next candidates, best first. `waiting` is sorted; `cached_tokens` looks up the prefix cache."""
        return list(itertools.islice(waiting, WINDOW))

    def admitted(self, request: Request, waiting: Sequence[Request]) -> None:
        """Learn that `request` is about to be taken from `waiting`."""
        self._turn = max(self._turn, request.turn)


class PriorityPolicy(Policy):
    """Smaller `priority` first, equal ones as above. A request with a large one may wait for ever."""

    def sort_key(self, request: Request) -> SortKey:
        return (request.priority, *super().sort_key(request))


class LongestPrefixPolicy(Policy):
    """Longest cached prefix first among the first WINDOW waiting requests, so that cached pages are used before they
    are evicted. The request that has waited longest is passed over at most MAX_OVERTAKEN times.
    """

    def __init__(self) -> None:
        super().__init__()
        self._oldest: Request | None = None
        self._overtaken = 0

    def order(self, waiting: Sequence[Request], cached_tokens: Callable[[Request], int]) -> list[Request]:
        window = list(itertools.islice(waiting, WINDOW))
        if window and window[0] is self._oldest and self._overtaken >= MAX_OVERTAKEN:
            return window
        return sorted(window, key=cached_tokens, reverse=True)  # stable: equal prefixes stay in order of arrival

    def admitted(self, request: Request, waiting: Sequence[Request]) -> None:
        super().admitted(request, waiting)
        if waiting[0] is not self._oldest:
            self._oldest, self._overtaken = waiting[0], 0
        if request is not self._oldest:
            self._overtaken += 1


POLICIES: dict[str, type[Policy]] = {"fcfs": Policy, "lpm": LongestPrefixPolicy, "priority": PriorityPolicy}
