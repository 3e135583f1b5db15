"""Builds what executes a batch and launches steps on it. Knows the hardware; knows no request and no policy."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.select import GRAPH_BACKENDS, make_backends, resolve_backend
from mini_sglang.config import EngineConfig
from mini_sglang.execution.model_runner import ModelRunner, Sampled
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.kernels.base import FP8, Kernels, TorchKernels
from mini_sglang.layers.placement import Placement
from mini_sglang.models.config import ModelConfig
from mini_sglang.models.registry import build_model
from mini_sglang.request import SamplingParams
from mini_sglang.scheduling.batch import NO_DECODES, NewPages, NewRow, Row, ScheduledBatch, StepResult
from mini_sglang.weights.hub import ModelSource, resolve_model
from mini_sglang.weights.load import has_packed_blocks, load_dummy_weights, load_weights
from mini_sglang.weights.model_config import load_model_config

if TYPE_CHECKING:  # it needs Triton
    from mini_sglang.execution.device_sampler import DeviceSampler

logger = logging.getLogger(__name__)


class _Landing(NamedTuple):
    """Where a step's tokens arrive on the host, and the event that says so. Used again when they have been read."""

    token_ids: torch.Tensor  # [most rows] int64, pinned
    arrived: torch.cuda.Event


class StepHandle:
    """A launched step."""

    def __init__(self, sampled: Sampled, landings: list[_Landing], max_rows: int) -> None:
        self._logprobs = sampled.logprobs
        self._token_ids = sampled.token_ids
        self._landings = landings  # those that are free
        self._landing: _Landing | None = None
        self._result: StepResult | None = None
        if sampled.token_ids.is_cuda:
            self._landing = landings.pop() if landings else _new_landing(max_rows)
            self._token_ids = self._landing.token_ids[: len(sampled.token_ids)]
            self._token_ids.copy_(sampled.token_ids, non_blocking=True)
            self._landing.arrived.record()

    def result(self) -> StepResult:
        """What the step sampled; the first call waits for it."""
        if self._result is None:
            if self._landing is not None:
                self._landing.arrived.synchronize()
            self._result = StepResult(self._token_ids.tolist(), self._logprobs)
            if self._landing is not None:  # read, so the next step may have it
                self._landings.append(self._landing)
        return self._result


def _new_landing(max_rows: int) -> _Landing:
    return _Landing(torch.empty(max_rows, dtype=torch.int64, pin_memory=True), torch.cuda.Event())


def device_is_lost(error: Exception) -> bool:
    """Whether CUDA itself failed in a step: after an illegal address or a failed assert no later call can succeed.

    Running out of memory is not such an error. Triton and some calls of PyTorch raise plain RuntimeErrors.
    """
    if not isinstance(error, RuntimeError) or "out of memory" in str(error):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error) or "Error [CUDA]" in str(error)


