"""A load on several replicas in virtual time: requests come, a policy routes them, tokens come back.

What comes out is the same `Load` of outcomes that a load generator measures. Events are taken in the order of their
times; equal times in the order in which they were found, so equal loads give equal outcomes. Microseconds inside.
"""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from mini_sglang.bench.load_generator import Load, LoadRequest, Outcome
from mini_sglang.bench.serving_figures import Distribution
from mini_sglang.errors import FieldError
from mini_sglang.outputs import StepOutputs
from mini_sglang.request import Request
from mini_sglang.routing import RoutingPolicy
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.simulate.cost import ReplicaCost
from mini_sglang.simulate.replica import Replica

_COME, _END, _TURN = range(3)  # events: request i reaches the router; request i has ended; replica i's turn
_Event = tuple[float, int, int, int]  # us, number of the event, kind, i


@dataclass(slots=True)
class _Answer:
    """What has come of a request so far."""

    due_us: float
    replica: int
    input_tokens: int
    cached_tokens: int = 0
    times_us: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True)
class FleetLoad:
    """A run, and what each replica had of it."""

    load: Load
    num_requests: list[int]  # by replica
    busy: list[float]  # share of the run in which each replica's device computed
    queue_ms: Distribution | None  # from when requests come to a replica until their first step


class Fleet:
    """One run of `requests` on `num_replicas` replicas that begin with empty caches."""

    def __init__(
        self, cost: ReplicaCost, num_replicas: int, policy: RoutingPolicy, requests: Sequence[LoadRequest]
    ) -> None:
        self._replicas = [Replica(cost, seed) for seed in range(num_replicas)]
        self._request_us = cost.request_us
        self._policy = policy
        self._requests = requests
        self._loads = dict.fromkeys(range(num_replicas), 0)
        self._num_sent = [0] * num_replicas
        self._answers: dict[str, _Answer] = {}
        self._outcomes: list[Outcome | None] = [None] * len(requests)
        self._events: list[_Event] = []
        self._num_events = 0
        self._followers: dict[int, list[tuple[int, float]]] = defaultdict(list)  # and when each is due
        self._unsent: Iterator[int] = iter(())  # of a closed loop

    def at_times(self, times: Sequence[float], *, in_turn: bool = False) -> FleetLoad:
        """Open loop: requests come at these times in seconds; with `in_turn`, not before the one that they follow."""
        for index, due in enumerate(times):
            after = self._requests[index].after if in_turn else None
            if after is None:
                self._send(due * 1e6, index)
            else:
                self._followers[after].append((index, due * 1e6))
        return self._run()

    def at_concurrency(self, concurrency: int) -> FleetLoad:
        """Closed loop: keep `concurrency` requests under way."""
        self._unsent = iter(range(concurrency, len(self._requests)))
        for index in range(min(concurrency, len(self._requests))):
            self._send(0.0, index)
        return self._run()

    def _send(self, us: float, index: int) -> None:
        self._push(us + self._request_us, _COME, index)

    def _push(self, us: float, kind: int, index: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (us, self._num_events, kind, index))

    def _run(self) -> FleetLoad:
        events, now_us = self._events, 0.0
        while events:
            now_us, _, kind, index = heapq.heappop(events)
            if kind == _TURN:
                self._take_turns(index, now_us)
            elif kind == _COME:
                self._come(index, now_us)
            else:
                self._finish(index, now_us)
        seconds = max(now_us / 1e6, 1e-9)
        load = Load([cast(Outcome, outcome) for outcome in self._outcomes], seconds, 0.0)
        busy = [replica.busy_us / 1e6 / seconds for replica in self._replicas]
        queue_ms = Distribution.of([us / 1e3 for replica in self._replicas for us in replica.queued_us])
        return FleetLoad(load, self._num_sent, busy, queue_ms)

    def _take_turns(self, index: int, now_us: float) -> None:
        """Let a replica take turns until something else happens first, or it has nothing to do."""
        replica, events = self._replicas[index], self._events
        while True:
            now_us, outputs = replica.turn(now_us)
            if outputs is not None:
                self._take_tokens(outputs, now_us)
            if replica.is_idle:
                return
            if events and events[0][0] <= now_us:
                self._push(now_us, _TURN, index)
                return

    def _take_tokens(self, outputs: StepOutputs, now_us: float) -> None:
        answers = self._answers
        for request_id in outputs.request_ids:
            answers[request_id].times_us.append(now_us)
        for output in outputs.others:
            answer = answers[output.request_id]
            answer.times_us.append(now_us)
            answer.cached_tokens = output.num_cached_tokens
            if output.finish_reason is not None:
                self._push(now_us, _END, int(output.request_id))

    def _come(self, index: int, now_us: float) -> None:
        wanted = self._requests[index]
        prompt = wanted.make_prompt()
        if not isinstance(prompt[0], int):
            raise ValueError("only prompts of token ids can be simulated")
        chosen: int = self._policy.choose(cast("list[int]", prompt), self._loads)
        params = SamplingParams(max_tokens=wanted.output_length, temperature=0.0, ignore_eos=True)
        replica = self._replicas[chosen]
        self._answers[str(index)] = _Answer(now_us - self._request_us, chosen, len(prompt))
        self._loads[chosen] += 1
        self._num_sent[chosen] += 1
        was_idle = replica.is_idle
        try:
            replica.send(Request(str(index), cast("list[int]", prompt), params), now_us)
        except FieldError as error:
            self._finish(index, now_us, "HTTP 400", str(error))
            return
        if was_idle:
            replica.is_idle = False
            self._push(now_us, _TURN, chosen)

    def _finish(self, index: int, now_us: float, error: str | None = None, detail: str = "") -> None:
        """Keep what came of a request, and let those come that have waited for it."""
        answer = self._answers.pop(str(index))
        self._loads[answer.replica] -= 1
        self._outcomes[index] = self._outcome(answer, error, detail)
        for follower, due_us in self._followers.pop(index, ()):
            self._send(max(now_us, due_us), follower)
        if (unsent := next(self._unsent, None)) is not None:
            self._send(now_us, unsent)

    def _outcome(self, answer: _Answer, error: str | None, detail: str) -> Outcome:
        due = answer.due_us / 1e6
        outcome = Outcome(due, due, input_tokens=answer.input_tokens, cached_tokens=answer.cached_tokens)
        if error is not None:
            outcome.error, outcome.detail = error, detail
            return outcome
        times = np.frombuffer(answer.times_us) / 1e6
        outcome.output_tokens = len(times)
        outcome.ttft = float(times[0]) - due
        outcome.e2e = float(times[-1]) - due
        outcome.gaps = np.diff(times)
        return outcome
