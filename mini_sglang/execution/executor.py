"""Builds what executes a batch and launches steps on it. Knows the hardware; knows no request and no policy."""

from __future__ import annotations

import atexit
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from mini_sglang.attention.select import GRAPH_BACKENDS, resolve_backend
from mini_sglang.config import EngineConfig
from mini_sglang.execution.model_runner import Sampled
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.worker import DTYPES, Rank, find_model, kv_dtype, page_bytes, resolved
from mini_sglang.kernels.cpu.linear import CpuMatrix
from mini_sglang.model_config import ModelConfig
from mini_sglang.parallel.tensor_parallel import SINGLE, RankError
from mini_sglang.scheduling.batch import ScheduledBatch, StepResult
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.load import has_packed_blocks

if TYPE_CHECKING:  # it needs ZeroMQ
    from mini_sglang.execution.worker_group import Ranks

logger = logging.getLogger(__name__)


class _HostBuffer(NamedTuple):
    """Where a step's tokens arrive on the host, and the event that says so. Used again when they have been read."""

    token_ids: torch.Tensor  # [most rows] int64, pinned; unused if the step leaves them elsewhere on the host by itself
    arrived: torch.cuda.Event
    started: torch.cuda.Event | None  # in front of the step, where steps are timed


class StepHandle:
    """A launched step."""

    def __init__(
        self,
        sampled: Sampled,
        host_buffer: _HostBuffer | None,
        host_buffers: list[_HostBuffer],
        ranks: Ranks | None = None,
    ) -> None:
        self.device_us: int | None = None  # known with the result, where steps are timed
        self._ranks = ranks
        self._logprobs = sampled.logprobs
        self._prompt_logprobs = sampled.prompt_logprobs
        self._token_ids: torch.Tensor | memoryview[int] = sampled.token_ids
        self._host_buffers = host_buffers  # those that are free
        self._host_buffer = host_buffer
        self._result: StepResult | None = None
        if host_buffer is not None:
            if sampled.arriving is not None:
                self._token_ids = sampled.arriving
            else:
                self._token_ids = host_buffer.token_ids[: len(sampled.token_ids)]
                self._token_ids.copy_(sampled.token_ids, non_blocking=True)
            host_buffer.arrived.record()

    def result(self) -> StepResult:
        """What the step sampled; the first call waits for it."""
        if self._result is None:
            if self._host_buffer is not None:
                self._wait_for(self._host_buffer.arrived)
            self._result = StepResult(self._token_ids.tolist(), self._logprobs, self._prompt_logprobs)
            if self._host_buffer is not None:  # read, so the next step may have it
                self.device_us = _elapsed_us(self._host_buffer)
                self._host_buffers.append(self._host_buffer)
        return self._result

    def _wait_for(self, arrived: torch.cuda.Event) -> None:
        if self._ranks is None:
            arrived.synchronize()
            return
        with self._ranks.step():
            while not arrived.query():  # for a device that waits for a lost rank it might never come
                self._ranks.check()


def _elapsed_us(host_buffer: _HostBuffer) -> int | None:
    """Between the two events, both of which have happened: nothing is waited for."""
    return None if host_buffer.started is None else round(host_buffer.started.elapsed_time(host_buffer.arrived) * 1000)


def is_lost(error: Exception) -> bool:
    """Whether CUDA itself or another rank failed in a step: after an illegal address, say, no later call can succeed.

    Running out of memory is not such an error. Triton and some calls of PyTorch raise plain RuntimeErrors.
    """
    if isinstance(error, RankError):
        return True
    if not isinstance(error, RuntimeError) or "out of memory" in str(error):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error) or "Error [CUDA]" in str(error)


