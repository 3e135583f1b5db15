"""`attention_backend` names the backends that exist; a backend that cannot run here says what it lacks."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.select import make_backends, resolve_backend
from mini_sglang.config import EngineConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("device", "dtype", "kv_dtype", "chosen"),
    [
        (CPU, FP32, FP32, "cpu"),
        (CPU, BF16, BF16, "cpu"),
        (CPU, FP16, FP16, "reference"),
        (CPU, FP32, FP8, "reference"),
        (GPU, BF16, BF16, "triton"),
    ],
)
def test_auto_is_the_fastest_that_reads_the_pool(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, chosen: str
) -> None:
    assert resolve_backend("auto", device, dtype, kv_dtype) == chosen


@pytest.mark.parametrize(
    ("names", "device", "dtype", "kv_dtype", "message"),
    [
        ("triton", CPU, FP32, FP32, "attention_backend=triton needs a GPU"),
        ("triton,flashinfer", CPU, FP32, FP32, "attention_backend=triton needs a GPU"),
        ("cpu", CPU, FP32, FP8, "attention_backend=cpu does not support kv_cache_dtype=fp8"),
        ("cpu", CPU, FP16, FP16, "attention_backend=cpu needs a CPU and float32 or bfloat16"),
        ("cpu", GPU, BF16, BF16, "attention_backend=cpu needs a CPU and float32 or bfloat16"),
    ],
)
def test_what_does_not_fit_the_machine_is_refused(
    names: str, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_backend(names, device, dtype, kv_dtype)


@pytest.mark.parametrize(
    ("names", "module", "package"),
    [
        ("flashinfer", "flashinfer", "flashinfer-python"),
        ("triton,flashinfer", "flashinfer", "flashinfer-python"),
        ("flash_attn", "flash_attn", "flash-attn"),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(names: str, module: str, package: str) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(ValueError, match=rf"attention_backend={module} needs .* {module}, .*pip install {package}"):
        resolve_backend(names, GPU, BF16, BF16)


@pytest.mark.parametrize("names", ["flashy", "triton,", "triton,cpu", "auto,triton", "triton,triton,triton"])
def test_unknown_names_are_refused_with_the_known_ones(names: str) -> None:
    with pytest.raises(ValueError, match="attention_backend must be one of auto, cpu, reference, triton, flashinfer"):
        EngineConfig(attention_backend=names)


@pytest.mark.gpu
def test_flashinfer_names_the_head_dim_that_it_lacks() -> None:
    pytest.importorskip("flashinfer")
    from mini_sglang.attention.flashinfer_backend import FlashInferBackend

    pool = KVPool(num_layers=1, num_pages=1, page_size=16, num_kv_heads=1, head_dim=96, dtype=BF16, device=GPU)
    with pytest.raises(ValueError, match="no kernels for head_dim 96"):
        FlashInferBackend(pool, num_heads=1, dtype=BF16)


@pytest.mark.parametrize("names", ["flashinfer", "triton,flash_attn"])
def test_a_sliding_window_is_refused_where_it_would_be_ignored(names: str) -> None:
    sizes = {"num_layers": 1, "num_pages": 1, "page_size": 1, "num_kv_heads": 1, "head_dim": 16}
    pool = KVPool(**sizes, dtype=BF16, device=CPU)
    with pytest.raises(ValueError, match="does not support the model's sliding window of 24 tokens; choose"):
        make_backends(names, pool, num_heads=1, dtype=BF16, max_rows=1, window=24)


@pytest.mark.parametrize("names", ["flashinfer", "triton,flash_attn"])
def test_attention_sinks_are_refused_where_they_would_be_ignored(names: str) -> None:
    sizes = {"num_layers": 1, "num_pages": 1, "page_size": 1, "num_kv_heads": 1, "head_dim": 16}
    pool = KVPool(**sizes, dtype=BF16, device=CPU)
    with pytest.raises(ValueError, match="does not support the model's attention sinks; choose reference or cpu or"):
        make_backends(names, pool, num_heads=1, dtype=BF16, max_rows=1, sinks=True)
