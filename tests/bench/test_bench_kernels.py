"""The kernels benchmark calls every kernel as the model does, and counts its bytes and FLOPs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from mini_sglang.bench.kernel_time import GROUPS
from mini_sglang.bench.kernels import Case, cases, measure_kernels, ragged_lengths
from mini_sglang.bench.roofline import Ceilings
from mini_sglang.kernels.interface import Residual
from mini_sglang.model_config import ExpertsConfig, ModelConfig
from mini_sglang.weights.hub import resolve_model
from mini_sglang.weights.model_config import load_model_config

TINY = ModelConfig(
    architecture="qwen3",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=256,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
)
MIXTURE = dataclasses.replace(
    TINY,
    architecture="qwen3_moe",
    experts=ExpertsConfig(num_experts=5, experts_per_token=2, intermediate_size=32, normalize_weights=True),
)
ITEM = 2


def tiny_cases(*groups: str, model: ModelConfig = TINY) -> dict[tuple[str, str], Case]:
    made = cases(
        model,
        groups=groups,
        page_size=16,
        device=torch.device("cpu"),
        dtype=torch.float16,
        decode_lengths={"2 rows": [40, 7]},
        prompts=[20],
        rows=[1, 3],
    )
    return {(case.kernel, case.shape): case for case in made}


# cuDNN's attention exists on GPUs alone
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs them on a CPU")
@pytest.mark.parametrize("group", GROUPS)
def test_every_kernel_runs(group: str) -> None:
    for case in tiny_cases(group, model=MIXTURE if group == "experts" else TINY).values():
        if "cuDNN" not in case.kernel:
            for call in case.calls:
                result = call()
                if isinstance(result, Residual) and result.normed is None:
                    result = result.x
                for tensor in result if isinstance(result, tuple) else [result]:
                    assert isinstance(tensor, torch.Tensor)
                    assert tensor.float().isfinite().all(), case


def test_decode_attention_reads_every_key_and_value_once() -> None:
    [case] = tiny_cases("decode").values()
    assert case.bytes == (40 + 7) * 2 * 2 * 16 * ITEM
    assert case.flops == (40 + 7) * 4 * 4 * 16


def test_prefill_attention_and_cudnn_count_the_same_triangle() -> None:
    [cudnn, ours] = tiny_cases("prefill").values()
    assert (cudnn.bytes, cudnn.flops) == (ours.bytes, ours.flops)
    assert ours.flops == 2 * 20 * 20 * 4 * 16


def test_a_product_reads_its_weights_and_writes_its_rows() -> None:
    made = tiny_cases("linear")
    assert made["norm, gate_up, gate", "3 x 64 -> 192"].bytes == (64 * 192 + 3 * 64 + 3 * 96) * ITEM
    assert made["down + residual", "3 x 96 -> 64"].bytes == (96 * 64 + 3 * 96 + 2 * 3 * 64) * ITEM
    assert made["norm, head", "1 x 64 -> 300"].flops == 2 * 64 * 300


def test_experts_read_what_is_chosen() -> None:
    made = tiny_cases("experts", model=MIXTURE)
    assert ("norm, gate_up, gate", "1 x 64 -> 192") not in tiny_cases("linear", model=MIXTURE)
    one, all_of_them = (made["experts + residual", f"{tokens} x 2 of 5, 64 -> 32 -> 64"] for tokens in (1, 20))
    each = 3 * 64 * 32
    assert one.bytes == (2 * each + 3 * 64) * ITEM
    assert all_of_them.bytes == (5 * each + 3 * 20 * 64) * ITEM
    assert all_of_them.flops == 20 * 2 * 2 * each


def test_a_dense_model_has_no_experts_to_measure() -> None:
    assert not tiny_cases("experts")


def test_ragged_rows_are_always_the_same() -> None:
    lengths = ragged_lengths()
    assert lengths == ragged_lengths()
    assert [len(rows) for rows in lengths.values()] == [256, 64, 8, 1]


@pytest.mark.gpu
def test_kernels_are_timed_against_the_ceilings() -> None:
    shapes = Path(__file__).parents[2] / "benchmarks" / "shapes"
    model = load_model_config(resolve_model(str(shapes / "qwen3-0.6b"), weights_needed=False))
    times = measure_kernels(
        model, Ceilings(3e12, 770e12), groups=["prefill", "small"], page_size=16, dtype=torch.bfloat16
    )
    prefill = [time for time in times if time.kernel == "prefill attention"]
    assert all(time.microseconds > 0 for time in times)
    assert all(time.of_cudnn is not None for time in prefill)