class Executor:
    """Loads the model named by `config`; afterwards `config` has every `auto` resolved.

    Raises ValueError, naming the field, where the configuration does not fit the model or the machine.
    """

    def __init__(self, config: EngineConfig) -> None:
        dummy = config.load_format == "dummy"
        source = resolve_model(
            config.model, source=config.model_source, revision=config.revision, weights_needed=not dummy
        )
        model_config = load_model_config(source)
        self.config = resolve(config, model_config, source)
        self.model_config = replace(model_config, context_length=_resolved(self.config.context_length))
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        self._max_rows = _resolved(self.config.max_running_requests)
        self._landings: list[_Landing] = []
        self._device, self._dtype = torch.device(self.config.device), _DTYPES[self.config.dtype]
        if self._device.type == "cuda":  # the library whose choice for a long K and few rows is better by up to a fifth
            torch.backends.cuda.preferred_blas_library("cublaslt")
        kernels = _kernels(self.config, self._dtype)
        placement = Placement(self._device, self._dtype, kernels, packed=self.config.weights == "packed")
        with _out_of_memory("the weights do not fit: use a smaller model or dtype"):
            self._model = build_model(self.model_config, placement)
            if dummy:
                load_dummy_weights(self._model.weight_slots(), seed=config.seed, device=self._device)
            else:
                load_weights(source, self.model_config, self._model.weight_slots(), show_progress=True)
        with _out_of_memory(
            "the KV cache or a step does not fit: "
            "lower mem_fraction, num_pages, max_prefill_tokens or cuda_graph_max_bs"
        ):
            if self.config.num_pages is None:
                self.config = self.config.replace(num_pages=self._measure_pages())
            self._runner = self._make_runner(_resolved(self.config.num_pages))
            self._warm_up()

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Start a step. On a CPU it has finished when this returns, on a GPU it has been queued."""
        return StepHandle(self._runner.run(batch), self._landings, self._max_rows)

    def close(self) -> None:
        """Drop the model and the pool."""
        del self._runner, self._model

    def _make_runner(self, num_pages: int) -> ModelRunner:
        """A runner over a pool of `num_pages` pages, and one more for the idle slot of graphs."""
        pool = KVPool(
            num_layers=self.model_config.num_layers,
            num_pages=num_pages + 1,
            page_size=self.config.page_size,
            num_kv_heads=self.model_config.num_kv_heads,
            head_dim=self.model_config.head_dim,
            dtype=_kv_dtype(self.config, self.config.dtype),
            device=self._device,
        )
        backends = make_backends(
            self.config.attention_backend,
            pool,
            num_heads=self.model_config.num_heads,
            dtype=self._dtype,
            max_rows=self._max_rows,
            deterministic=self.config.deterministic,
            window=self.model_config.sliding_window,
        )
        table = RequestTable(
            self._max_rows,
            self.model_config.context_length,
            self.config.page_size,
            self._device,
            idle_page=num_pages,
        )
        return ModelRunner(self._model, pool, backends, table, self._make_sampler(table))

    def _make_sampler(self, table: RequestTable) -> DeviceSampler | None:
        """Imported here, since a CPU has no use for Triton."""
        if self._device.type != "cuda":
            return None
        from mini_sglang.execution.device_sampler import DeviceSampler

        return DeviceSampler(table, self.model_config.vocab_size)

    def _measure_pages(self) -> int:
        """Pages that fit into `mem_fraction` of a GPU beside the weights and what the largest step was seen to take."""
        budget = _resolved(self.config.max_prefill_tokens)
        tokens = min(budget, self.model_config.context_length)
        page_bytes = _page_bytes(self.config, self.model_config, self.config.dtype)
        weight_bytes = torch.cuda.memory_allocated(self._device)
        runner = self._make_runner(self._pages(tokens))
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        state_bytes = before - weight_bytes - (self._pages(tokens) + 1) * page_bytes  # tables, counts, workspaces
        runner.run(self._prompt_step(tokens))
        rows_per_step = -(-budget // tokens)  # the budget may hold several whole contexts
        step_bytes = (torch.cuda.max_memory_allocated(self._device) - before) * rows_per_step
        step_bytes *= 2 if self._prompt_graph_tokens() else 1  # a full step's graph has memory of its own
        step_bytes += 3 * 4 * self._max_rows * self.model_config.vocab_size  # sampling in float32
        graph_rows = _resolved(self.config.cuda_graph_max_bs)
        step_bytes += graph_rows * self.model_config.vocab_size * self._dtype.itemsize  # the logits of graphs
        del runner
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        used_bytes = total - free + state_bytes
        kv_bytes = int(total * self.config.mem_fraction) - used_bytes - step_bytes - _GRAPH_BYTES
        pages = kv_bytes // page_bytes
        if pages < 2:
            used, step = used_bytes >> 20, step_bytes >> 20
            raise ValueError(
                f"mem_fraction {self.config.mem_fraction} leaves {kv_bytes >> 20} MiB for the KV cache beside {used} "
                f"MiB of weights and tables and {step} MiB of a step; raise it or lower max_prefill_tokens"
            )
        return min(pages, self._max_rows * self._pages(self.model_config.context_length))

    def _warm_up(self) -> None:
        """Run what is compiled on first use, in a page that nobody holds yet, and capture graphs."""
        self._runner.run(self._prompt_step(1))
        if self._device.type == "cuda":
            self._runner.run(self._prompt_step(min(self.config.page_size, self.model_config.context_length, 16)))
            max_rows = _resolved(self.config.cuda_graph_max_bs)
            if max_rows > 0:
                self._runner.capture_graphs(max_rows, self._prompt_graph_tokens())

    def _prompt_graph_tokens(self) -> int:
        """The most tokens of a prompt step that runs as a CUDA graph; 0 where none does."""
        by_triton = self.config.attention_backend.split(",")[0] == "triton"
        return _resolved(self.config.max_prefill_tokens) if by_triton and self.config.cuda_graph_max_bs else 0

    def _prompt_step(self, tokens: int) -> ScheduledBatch:
        """A step that computes a prompt of zeros in slot 0, on the first pages."""
        return ScheduledBatch(
            step=0,
            decodes=NO_DECODES,
            chunks=[Row(slot=0, start=0, count=tokens, samples=True)],
            new_rows=[NewRow(0, [0] * tokens, tokens, SamplingParams(temperature=0), seed=0)],
            new_pages=[NewPages(slot=0, first_index=0, page_ids=list(range(self._pages(tokens))))],
            page_copies=[],
        )

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)


@contextmanager
def _out_of_memory(advice: str) -> Iterator[None]:
    """Turn the device's out-of-memory error at start-up into one that says which setting to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"out of GPU memory: {advice} ({error})") from error


