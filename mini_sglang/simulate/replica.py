"""One replica in virtual time: the real scheduler and cache, and a clock that a cost model moves.

A turn is one round of the engine's loop, as `Engine.step` runs it: schedule, launch, read the oldest step that is due.
Instead of tokens being computed, time passes. Microseconds throughout. Knows no fleet and no load.
"""

from __future__ import annotations

import random
from collections import deque

from mini_sglang.outputs import StepOutputs
from mini_sglang.request import Request
from mini_sglang.scheduling.batch import ScheduledBatch, StepResult
from mini_sglang.scheduling.scheduler import Scheduler
from mini_sglang.scheduling.step_cost import Work, work_of
from mini_sglang.simulate.cost import ReplicaCost

ANSWER_TOKEN = 0  # every token of every answer
_LEAST_SHARE = 0.2  # of its expected time that a step takes

_Launched = tuple[ScheduledBatch, Work, float, float]  # and when it was launched, and when the device is done with it


class Replica:
    """A scheduler, the steps in flight, and until when the device is busy."""

    def __init__(self, cost: ReplicaCost, seed: int = 0) -> None:
        """`seed` is that of what chance adds to steps' times."""
        self._cost = cost
        self._chance = random.Random(seed)
        self._learned = cost.step_cost()  # what the scheduler expects of steps follows those that run
        self.scheduler = Scheduler(cost.config, self._learned)
        self._is_bounded = cost.config.max_step_ms > 0
        self._run_ahead = cost.config.run_ahead
        self._inflight: deque[_Launched] = deque()
        self._device_free_us = self._read_us = 0.0
        self.busy_us = 0.0  # of the device
        self.is_idle = True  # the next turn has to wait for a request
        self.queued_us: list[float] = []  # of each request, how long it waited for its first step
        self._sent_us: dict[str, float] = {}  # of those that still wait

    def send(self, request: Request, now_us: float) -> None:
        """Queue a request, which the next turn sees. Raises FieldError if it can never fit."""
        self.scheduler.add(request)
        self._sent_us[request.request_id] = now_us

    def turn(self, now_us: float) -> tuple[float, StepOutputs | None]:
        """One round of the loop, from `now_us` on. Returns when it ends, and the tokens that have come by then."""
        batch = self.scheduler.schedule()
        if batch is not None:
            now_us = self._launch(batch, now_us)
        outputs = None
        if self._inflight and (batch is None or len(self._inflight) > self._run_ahead):
            now_us, outputs = self._read(now_us)
        elif batch is None and self.scheduler.has_work:
            raise RuntimeError(f"nothing can be scheduled, and work is left: {self.scheduler.stats()}")
        self.is_idle = not (self._inflight or self.scheduler.has_work)
        return now_us, outputs

    def _launch(self, batch: ScheduledBatch, now_us: float) -> float:
        work = work_of(batch.rows)
        launched_us = now_us + self._cost.host_step_us(work)
        took_us = self._cost.device_step_us(work)
        if self._cost.spread:
            took_us *= max(1 + self._chance.gauss(0, self._cost.spread), _LEAST_SHARE)
        self._device_free_us = max(launched_us, self._device_free_us) + took_us
        self.busy_us += took_us
        self._inflight.append((batch, work, launched_us, self._device_free_us))
        if batch.new_requests:
            for request_id in self.scheduler.latest_step.admitted:
                if (sent_us := self._sent_us.pop(request_id, None)) is not None:
                    self.queued_us.append(now_us - sent_us)
        return launched_us

    def _read(self, now_us: float) -> tuple[float, StepOutputs]:
        batch, work, launched_us, ended_us = self._inflight.popleft()
        now_us = max(now_us, ended_us)
        if self._is_bounded:
            self._learned.learn(work, now_us - max(launched_us, self._read_us))
        self._read_us = now_us
        num_samples = sum(row.samples for row in batch.rows)
        return now_us, self.scheduler.update(batch, StepResult([ANSWER_TOKEN] * num_samples, [None] * num_samples))
