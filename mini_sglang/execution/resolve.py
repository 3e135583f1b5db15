"""Settles every setting that was left open, by the machine and the model; refuses those that fit neither."""

from __future__ import annotations

import dataclasses
import logging
import os

import torch

from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.select import GRAPH_BACKENDS, resolve_backend
from mini_sglang.config import EngineConfig, ResolvedConfig
from mini_sglang.execution.load_drafter import DraftSource
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.kernels.interface import FP8
from mini_sglang.memory import available_memory, total_memory
from mini_sglang.model_config import ModelConfig
from mini_sglang.parallel.sharding import shard_heads
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.load import has_quantized_weights

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve(
    config: EngineConfig, model: ModelConfig, source: ModelSource, draft: DraftSource | None = None
) -> ResolvedConfig:
    """`config` with every `auto` and None replaced by what this machine and this model give.

    What fits into a GPU's memory is only known when the model is there: `num_pages`, if it was left open, is then the
    most that can be of use. Raises ValueError, naming the field, where a setting does not fit machine or model.
    """
    device = device_of(config)
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
    most_pages = slots * -(-context_length // config.page_size)
    if draft is not None:
        draft.check_context(context_length)
    threads = max(1, len(os.sched_getaffinity(0)) // ranks_here) if on_cpu else torch.get_num_threads()
    known = {
        "device": device,
        "dtype": dtype,
        "weights": _resolve_weights(config, on_cpu, dtype, backend, source),
        "context_length": context_length,
        "max_running_requests": slots,
        "max_prefill_tokens": config.max_prefill_tokens or (512 if on_cpu else 8192),
        "max_step_ms": config.max_step_ms or 0,
        "num_pages": _cpu_pages(config, page_bytes(config, model, dtype, draft), context_length, slots)
        if on_cpu
        else config.num_pages or most_pages,
        "run_ahead": config.run_ahead if config.run_ahead is not None else 0 if on_cpu else 1,
        "attention_backend": backend,
        "cuda_graph_max_bs": _graph_rows(config, backend, slots, on_cpu),
        "num_threads": config.num_threads or threads,
    }
    return ResolvedConfig(**{**dataclasses.asdict(config), **known})


def device_of(config: EngineConfig) -> str:
    """cpu or cuda: the device asked for, or else a GPU where there is one."""
    return config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


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


def _resolve_weights(config: EngineConfig, on_cpu: bool, dtype: str, backend: str, source: ModelSource) -> str:
    is_quantized = config.load_format != "dummy" and has_quantized_weights(source)
    if is_quantized and config.quantization != "none":
        raise ValueError(f"quantization must be none for a checkpoint that is quantised, got {config.quantization}")
    possible = is_quantized or config.quantization != "none"
    possible = possible and (backend == "cpu" if on_cpu else dtype == "bfloat16")
    if config.weights == "packed" and not possible:
        raise ValueError(
            "weights=packed needs a quantised checkpoint, and on a CPU attention_backend=cpu, on a GPU dtype=bfloat16; "
            f"got {source.path} on {'cpu' if on_cpu else 'gpu'} with {backend} and {dtype}"
        )
    if config.weights == "auto":
        return "packed" if possible and (config.dtype == "auto" or not on_cpu) else "dense"
    return config.weights


def _cpu_slots(config: EngineConfig, context_length: int) -> int:
    """The slots asked for, or 64, whose tables must fit into this machine's memory."""
    slots = config.max_running_requests or 64
    most = total_memory() // RequestTable.bytes_per_slot(context_length, config.page_size)
    if slots > most:
        raise ValueError(
            f"max_running_requests must be at most {most}, whose tables of context_length {context_length} fill this "
            f"machine's memory, got {slots}; lower it or context_length"
        )
    return slots


def _cpu_pages(config: EngineConfig, bytes_per_page: int, context_length: int, slots: int) -> int:
    """The pages asked for, or those within the byte budget, but then no more than can be of use to `slots` requests."""
    memory = total_memory()
    if config.num_pages is not None:
        if config.num_pages > memory // bytes_per_page:
            raise ValueError(
                f"num_pages must be at most {memory // bytes_per_page}, which fill this machine's memory, "
                f"got {config.num_pages}"
            )
        return config.num_pages
    pages_of_one = -(-context_length // config.page_size)
    kv_cache_bytes = config.kv_cache_bytes
    if kv_cache_bytes is None:
        available = available_memory() // (config.tp // config.nnodes)
        one_request = min((pages_of_one + 1) * bytes_per_page, available // 4)
        kv_cache_bytes = max(available // 32, one_request, 2 * bytes_per_page)
    elif kv_cache_bytes > memory:
        raise ValueError(f"kv_cache_bytes must be at most this machine's memory, {memory}, got {kv_cache_bytes}")
    pages = kv_cache_bytes // bytes_per_page
    if pages < 2:
        raise ValueError(
            f"kv_cache_bytes must hold at least two pages of {bytes_per_page} bytes, got {kv_cache_bytes}; "
            "raise it or lower page_size"
        )
    return min(pages, slots * pages_of_one)


def page_bytes(config: EngineConfig, model: ModelConfig, dtype: str, draft: DraftSource | None = None) -> int:
    """Of one page in the pools of each rank, with that of the model that drafts, if there is one."""
    if draft is not None:
        alone = config.replace(tp=1) if draft.is_head else config
        return page_bytes(config, model, dtype) + page_bytes(alone, draft.layers, dtype)
    kv_heads = shard_heads(model.num_heads, model.num_kv_heads, 0, config.tp).kv.size
    return KVPool.bytes_per_page(model.num_layers, config.page_size, kv_heads, model.head_dim, kv_dtype(config, dtype))


def kv_dtype(config: EngineConfig, dtype: str) -> torch.dtype:
    return FP8 if config.kv_cache_dtype == "fp8" else DTYPES[dtype]
