"""The context that the routes of one server share: the engine, the tokenizer, the settings, the metrics, and the places
for requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fastapi import Request

from mini_sglang.ipc.messages import EngineInfo
from mini_sglang.outputs import RequestOutput
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.stats import SchedulerStats
from mini_sglang.server.answers.model_format import ModelFormat
from mini_sglang.server.config import ServerConfig
from mini_sglang.server.errors import ApiError, no_such_model
from mini_sglang.server.intake import RequestPacer
from mini_sglang.server.metrics import ServerMetrics
from mini_sglang.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mini_sglang.server.tracing import Tracing

MAX_PROMISES = 1024  # later requests are told when to come, without a promise
LONGEST_WAIT_S = 60  # clients' libraries obey no longer one
GRACE_S = 5.0  # how much later than told a client may come
FIRST_SECONDS = 1.0  # that a request takes, before any has ended
SECONDS_WEIGHT = 1 / 16  # of the latest ended request in the running mean
FEWEST_DEPARTURES = 8  # for a rate


class ServingEngine(Protocol):
    """The part of AsyncEngine that a server needs; see the docstrings there."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def request_ids(self) -> list[str]: ...

    def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        priority: int = 0,
        client: str = "",
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def abort(self, request_id: str) -> bool: ...

    async def ping(self) -> None: ...

    async def stats(self) -> SchedulerStats: ...

    async def flush_cache(self) -> int: ...

    async def start_trace(self, num_steps: int | None = None) -> None: ...

    async def stop_trace(self) -> str: ...


@dataclass(frozen=True)
class ServerContext:
    """The state of one server."""

    engine: ServingEngine
    tokenizer: Tokenizer
    config: ServerConfig
    tracing: Tracing | None = None  # if there is a collector
    jobs: dict[str, list[str]] = field(default_factory=dict)  # running jobs: the engine's request ids by the job's id
    pacer: RequestPacer = field(default_factory=RequestPacer)
    draining: asyncio.Event = field(default_factory=asyncio.Event)  # no new work is taken
    drained: asyncio.Event = field(default_factory=asyncio.Event)  # and what ran has ended
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    waits: set[asyncio.Timeout] = field(default_factory=set)  # for the rest of a body
    probes: set[asyncio.Task[None]] = field(default_factory=set)  # the one of /health_generate under way, if any
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time
    started: float = field(default_factory=time.monotonic)  # the same moment, on a clock that never jumps

    @functools.cached_property
    def metrics(self) -> ServerMetrics:
        return ServerMetrics(self.model_name, self.engine.info, self.config.metrics_names)

    @functools.cached_property
    def admission(self) -> Admission:
        """The places for requests."""
        running = self.engine.info.max_running_requests
        return Admission(running, self.config.max_waiting_requests, has_shares=len(self.config.api_key) > 1)

    @functools.cached_property
    def model_format(self) -> ModelFormat:
        """How the model writes reasoning and tool calls."""
        return ModelFormat.of(self.tokenizer, self.config)

    async def close(self) -> None:
        """Send the traces that are left, when nothing is served any more."""
        if self.tracing is not None:
            await self.tracing.close()

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that clients know the model by."""
        return self.config.served_model_name or (self.shown_model,)

    @functools.cached_property
    def shown_model(self) -> str:
        return shown_name(self.engine.info.model)

    @property
    def model_name(self) -> str:
        """The first of the names."""
        return self.model_names[0]

    def check_model(self, name: str | None) -> str:
        """The name to answer with: `name`, or the first one if it is None. Raises ApiError 404 for other names."""
        if name is None:
            return self.model_name
        is_path = name == self.engine.info.model and not self.config.served_model_name
        if name not in self.model_names and not is_path:
            raise no_such_model(name, self.model_names)
        return name

    @contextlib.asynccontextmanager
    async def unless_stopping(self) -> AsyncGenerator[None, None]:
        """A block that waits for a client; when the server stops, the wait ends with ApiError 503."""
        try:
            async with asyncio.timeout(0 if self.stopping.is_set() else None) as wait:
                self.waits.add(wait)
                try:
                    yield
                finally:
                    self.waits.discard(wait)
        except TimeoutError:
            raise ApiError(503, "the server is stopping", code="stopping") from None

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """A block around a job, which a drain waits for. Raises ApiError 503 if the server is draining."""
        self.check_accepting()
        try:
            yield
        finally:
            self._note_drained()

    def check_accepting(self) -> None:
        """Raise ApiError 503 if no new work is taken. The client is to ask again, over another connection."""
        if self.draining.is_set():
            headers = {"retry-after": "1", "connection": "close"}
            raise ApiError(503, "the server is draining and takes no new requests", code="draining", headers=headers)

    def drain(self) -> None:
        """Take no new work; `drained` is set when all jobs have ended."""
        self.draining.set()
        self._note_drained()

    def _note_drained(self) -> None:
        if self.draining.is_set() and not self.jobs:
            self.drained.set()

    def stop(self) -> None:
        """End the waits for clients, since the server stops."""
        self.stopping.set()
        for wait in self.waits:
            wait.reschedule(0)


def shown_name(model: str) -> str:
    """The model's name, or the last part of the path to it: clients need not know this machine's folders."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_absolute() or path.exists() else model


def context_of(request: Request) -> ServerContext:
    """The context of the app that serves this request."""
    context: ServerContext = request.app.state.context
    return context


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
