"""What can be seen of an engine at work: the step log, and traces.

An engine that has an observer tells it what happens; the observer decides nothing and changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Literal

from mini_sglang.observability.profiler import Tracer
from mini_sglang.observability.step_log import Arrived, Chunk, Ended, Header, Step, StepLog
from mini_sglang.outputs import FinishReason, StepOutputs, TokenOutput
from mini_sglang.scheduling.batch import ScheduledBatch
from mini_sglang.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

PhaseName = Literal["schedule", "launch", "wait", "update"]

_FLUSH_US = 1_000_000  # how long a line may wait in the buffer while steps follow each other
_NO_PHASE = nullcontext()


class EngineObserver:
    """Watches one engine. `log` may be left out; traces go to `profile_dir`, without which none can be made."""

    def __init__(self, log: StepLog | None = None, profile_dir: str | None = None) -> None:
        self._log = log
        self._profile_dir = profile_dir
        self._began_ns = time.perf_counter_ns()
        self._live: set[str] = set()  # requests that have not ended
        self._next = Step(step=0, at_us=0, host_us={})  # the step that is being scheduled
        self._unread: dict[int, Step] = {}  # launched ones, by number
        self._decode_ids: tuple[str, ...] | None = ()  # of the last line
        self._flushed_us = 0
        self._phase = _Phase(self)
        self.tracer: Tracer | None = None
        self._steps_to_trace: int | None = None
        self._trace: str | OSError | None = None  # the last one's path, or why it could not be written

    def now_us(self) -> int:
        """Microseconds since the engine was ready."""
        return (time.perf_counter_ns() - self._began_ns) // 1000

    # -- what the engine reports --------------------------------------------------------------------------------------

    def started(self, config: dict[str, object]) -> None:
        """The engine is ready, with this configuration."""
        self._began_ns = time.perf_counter_ns()
        if self._log is not None:
            self._log.write(Header(began=time.time(), config=config))
            self._log.flush()

    def arrived(self, request_id: str, prompt_tokens: int) -> None:
        """A request was queued."""
        self._live.add(request_id)
        if self._log is not None:
            self._log.write(Arrived(at_us=self.now_us(), request_id=request_id, prompt_tokens=prompt_tokens))

    def ended(self, request_id: str, reason: FinishReason) -> None:
        """A request ended; one that has ended before is ignored."""
        if request_id not in self._live:
            return
        self._live.remove(request_id)
        if self._log is not None:
            self._log.write(Ended(at_us=self.now_us(), request_id=request_id, reason=reason))
            if not self._live:  # nothing may follow for a long time
                self._log.flush()

    def ended_all(self, reason: FinishReason) -> None:
        """All requests ended, and no launched step will be read."""
        for request_id in list(self._live):
            self.ended(request_id, reason)
        self._unread.clear()

    def phase(self, name: PhaseName, step: int) -> AbstractContextManager[object]:
        """Time a phase of step number `step`: a context manager around it."""
        if self._log is None and self.tracer is None:
            return _NO_PHASE
        times = self._unread.get(step)
        if times is None:
            times = self._next = Step(step=step, at_us=0, host_us={})
        self._phase.name, self._phase.step = name, times
        return self._phase

    def scheduled(self, batch: ScheduledBatch, scheduler: Scheduler) -> None:
        """`batch` is about to be launched, and is the last one that was scheduled."""
        if self._log is not None or self.tracer is not None:
            self._unread[batch.step] = self._next
            self._describe(self._next, scheduler)

    def _describe(self, step: Step, scheduler: Scheduler) -> None:
        launched, stats = scheduler.latest_step, scheduler.stats()
        step.admitted = launched.admitted
        admitted, decode_ids = set(step.admitted), []
        for row, request in zip(launched.batch.rows, launched.requests, strict=True):
            is_decode = row.count == 1 and row.samples and row.start >= len(request.prompt_ids)
            if is_decode and request.request_id not in admitted:
                decode_ids.append(request.request_id)
            else:
                drafted = max(row.samples - 1, 0)
                step.chunks.append(Chunk(request.request_id, row.start, row.count, row.samples > 0, drafted))
        step.decodes, step.tokens = len(decode_ids), launched.batch.num_tokens
        step.decode_ids = tuple(decode_ids)
        step.preempted = launched.preempted
        step.running, step.waiting = stats.num_running, stats.num_waiting
        step.free_pages, step.cached_pages = stats.num_free_pages, stats.num_cached_pages
        step.used_pages = stats.num_used_pages

    def read(
        self,
        batch: ScheduledBatch,
        device_us: int | None = None,
        predicted_us: int | None = None,
        error: str | None = None,
        outputs: StepOutputs | None = None,
    ) -> None:
        """The result of a launched step has been read, and gave `outputs`; or the step has failed with `error`."""
        step = self._unread.pop(batch.step, None)
        if step is None:  # launched before there was a trace
            return
        if batch.drafts and outputs is not None:
            gained = {output.request_id: len(output.token_ids) for output in outputs.others}
            for chunk in step.chunks:
                chunk.accepted = gained.get(chunk.request_id, 1) - 1 if chunk.drafted else 0
        if self._log is not None:
            step.read_us, step.device_us, step.predicted_us, step.error = self.now_us(), device_us, predicted_us, error
            if step.decode_ids == self._decode_ids:
                step.decode_ids = None
            else:
                self._decode_ids = step.decode_ids
            self._log.write(step)
            if error is not None or step.read_us - self._flushed_us > _FLUSH_US:
                self._flushed_us = step.read_us
                self._log.flush()
        if self.tracer is not None and self._steps_to_trace is not None:
            self._steps_to_trace -= 1
            if self._steps_to_trace == 0:
                self._finish_trace()

    def emitted(self, outputs: Iterable[TokenOutput]) -> None:
        """These outputs go to the callers. A step's other outputs are one more token of a request each."""
        for output in outputs:
            if output.finish_reason is not None:
                self.ended(output.request_id, output.finish_reason)

    # -- traces -------------------------------------------------------------------------------------------------------

    def start_trace(self, num_steps: int | None) -> None:
        """Trace until `stop_trace`, or for `num_steps` steps. Raises ValueError if that cannot be, and OSError."""
        if self._profile_dir is None:
            raise ValueError("profile_dir must be set for traces: start the engine with --profile-dir DIR")
        if self.tracer is not None:
            raise ValueError("a trace is already being made: stop it first")
        try:
            self.tracer, self._steps_to_trace = Tracer(self._profile_dir), num_steps
        except RuntimeError as error:  # other code of this process uses PyTorch's profiler
            raise ValueError(f"the profiler cannot start: {error}") from error
        self._phase.tracer = self.tracer

    def stop_trace(self) -> str:
        """The path of the trace that is being made, which ends, or of the last one if its steps are over.

        Raises ValueError if none was started since the last call, OSError if it could not be written.
        """
        if self.tracer is not None:
            self._finish_trace()
        trace, self._trace = self._trace, None
        if trace is None:
            raise ValueError("no trace is being made: start one first")
        if isinstance(trace, OSError):
            raise trace
        return trace

    def _finish_trace(self) -> None:
        tracer, self.tracer = self.tracer, None
        self._phase.tracer = None
        if tracer is not None:
            try:
                tracer.stop()
                self._trace = tracer.path
            except (OSError, RuntimeError) as error:  # `stop_trace` raises it; the engine goes on
                logger.error("the trace cannot be written: %s", error)
                self._trace = OSError(f"the trace cannot be written: {error}")

    def close(self) -> None:
        """End a trace that is being made, write it and the rest of the log."""
        self._finish_trace()
        if self._log is not None:
            self._log.close()


class _Phase:
    """Times a phase of a step, and names it in a trace. One object is used for all phases, which do not nest."""

    __slots__ = ("_observer", "_region", "_start_us", "name", "step", "tracer")

    def __init__(self, observer: EngineObserver) -> None:
        self._observer = observer
        self._region: AbstractContextManager[object] | None = None
        self._start_us = 0
        self.name: PhaseName = "schedule"
        self.step = Step(step=0, at_us=0, host_us={})
        self.tracer: Tracer | None = None

    def __enter__(self) -> None:
        if self.tracer is not None:
            what = f" ({self.step.decodes} decodes, {self.step.tokens} tokens)" if self.name == "launch" else ""
            self._region = self.tracer.region(f"{self.name} {self.step.step}{what}")
            self._region.__enter__()
        self._start_us = self._observer.now_us()
        if self.name == "schedule":
            self.step.at_us = self._start_us

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.step.host_us[self.name] = self._observer.now_us() - self._start_us
        if self._region is not None:
            self._region.__exit__(kind, error, trace)
            self._region = None