class Executor:
    """Loads the model named by `config`; afterwards `config` has every `auto` resolved, `source` is where it lies.

    With `tp` it is rank 0, which starts the others and has them compute what it computes.

    Raises ValueError, naming the field, where the configuration does not fit the model or the machine, and RankError
    where another rank fails.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.node_rank > 0:
            raise ValueError(f"node_rank must be 0 where the engine runs, got {config.node_rank}; see serve_node")
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda needs an NVIDIA GPU, and PyTorch found none; leave it at auto")
        self.source, model_config = find_model(config)
        self.config = resolve(config, model_config, self.source)
        self._max_rows = resolved(self.config.max_running_requests)
        self._host_buffers: list[_HostBuffer] = []  # that are free
        self._closed = False
        self._ranks = _start_ranks(self.config) if self.config.tp > 1 else None
        try:
            with self._together():
                parallel = SINGLE if self._ranks is None else self._ranks.connect()
                self._rank = Rank(self.config, model_config, self.source, parallel, self.check)
        except BaseException:
            if self._ranks is not None:
                self._ranks.close()
            raise
        if self._ranks is not None:
            self._process = os.getpid()
            atexit.register(self._close_if_nobody_did)
        self.config = self.config.replace(num_pages=self._rank.num_pages)
        self.model_config = self._rank.model_config

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Start a step. On a CPU it has finished when this returns, on a GPU it has been queued."""
        host_buffer = None if self.config.device == "cpu" else self._take_host_buffer()
        if self._ranks is None:
            return StepHandle(self._rank.run(batch), host_buffer, self._host_buffers)
        with self._ranks.step():
            self._ranks.order(batch)
            return StepHandle(self._rank.run(batch), host_buffer, self._host_buffers, self._ranks)

    def _take_host_buffer(self) -> _HostBuffer:
        """One for the step that is launched next."""
        if self._host_buffers:
            host_buffer = self._host_buffers.pop()
        else:
            timed = self.config.step_log is not None
            token_ids = torch.empty(self._max_rows, dtype=torch.int64, pin_memory=True)
            started = torch.cuda.Event(enable_timing=True) if timed else None
            host_buffer = _HostBuffer(token_ids, torch.cuda.Event(enable_timing=timed), started)
        if host_buffer.started is not None:
            host_buffer.started.record()
        return host_buffer

    def check(self) -> None:
        """Raise RankError if another rank has failed."""
        if self._ranks is not None:
            self._ranks.check()

    def close(self) -> None:
        """Drop the model and the pool, and end the other ranks. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_if_nobody_did)
        self._rank.close()
        if self._ranks is not None:
            self._ranks.close()

    def _close_if_nobody_did(self) -> None:
        """At the process's end: what ranks share is given back while all are there. A fork's end is none of theirs."""
        lost = self._ranks is not None and self._ranks.is_beyond_closing
        if os.getpid() == self._process and not lost:
            self.close()

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ranks is None else self._ranks.guard()


def _start_ranks(config: EngineConfig) -> Ranks:
    """Imported here, since one rank has no use for ZeroMQ."""
    from mini_sglang.execution.worker_group import Ranks

    return Ranks(config)


def resolve(config: EngineConfig, model: ModelConfig, source: ModelSource) -> EngineConfig:
    """`config` with every `auto` and None replaced by what this machine and this model give."""
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = device == "cpu"
    dtype = config.dtype if config.dtype != "auto" else _fastest_dtype(on_cpu)
    context_length = config.context_length or model.context_length
    if context_length > model.context_length:
        raise ValueError(f"context_length must be at most the model's {model.context_length}, got {context_length}")
    slots = _cpu_slots(config, context_length) if on_cpu else config.max_running_requests or 256
    ranks_here = config.tp // config.nnodes
    if on_cpu and config.all_reduce != "auto":
        raise ValueError(f"all_reduce must be auto on a CPU, where gloo sums, got {config.all_reduce}")
    if config.tp > 1 and not on_cpu and ranks_here > torch.cuda.device_count():
        raise ValueError(
            f"tp must be at most the GPUs that this process sees, {torch.cuda.device_count()}, on each node; "
            f"got {config.tp} on {config.nnodes}"
        )
    backend = resolve_backend(config.attention_backend, torch.device(device), DTYPES[dtype], kv_dtype(config, dtype))
    if config.deterministic and set(backend.split(",")) != {"triton"}:
        raise ValueError(
            f"deterministic needs a GPU and attention_backend=triton, got {device} and {backend}; leave it off"
        )
    return config.replace(
        device=device,
        dtype=dtype,
        weights=_resolve_weights(config, on_cpu, dtype, source),
        context_length=context_length,
        max_running_requests=slots,
        max_prefill_tokens=config.max_prefill_tokens or (512 if on_cpu else 8192),
        num_pages=_cpu_pages(config, model, dtype, context_length, slots) if on_cpu else config.num_pages,
        run_ahead=config.run_ahead if config.run_ahead is not None else 0 if on_cpu else 1,
        attention_backend=backend,
        cuda_graph_max_bs=_graph_rows(config, backend, slots, on_cpu),
        num_threads=config.num_threads or (max(1, len(os.sched_getaffinity(0)) // ranks_here) if on_cpu else None),
    )


def _graph_rows(config: EngineConfig, backend: str, slots: int, on_cpu: bool) -> int:
    """The most rows of a CUDA graph: 0 on a CPU, or where decode attention plans on the host, outside of any graph."""
    decode, rows = backend.split(",")[-1], config.cuda_graph_max_bs
    if on_cpu:
        if rows:
            raise ValueError(f"cuda_graph_max_bs must be 0 on a CPU, got {rows}; leave it open")
        return 0
    if decode in GRAPH_BACKENDS:
        return slots if rows is None else min(rows, slots)
    if rows:
        raise ValueError(f"cuda_graph_max_bs must be 0 with {decode} as decode attention backend, got {rows}")
    logger.info("decode steps run without CUDA graphs, since %s plans them on the host", decode)
    return 0


def _fastest_dtype(on_cpu: bool) -> str:
    """bfloat16 on GPUs and on CPUs that multiply it natively, else float32."""
    if not on_cpu or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return "bfloat16"
    return "float32"


def _resolve_weights(config: EngineConfig, on_cpu: bool, dtype: str, source: ModelSource) -> str:
    possible = on_cpu and dtype == "bfloat16" and config.load_format != "dummy" and has_packed_blocks(source)
    possible = possible and CpuMatrix.available(DTYPES[dtype]) and config.tp == 1  # shards would cut blocks apart
    if config.weights == "packed" and not possible:
        raise ValueError(
            "weights=packed needs a 4-bit GGUF file (Q4_0 or Q4_1), a CPU that multiplies bfloat16, dtype bfloat16 and "
            f"tp 1; got {source.path} on {'cpu' if on_cpu else 'gpu'} with dtype {dtype} and tp {config.tp}"
        )
    if config.weights == "auto":
        return "packed" if possible and config.dtype == "auto" else "dense"
    return config.weights


def _cpu_slots(config: EngineConfig, context_length: int) -> int:
    """The slots asked for, or 64, whose tables must fit into this machine's memory."""
    slots = config.max_running_requests or 64
    most = _memory_bytes() // RequestTable.bytes_per_slot(context_length, config.page_size)
    if slots > most:
        raise ValueError(
            f"max_running_requests must be at most {most}, whose tables of context_length {context_length} fill this "
            f"machine's memory, got {slots}; lower it or context_length"
        )
    return slots


def _cpu_pages(config: EngineConfig, model: ModelConfig, dtype: str, context_length: int, slots: int) -> int:
    """The pages asked for, or those within the byte budget, but then never more than all slots could use."""
    bytes_per_page = page_bytes(config, model, dtype)
    memory = _memory_bytes()
    if config.num_pages is not None:
        if config.num_pages > memory // bytes_per_page:
            raise ValueError(
                f"num_pages must be at most {memory // bytes_per_page}, which fill this machine's memory, "
                f"got {config.num_pages}"
            )
        return config.num_pages
    if config.kv_cache_bytes > memory:
        raise ValueError(f"kv_cache_bytes must be at most this machine's memory, {memory}, got {config.kv_cache_bytes}")
    pages = config.kv_cache_bytes // bytes_per_page
    if pages < 2:
        raise ValueError(
            f"kv_cache_bytes must hold at least two pages of {bytes_per_page} bytes, got {config.kv_cache_bytes}; "
            "raise it or lower page_size"
        )
    return min(pages, slots * -(-context_length // config.page_size))


def _memory_bytes() -> int:
    """Of this machine; a container may be allowed less."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
