"""Builds what executes a batch and launches steps on it. Knows the hardware; knows no request and no policy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from mini_sglang.attention.base import AttentionBackend
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.config import EngineConfig
from mini_sglang.execution.model_runner import ModelRunner
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.kernels.base import Kernels, TorchKernels
from mini_sglang.layers.placement import Placement
from mini_sglang.models.config import ModelConfig
from mini_sglang.models.registry import build_model
from mini_sglang.request import SamplingParams
from mini_sglang.scheduling.batch import NewPages, NewRow, Row, ScheduledBatch, StepResult
from mini_sglang.weights.hub import ModelSource, resolve_model
from mini_sglang.weights.load import has_packed_blocks, load_dummy_weights, load_weights
from mini_sglang.weights.model_config import load_model_config

logger = logging.getLogger(__name__)


class StepHandle:
    """A launched step. `result` waits for it."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


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
        device, dtype = torch.device(self.config.device), _DTYPES[self.config.dtype]
        kernels, make_backend = _kernels_and_backend(self.config, dtype)
        placement = Placement(device, dtype, kernels, packed=self.config.weights == "packed")
        model = build_model(self.model_config, placement)
        if dummy:
            load_dummy_weights(model.weight_slots(), seed=config.seed)
        else:
            load_weights(source, self.model_config, model.weight_slots(), show_progress=True)
        pool = KVPool(
            num_layers=model_config.num_layers,
            num_pages=_resolved(self.config.num_pages),
            page_size=self.config.page_size,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            dtype=dtype,
            device=device,
        )
        table = RequestTable(
            self.config.max_running_requests, _resolved(self.config.context_length), self.config.page_size, device
        )
        self._runner = ModelRunner(model, pool, make_backend(pool), table)
        self._warm_up()

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Start a step. On a CPU it has finished when this returns."""
        return StepHandle(self._runner.run(batch))

    def _warm_up(self) -> None:
        """Compute one token in a page that nobody holds yet, so that no request waits for kernels to be compiled."""
        row = NewRow(slot=0, token_ids=[0], num_prompt_tokens=1, params=SamplingParams(temperature=0), seed=0)
        self._runner.run(
            ScheduledBatch(
                step=0,
                rows=[Row(slot=0, start=0, count=1, samples=True)],
                new_rows=[row],
                new_pages=[NewPages(slot=0, first_index=0, page_ids=[0])],
                page_copies=[],
            )
        )

    def close(self) -> None:
        """Drop the model and the pool."""
        del self._runner


def resolve(config: EngineConfig, model: ModelConfig, source: ModelSource) -> EngineConfig:
    """`config` with every `auto` and None replaced by what this machine and this model give."""
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = torch.device(device).type == "cpu"
    dtype = config.dtype if config.dtype != "auto" else _fastest_dtype(on_cpu)
    context_length = config.context_length or model.context_length
    if context_length > model.context_length:
        raise ValueError(f"context_length must be at most the model's {model.context_length}, got {context_length}")
    return config.replace(
        device=device,
        dtype=dtype,
        weights=_resolve_weights(config, on_cpu, dtype, source),
        context_length=context_length,
        num_pages=config.num_pages or _pages_that_fit(config, model, dtype, context_length),
        run_ahead=config.run_ahead if config.run_ahead is not None else 0 if on_cpu else 1,
        attention_backend=_resolve_backend(config, on_cpu, dtype),
        num_threads=config.num_threads or (len(os.sched_getaffinity(0)) if on_cpu else None),
    )


def _kernels_and_backend(
    config: EngineConfig, dtype: torch.dtype
) -> tuple[Kernels, Callable[[KVPool], AttentionBackend]]:
    """What `attention_backend` names: the kernels between matrix products, and how attention reads the pool."""
    if config.attention_backend == "reference":
        return TorchKernels(), partial(ReferenceBackend, dtype=dtype)
    # here, since Numba and its compiler are of no use to a GPU
    from mini_sglang.attention.cpu_backend import CpuBackend
    from mini_sglang.kernels.cpu_kernels import CpuKernels

    kernels = CpuKernels(dtype)
    return kernels, partial(CpuBackend, dtype=dtype, kernels=kernels)


def _resolve_backend(config: EngineConfig, on_cpu: bool, dtype: str) -> str:
    fits = on_cpu and dtype in ("float32", "bfloat16")
    if config.attention_backend == "cpu" and not fits:
        raise ValueError(
            f"attention_backend=cpu needs a CPU and dtype float32 or bfloat16, got {config.device} and {dtype}"
        )
    if config.attention_backend == "auto":
        return "cpu" if fits else "reference"
    return config.attention_backend


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


def _pages_that_fit(config: EngineConfig, model: ModelConfig, dtype: str, context_length: int) -> int:
    """Pages within the byte budget, but never more than all slots at full length could use."""
    page_bytes = KVPool.bytes_per_page(
        model.num_layers, config.page_size, model.num_kv_heads, model.head_dim, _DTYPES[dtype]
    )
    pages = config.kv_cache_bytes // page_bytes
    if pages < 2:
        raise ValueError(
            f"kv_cache_bytes must hold at least two pages of {page_bytes} bytes, got {config.kv_cache_bytes}; "
            "raise it or lower page_size"
        )
    return min(pages, config.max_running_requests * -(-context_length // config.page_size))


def _resolved(value: int | None) -> int:
    if value is None:
        raise ValueError("the configuration was not resolved")
    return value


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
