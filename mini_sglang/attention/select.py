"""Turns the setting `attention_backend` into backends over a pool, and says what each needs of machine and dtypes.

It imports a backend only when that is chosen: Numba is of no use to a GPU, nor Triton to a CPU, and FlashInfer and
FlashAttention are optional. Knows no model and no request.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from mini_sglang.attention.alternating import alternating
from mini_sglang.attention.base import AttentionBackend, DecodeGraphBackend, PrefillGraphBackend
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.kernels.interface import FP8

_OWN_BACKENDS = ("reference", "cpu", "triton")  # which know sliding windows and attention sinks
GRAPH_BACKENDS = ("triton", "flash_attn")  # CUDA graphs can capture decode steps: they read lengths on the device


@dataclass(frozen=True)
class Backends:
    """Over one pool: `decode` attends in steps of one token per row, `prefill` in steps that hold a chunk."""

    prefill: AttentionBackend
    decode: AttentionBackend


@dataclass(frozen=True)
class GraphBackends:
    """Backends that plan from device tensors alone, so that CUDA graphs can capture whole steps."""

    decode: DecodeGraphBackend
    prefill: PrefillGraphBackend | None  # None: only steps of one token per row can be captured


def graph_backends(backends: Backends) -> GraphBackends:
    """`backends` as graphs use them. Raises ValueError if not even decode steps can be captured."""
    decode, prefill = backends.decode, backends.prefill
    if not isinstance(decode, DecodeGraphBackend):
        raise ValueError(f"{type(decode).__name__} plans on the host, outside of any CUDA graph")
    return GraphBackends(decode, prefill if isinstance(prefill, PrefillGraphBackend) else None)


def make_backends(
    names: str,
    pool: KVPool,
    *,
    num_heads: int,
    dtype: torch.dtype,
    max_rows: int,
    deterministic: bool = False,
    window: int | None = None,
    full_layers: frozenset[int] = frozenset(),
    sinks: bool = False,
) -> Backends:
    """The backends over `pool` that a resolved `attention_backend`, NAME or PREFILL,DECODE, stands for.

    `dtype` is that of queries, `max_rows` the most rows of a step; with `window` a token sees the last `window`
    positions only, its own included, but for the layers in `full_layers`. Raises ValueError if a backend cannot read
    the pool, apply the window or, where the model has them, `sinks`.
    """

    def make(name: str) -> AttentionBackend:
        if sinks and name not in _OWN_BACKENDS:
            raise ValueError(
                f"attention_backend={name} does not support the model's attention sinks; "
                f"choose {' or '.join(_OWN_BACKENDS)}"
            )
        backend = _make(name, pool, num_heads, dtype, max_rows, deterministic, window)
        if window is None or not full_layers:
            return backend
        full = _make(name, pool, num_heads, dtype, max_rows, deterministic, None)
        return alternating(backend, full, full_layers)

    made = {name: make(name) for name in names.split(",")}
    prefill, decode = names.split(",")[0], names.split(",")[-1]
    return Backends(made[prefill], made[decode])


def _make(
    name: str,
    pool: KVPool,
    num_heads: int,
    dtype: torch.dtype,
    max_rows: int,
    deterministic: bool,
    window: int | None,
) -> AttentionBackend:
    if window is not None and name not in _OWN_BACKENDS:
        raise ValueError(
            f"attention_backend={name} does not support the model's sliding window of {window} tokens; "
            f"choose {' or '.join(_OWN_BACKENDS)}"
        )
    if name == "cpu":
        from mini_sglang.kernels.cpu.kernels import CpuKernels

        return ReferenceBackend(pool, dtype, window, CpuKernels(dtype))
    if name == "triton":
        from mini_sglang.attention.triton_backend import TritonBackend

        return TritonBackend(
            pool, num_heads=num_heads, dtype=dtype, max_rows=max_rows, deterministic=deterministic, window=window
        )
    if name == "flashinfer":
        from mini_sglang.attention.flashinfer_backend import FlashInferBackend

        return FlashInferBackend(pool, num_heads=num_heads, dtype=dtype)
    if name == "flash_attn":
        from mini_sglang.attention.flash_attn_backend import FlashAttnBackend

        return FlashAttnBackend(pool)
    return ReferenceBackend(pool, dtype, window)


def resolve_backend(names: str, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """`names` with `auto` replaced. Raises ValueError, naming the setting, if this machine or a dtype does not fit."""
    if names == "auto":
        if device.type != "cpu":
            names = "triton"
        else:
            names = "cpu" if dtype in (torch.float32, torch.bfloat16) and kv_dtype == dtype else "reference"
    for name in names.split(","):
        if name == "cpu":
            _check_cpu(device, dtype, kv_dtype)
        elif name != "reference":
            _check_gpu(name, device, dtype, kv_dtype)
    return names


def _check_cpu(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"attention_backend=cpu needs a CPU and float32 or bfloat16, got {device} and {dtype}")
    if kv_dtype == FP8:
        raise ValueError(
            "attention_backend=cpu does not support kv_cache_dtype=fp8; leave it at auto, or choose reference"
        )


def _check_gpu(name: str, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    if device.type == "cpu":
        raise ValueError(f"attention_backend={name} needs a GPU, got a CPU; leave it at auto")
    packages, install = _PACKAGES.get(name, ((), ""))
    if packages and not any(map(importlib.util.find_spec, packages)):
        raise ValueError(
            f"attention_backend={name} needs the package {packages[-1]}, which is not installed: {install}"
        )
    if packages and dtype == torch.float32:
        raise ValueError(f"attention_backend={name} needs dtype bfloat16 or float16, got float32")
    if kv_dtype == FP8 and name == "flash_attn":
        raise ValueError(
            "attention_backend=flash_attn does not support kv_cache_dtype=fp8; choose triton or flashinfer"
        )
    if kv_dtype == FP8 and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"kv_cache_dtype=fp8 needs a GPU of compute capability 8.9 or more, got {device}")


_PACKAGES = {  # a backend needs any one of these packages; how to install the last
    "flashinfer": (("flashinfer",), "pip install flashinfer-python"),
    "flash_attn": (("flash_attn_interface", "flash_attn"), "pip install flash-attn --no-build-isolation"),
}
