"""How many requests are there at once, and when those that find no place may come again.

Knows of a request only its client, how many choices it asks for, and whether it is the repetition of another.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator

MAX_PROMISES = 1024  # later requests are told when to come, without a promise
LONGEST_WAIT_S = 60  # clients' libraries obey no longer one
GRACE_S = 5.0  # how much later than told a client may come
FIRST_SECONDS = 1.0  # that a request takes, before any has ended
SECONDS_WEIGHT = 1 / 16  # of the latest ended request in the running mean
FEWEST_DEPARTURES = 8  # for a rate


class FullError(Exception):
    """There is no place now. `retry_after_s`: whole seconds after which to come again."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class Admission:
    """Gives out `running` + `waiting` places, and tells those that find none when to come again.

    A request that is refused is promised a place after the time that it is told. Half of the waiting room is kept for
    such promises, so that requests that come for the first time do not take every place before them; if nobody comes
    again, the other half still keeps the engine busy.

    With `has_shares` a client gets a place only while more are free than it holds, so that one client alone fills at
    most half of them, and the next one finds room.
    """

    def __init__(
        self, running: int, waiting: int, *, has_shares: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = running + waiting
        self._running = running
        self._kept = waiting // 2
        self._has_shares = has_shares
        self._clock = clock
        self._held: Counter[str] = Counter()  # places, by client
        self._promises: list[tuple[float, Hashable]] = []  # from when on, and to which work; the earliest first
        self._departures: deque[float] = deque(maxlen=64)  # when requests ended while others waited
        self._seconds = FIRST_SECONDS  # that a request took: a running mean

    @contextlib.contextmanager
    def places(self, client: str, count: int, work: Hashable) -> Iterator[None]:
        """Hold `count` places in a block. `work` is equal for a request and for its repetition. Raises FullError."""
        self._enter(client, count, work)
        start = self._clock()
        try:
            yield
        finally:
            self._leave(client, count, self._clock() - start)

    def _enter(self, client: str, count: int, work: Hashable) -> None:
        now = self._clock()
        self._promises = [promise for promise in self._promises if promise[0] + GRACE_S >= now]
        mine = next((promise for promise in self._promises if promise[0] <= now and promise[1] == work), None)
        kept = min(len(self._promises), self._kept) if mine is None else 0
        free = self.limit - self._held.total()
        if count > free - kept or (self._has_shares and self._held[client] + count > free):
            raise FullError(self._promise(now, work))
        if mine is not None:
            self._promises.remove(mine)
        self._held[client] += count

    def _promise(self, now: float, work: Hashable) -> int:
        """Promise the place behind all promised ones; returns in how many seconds."""
        wait = math.ceil((len(self._promises) + 1) * self._interval(now))
        wait = min(max(wait, 1), LONGEST_WAIT_S)
        if len(self._promises) < MAX_PROMISES:
            self._promises.append((now + wait, work))
        return wait

    def _interval(self, now: float) -> float:
        """Seconds between two requests that end while others wait; before there are enough, a guess."""
        departures = self._departures
        if len(departures) < FEWEST_DEPARTURES:
            return self._seconds / self._running
        mean = (departures[-1] - departures[0]) / (len(departures) - 1)
        return max(mean, now - departures[-1])

    def _leave(self, client: str, count: int, seconds: float) -> None:
        if self._held.total() > self._running:
            self._departures.append(self._clock())
        else:
            self._departures.clear()
        self._held[client] -= count
        self._seconds += SECONDS_WEIGHT * (seconds - self._seconds)
