"""Launches steps on the device, and reads what they sampled. Knows the hardware; knows no request and no policy."""

from __future__ import annotations

import atexit
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mini_sglang.config import EngineConfig, ResolvedConfig
from mini_sglang.execution.load_drafter import find_drafter
from mini_sglang.execution.resolve import resolve
from mini_sglang.execution.sampler import Sampled
from mini_sglang.execution.worker import Worker, most_samples
from mini_sglang.parallel.tensor_parallel import SINGLE, RankError
from mini_sglang.scheduling.batch import ScheduledBatch, StepResult
from mini_sglang.weights.hub import ModelSource, find_model
from mini_sglang.weights.model_config import load_model_config

if TYPE_CHECKING:  # it needs ZeroMQ
    from mini_sglang.execution.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True)
class _HostBuffer:
    """Pinned memory that a step's tokens are copied to, and the event behind the copy. Reused once it was read."""

    token_ids: torch.Tensor  # [most samples of a step] int64, pinned; unused if the step writes to the host by itself
    arrived: torch.cuda.Event
    started: torch.cuda.Event | None  # recorded before the step, where steps are timed


class StepHandle:
    """A launched step, whose result is read later."""

    def __init__(
        self,
        sampled: Sampled,
        host_buffer: _HostBuffer | None,
        free_buffers: list[_HostBuffer],
        workers: WorkerGroup | None = None,
    ) -> None:
        self.device_us: int | None = None  # known with the result, where steps are timed
        self._workers = workers
        self._logprobs = sampled.logprobs
        self._prompt_logprobs, self._drafts = sampled.prompt_logprobs, sampled.drafts
        self._token_ids: torch.Tensor | memoryview[int] = sampled.token_ids
        self._free_buffers = free_buffers  # those that are free
        self._buffer = host_buffer
        self._result: StepResult | None = None
        if host_buffer is not None:
            if sampled.on_host is not None:
                self._token_ids = sampled.on_host
            else:
                self._token_ids = host_buffer.token_ids[: len(sampled.token_ids)]
                self._token_ids.copy_(sampled.token_ids, non_blocking=True)
            host_buffer.arrived.record()

    def result(self) -> StepResult:
        """Return what the step sampled. The first call waits for it."""
        if self._result is None:
            if self._buffer is not None:
                self._wait_for(self._buffer.arrived)
            self._result = StepResult(self._token_ids.tolist(), self._logprobs, self._prompt_logprobs, self._drafts)
            if self._buffer is not None:  # it was read, so the next step may use it
                self.device_us = _elapsed_us(self._buffer)
                self._free_buffers.append(self._buffer)
        return self._result

    def _wait_for(self, arrived: torch.cuda.Event) -> None:
        if self._workers is None:
            arrived.synchronize()
            return
        with self._workers.step():
            while not arrived.query():  # it might never come if the device waits for a lost rank
                self._workers.check()


def _elapsed_us(host_buffer: _HostBuffer) -> int | None:
    """The time between the two events, both of which have happened."""
    started = host_buffer.started
    return None if started is None else round(started.elapsed_time(host_buffer.arrived) * 1000)


def is_lost(error: Exception) -> bool:
    """Whether `error` leaves CUDA or the other ranks unusable: after an illegal address no later call can succeed.

    Running out of memory does not. Triton and some calls of PyTorch raise plain RuntimeErrors.
    """
    if isinstance(error, RankError):
        return True
    if not isinstance(error, RuntimeError) or "out of memory" in str(error):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error) or "Error [CUDA]" in str(error)


class Executor:
    """Loads the model named by `config` and launches steps. Its own `config` is resolved; `source` is the model's path.

    With `tp` it is rank 0: it starts the other ranks and broadcasts every batch to them.

    Raises ValueError, naming the field, where the configuration does not fit the model or the machine, and RankError
    where another rank fails.
    """

    def __init__(self, config: EngineConfig, source: ModelSource | None = None) -> None:
        if config.node_rank > 0:
            raise ValueError(f"node_rank must be 0 where the engine runs, got {config.node_rank}; see serve_node")
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda needs an NVIDIA GPU, and PyTorch found none; leave it at auto")
        source = source or find_model(config)
        model_config = load_model_config(source)
        draft = find_drafter(config, model_config)
        resolved = resolve(config, model_config, source, draft)
        fit_pages = config.num_pages is None and resolved.device == "cuda"
        self._free_buffers: list[_HostBuffer] = []  # those that no launched step uses
        self._closed = False
        self._workers = _start_workers(resolved, fit_pages) if resolved.tp > 1 else None
        try:
            with self._together():
                parallel = SINGLE if self._workers is None else self._workers.connect()
                worker = Worker(resolved, model_config, source, draft, parallel, self.check, fit_pages=fit_pages)
        except BaseException:
            if self._workers is not None:
                self._workers.close()
            raise
        if self._workers is not None:
            self._process = os.getpid()
            atexit.register(self._close_if_nobody_did)
        self.source = replace(source)  # without a header, whose texts would stay in memory
        self.config: ResolvedConfig = resolved.replace(num_pages=worker.num_pages)
        self.model_config = worker.model_config
        self.step_cost = worker.step_cost
        self._runner = worker.runner

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Start a step. On a CPU it has finished when this returns, on a GPU it has been queued."""
        host_buffer = None if self.config.device == "cpu" else self._take_host_buffer()
        if self._workers is None:
            return StepHandle(self._runner.run(batch), host_buffer, self._free_buffers)
        with self._workers.step():
            self._workers.broadcast(batch)
            return StepHandle(self._runner.run(batch), host_buffer, self._free_buffers, self._workers)

    def _take_host_buffer(self) -> _HostBuffer:
        """Return a buffer for the step that is launched next, a used one if there is any."""
        if self._free_buffers:
            host_buffer = self._free_buffers.pop()
        else:
            timed = self.config.step_log is not None
            most = most_samples(self.config, self.config.max_running_requests)
            token_ids = torch.empty(most, dtype=torch.int64, pin_memory=True)
            started = torch.cuda.Event(enable_timing=True) if timed else None
            host_buffer = _HostBuffer(token_ids, torch.cuda.Event(enable_timing=timed), started)
        if host_buffer.started is not None:
            host_buffer.started.record()
        return host_buffer

    def check(self) -> None:
        """Raise RankError if another rank has failed."""
        if self._workers is not None:
            self._workers.check()

    def close(self) -> None:
        """Drop the model and the pool, and end the other ranks. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_if_nobody_did)
        del self._runner
        if self._workers is not None:
            self._workers.close()

    def _close_if_nobody_did(self) -> None:
        """Close at the end of the process, while all ranks are there. The end of a forked process changes nothing."""
        lost = self._workers is not None and self._workers.is_beyond_closing
        if os.getpid() == self._process and not lost:
            self.close()

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self._workers is None else self._workers.guard()


def _start_workers(config: ResolvedConfig, fit_pages: bool) -> WorkerGroup:
    """Imported here, since one rank has no use for ZeroMQ."""
    from mini_sglang.execution.worker_group import WorkerGroup

    return WorkerGroup(config, fit_pages=fit_pages)
