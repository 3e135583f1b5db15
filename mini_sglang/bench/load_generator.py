"""Sends requests at their times, whatever the server does, and notes when the tokens came.

The generator measures itself as well: how late it sent, and the CPU time it took. Knows no data sets and no reports.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mini_sglang.bench.apis import Api, Prompt, Sampling, read_answer
from mini_sglang.bench.http_client import Exchange, HttpClient

OnProgress = Callable[[int, int], None]  # requests sent, requests ended


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


@dataclass(frozen=True)
class Load:
    """A run: what came of each request, in the order given; its length, and CPU time of this process, in seconds."""

    outcomes: list[Outcome]
    seconds: float
    cpu_seconds: float


class LoadGenerator:
    """One run of `requests` through `api`. Every event is a callback: there is no task per request."""

    def __init__(
        self, client: HttpClient, api: Api, sampling: Sampling, requests: Sequence[LoadRequest], on_progress: OnProgress
    ) -> None:
        self._client = client
        self._api = api
        self._sampling = sampling
        self._requests = requests
        self._on_progress = on_progress
        self._outcomes: list[Outcome | None] = [None] * len(requests)
        self._followers: dict[int, list[int]] = defaultdict(list)  # by request: those that wait for its end
        self._unsent = iter(range(0))
        self._num_sent = self._num_ended = 0

    async def at_times(self, times: Sequence[float], *, in_turn: bool = False) -> Load:
        """Open loop: send each request at its time, in seconds from now.

        With `in_turn`, one that comes after another is held back until that is answered.
        """
        self._begin()
        for index, due in enumerate(times):
            body = self._encode(index)  # while there is time
            await asyncio.sleep(max(0.0, self._start + due - time.perf_counter()))
            after = self._requests[index].after if in_turn else None
            if after is not None and self._outcomes[after] is None:
                self._followers[after].append(index)
            else:
                self._send(index, body, due)
        return await self._finish()

    async def at_concurrency(self, concurrency: int) -> Load:
        """Closed loop: keep `concurrency` requests under way."""
        self._begin()
        self._unsent = iter(range(len(self._requests)))
        for _ in range(concurrency):
            self._send_next()
        return await self._finish()

    def _begin(self) -> None:
        gc.collect()
        gc.freeze()  # what was made before takes no part in collections during the run
        self._all_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cpu_start, self._start = time.process_time(), time.perf_counter()

    async def _finish(self) -> Load:
        try:
            if self._requests:
                await self._all_ended
        finally:
            gc.unfreeze()
        seconds, cpu_seconds = time.perf_counter() - self._start, time.process_time() - self._cpu_start
        return Load([outcome for outcome in self._outcomes if outcome is not None], seconds, cpu_seconds)

    def _encode(self, index: int) -> bytes:
        request = self._requests[index]
        return self._api.encode(request.make_prompt(), request.output_length, self._sampling)

    def _send_next(self) -> None:
        index = next(self._unsent, None)
        if index is not None:
            self._send_now(index)

    def _send_now(self, index: int) -> None:
        body = self._encode(index)
        self._send(index, body, time.perf_counter() - self._start)

    def _send(self, index: int, body: bytes, due: float) -> None:
        self._num_sent += 1
        answer = self._client.post(self._api.path, body)
        answer.add_done_callback(lambda done: self._ended(index, due, done.result()))

    def _ended(self, index: int, due: float, exchange: Exchange) -> None:
        try:
            self._outcomes[index] = _outcome(exchange, due, self._start)
            self._num_ended += 1
            self._on_progress(self._num_sent, self._num_ended)
            self._send_next()
            for follower in self._followers.pop(index, ()):
                self._send_now(follower)
        except Exception as error:  # nobody waits for a callback: hand it to who waits for the run
            if not self._all_ended.done():
                self._all_ended.set_exception(error)
        if self._num_ended == len(self._requests) and not self._all_ended.done():
            self._all_ended.set_result(None)


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
