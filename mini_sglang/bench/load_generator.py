"""Sends requests at their times, whatever the server does, and records when their tokens arrived.

The generator measures itself as well: how late it sent each request, and the CPU time it took. Knows no data sets and
no reports.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mini_sglang.bench.apis import Api, Prompt, Sampling, read_answer
from mini_sglang.bench.http_client import Exchange, HttpClient

Arrival = Literal["poisson", "gamma", "fixed"]
OnProgress = Callable[[int, int], None]  # requests sent, requests ended
_FAILURES_AT_ONCE = 500  # between two collections of what they leave behind, 13 kB each


@dataclass(frozen=True)
class LoadRequest:
    """A prompt, made when it is needed, and how many tokens to ask for."""

    make_prompt: Callable[[], Prompt]
    output_length: int
    timestamp: float | None = None  # seconds since the start of the trace that it is from
    after: int | None = None  # index of the request of the same conversation that must have been answered before


@dataclass(slots=True)
class Outcome:
    """What came of one request. Times in seconds; `due` and `started` count from the start of the run."""

    due: float  # when it was to be sent; in a closed loop, and after another request: when that could be done
    started: float  # when it was
    e2e: float = 0.0
    ttft: float = 0.0
    gaps: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0))  # float64 [output_tokens - 1], about
    input_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None
    detail: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl_p99(self) -> float | None:
        """The 99th percentile of the request's own inter-token latencies, interpolated."""
        return float(np.percentile(self.gaps, 99)) if len(self.gaps) else None

    @property
    def itl_max(self) -> float | None:
        """The longest pause between two tokens."""
        return float(self.gaps.max()) if len(self.gaps) else None


@dataclass(frozen=True)
class Load:
    """A run: what came of each request, in the order given; its length, and CPU time of this process, in seconds."""

    outcomes: list[Outcome]
    seconds: float
    cpu_seconds: float


class LoadGenerator:
    """One run of `requests` through `api`, a task for each."""

    def __init__(
        self, client: HttpClient, api: Api, sampling: Sampling, requests: Sequence[LoadRequest], on_progress: OnProgress
    ) -> None:
        self._client = client
        self._api = api
        self._sampling = sampling
        self._requests = requests
        self._on_progress = on_progress
        self._outcomes: list[Outcome | None] = [None] * len(requests)
        self._num_sent = self._num_ended = self._num_failed = 0

    async def at_times(self, times: Sequence[float], *, in_turn: bool = False) -> Load:
        """Open loop: send each request at its time, in seconds from now.

        With `in_turn`, one that comes after another is held back until that is answered.
        """

        async def send_all(group: asyncio.TaskGroup) -> None:
            tasks: list[asyncio.Task[None]] = []
            for index, due in enumerate(times):
                body = self._encode(index)  # while there is time
                await asyncio.sleep(max(0.0, due - self._now()))
                after = self._requests[index].after if in_turn else None
                earlier = None if after is None else tasks[after]
                tasks.append(group.create_task(self._send(index, body, due, earlier)))

        return await self._measure(send_all)

    async def at_concurrency(self, concurrency: int) -> Load:
        """Closed loop: keep `concurrency` requests under way."""
        unsent = iter(range(len(self._requests)))

        async def send_one_after_another() -> None:
            for index in unsent:
                body = self._encode(index)
                await self._send(index, body, self._now())

        async def send_all(group: asyncio.TaskGroup) -> None:
            for _ in range(concurrency):
                group.create_task(send_one_after_another())

        return await self._measure(send_all)

    async def _measure(self, send_all: Callable[[asyncio.TaskGroup], Awaitable[None]]) -> Load:
        """Run `send_all` and every task it makes. Raises the first error of any of them."""
        gc.collect()
        gc.disable()  # a collection holds up all streams for many ms; what succeeds leaves next to nothing behind
        cpu_start, self._start = time.process_time(), time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                await send_all(group)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            gc.enable()
        seconds, cpu_seconds = self._now(), time.process_time() - cpu_start
        return Load([outcome for outcome in self._outcomes if outcome is not None], seconds, cpu_seconds)

    def _now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self._start

    def _encode(self, index: int) -> bytes:
        request = self._requests[index]
        return self._api.encode(request.make_prompt(), request.output_length, self._sampling)

    async def _send(self, index: int, body: bytes, due: float, earlier: asyncio.Task[None] | None = None) -> None:
        """Send request `index`, not before `earlier` has ended, and keep what came of it."""
        if earlier is not None and not earlier.done():
            await asyncio.wait((earlier,))
            due = self._now()
        self._num_sent += 1
        exchange = await self._client.post(self._api.path, body)
        outcome = self._outcomes[index] = _outcome(exchange, due, self._start)
        self._num_ended += 1
        self._on_progress(self._num_sent, self._num_ended)
        if outcome.error is not None:
            self._num_failed += 1
            if self._num_failed % _FAILURES_AT_ONCE == 0:
                gc.collect(0)  # exceptions and their frames refer to each other


def arrival_times(
    count: int, rate: float, arrival: Arrival, rng: np.random.Generator, burstiness: float = 1.0
) -> np.ndarray[Any, Any]:
    """When to send `count` requests, `rate` a second on average and all at once if it is infinite: float64 seconds.

    poisson: requests arrive independently of each other. fixed: all gaps are equal. gamma: gaps follow a gamma
    distribution of shape `burstiness`: 1 is Poisson, less comes in bursts (the squared coefficient of variation is
    1 / burstiness). Raises ValueError for a rate or a burstiness that is not positive.
    """
    if not rate > 0:
        raise ValueError(f"rate must be above 0 requests/s, got {rate}")
    if not burstiness > 0:
        raise ValueError(f"burstiness must be above 0, got {burstiness}")
    if np.isinf(rate):
        return np.zeros(count)
    if arrival == "fixed":
        return np.arange(count) / rate
    shape = burstiness if arrival == "gamma" else 1.0
    return np.cumsum(rng.gamma(shape, 1 / (rate * shape), count))


def _outcome(exchange: Exchange, due: float, start: float) -> Outcome:
    answer = read_answer(exchange)
    outcome = Outcome(
        due=due,
        started=exchange.started - start,
        e2e=exchange.ended - exchange.started,
        input_tokens=answer.input_tokens,
        output_tokens=answer.output_tokens,
        cached_tokens=answer.cached_tokens,
        error=answer.error,
        detail=answer.detail,
    )
    if answer.times:
        outcome.ttft = answer.times[0] - exchange.started
        outcome.e2e = answer.times[-1] - exchange.started
        counts = np.asarray(answer.counts[1:], int)
        outcome.gaps = np.repeat(np.diff(answer.times) / counts, counts)
    return outcome