def resolve(config: EngineConfig, model: ModelConfig, source: ModelSource) -> EngineConfig:
    """`config` with every `auto` and None replaced by what this machine and this model give."""
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = device == "cpu"
    dtype = config.dtype if config.dtype != "auto" else _fastest_dtype(on_cpu)
    context_length = config.context_length or model.context_length
    if context_length > model.context_length:
        raise ValueError(f"context_length must be at most the model's {model.context_length}, got {context_length}")
    slots = config.max_running_requests or (64 if on_cpu else 256)
    backend = resolve_backend(config.attention_backend, torch.device(device), _DTYPES[dtype], _kv_dtype(config, dtype))
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
        num_pages=config.num_pages
        or (_pages_that_fit(config, model, dtype, context_length, slots) if on_cpu else None),
        run_ahead=config.run_ahead if config.run_ahead is not None else 0 if on_cpu else 1,
        attention_backend=backend,
        cuda_graph_max_bs=_graph_rows(config, backend, slots, on_cpu),
        num_threads=config.num_threads or (len(os.sched_getaffinity(0)) if on_cpu else None),
    )


def _kernels(config: EngineConfig, dtype: torch.dtype) -> Kernels:
    """The other kernels of a device, which go with its attention backend; imported where they are of use."""
    if config.attention_backend == "reference":
        return TorchKernels()
    if config.attention_backend == "cpu":
        from mini_sglang.kernels.cpu_kernels import CpuKernels

        return CpuKernels(dtype)
    from mini_sglang.kernels.triton_kernels import TritonKernels

    return TritonKernels(deterministic=config.deterministic)


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
    if config.weights == "packed" and not possible:
        raise ValueError(
            "weights=packed needs a 4-bit GGUF file (Q4_0 or Q4_1), a CPU and dtype bfloat16; got "
            f"{source.path} on {'cpu' if on_cpu else 'gpu'} with dtype {dtype}"
        )
    if config.weights == "auto":
        return "packed" if possible and config.dtype == "auto" else "dense"
    return config.weights


def _pages_that_fit(config: EngineConfig, model: ModelConfig, dtype: str, context_length: int, slots: int) -> int:
    """Pages within the byte budget, but never more than all slots at full length could use."""
    page_bytes = _page_bytes(config, model, dtype)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.kv_cache_bytes > memory:
        raise ValueError(f"kv_cache_bytes must be at most this machine's memory, {memory}, got {config.kv_cache_bytes}")
    pages = config.kv_cache_bytes // page_bytes
    if pages < 2:
        raise ValueError(
            f"kv_cache_bytes must hold at least two pages of {page_bytes} bytes, got {config.kv_cache_bytes}; "
            "raise it or lower page_size"
        )
    return min(pages, slots * -(-context_length // config.page_size))


def _page_bytes(config: EngineConfig, model: ModelConfig, dtype: str) -> int:
    kv_dtype = _kv_dtype(config, dtype)
    return KVPool.bytes_per_page(model.num_layers, config.page_size, model.num_kv_heads, model.head_dim, kv_dtype)


def _kv_dtype(config: EngineConfig, dtype: str) -> torch.dtype:
    return FP8 if config.kv_cache_dtype == "fp8" else _DTYPES[dtype]


def _resolved(value: int | None) -> int:
    if value is None:
        raise ValueError("the configuration was not resolved")
    return value


_GRAPH_BYTES = 1 << 30  # left to CUDA graphs and the allocator's own rounding
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
