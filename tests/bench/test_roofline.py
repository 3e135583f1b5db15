"""Floors are arithmetic: those of the published shapes, and of one token by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mini_sglang.bench.offline import Workload
from mini_sglang.bench.roofline import Ceilings, Traffic, num_weights, weights_read
from mini_sglang.model_config import ExpertsConfig, ModelConfig
from mini_sglang.weights.hub import resolve_model
from mini_sglang.weights.model_config import load_model_config

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
H100 = Ceilings(bytes_per_second=3.0e12, flops_per_second=770e12)


def shape(name: str) -> ModelConfig:
    return load_model_config(resolve_model(str(SHAPES / name), weights_needed=False))


def offline(name: str) -> Traffic:
    workload = Workload.random(256)
    prompts = [len(prompt) for prompt in workload.prompts]
    return Traffic.of(shape(name), prompts, workload.output_lengths, weight_bytes=2, kv_bytes=2)


def test_the_floor_of_two_cards() -> None:
    assert offline("qwen3-32b").floor_seconds(H100.times(2)) == pytest.approx(22.06, abs=0.1)


@pytest.mark.parametrize(
    ("name", "weight_gb", "kv_read_s", "prompts_s", "floor_s"),
    [("qwen3-0.6b", 1.19, 4.62, 0.18, 5.21), ("qwen3-8b", 15.14, 5.94, 2.61, 13.73)],
)
def test_the_floor_of_the_offline_workload(
    name: str, weight_gb: float, kv_read_s: float, prompts_s: float, floor_s: float
) -> None:
    traffic = offline(name)
    assert traffic.weight_bytes / 1024 / 1e9 == pytest.approx(weight_gb, abs=0.01)
    assert traffic.kv_read_bytes / H100.bytes_per_second == pytest.approx(kv_read_s, abs=0.05)
    assert traffic.prompt_flops / H100.flops_per_second == pytest.approx(prompts_s, abs=0.05)
    assert traffic.floor_seconds(H100) == pytest.approx(floor_s, abs=0.1)


def test_the_floor_of_one_stream_is_mostly_weights() -> None:
    traffic = Traffic.of(shape("qwen3-0.6b"), [964], [724], weight_bytes=2, kv_bytes=2)
    assert 724 / traffic.floor_seconds(H100) == pytest.approx(2237, rel=0.01)


def test_keys_and_values_of_one_byte_are_half_of_those_of_two() -> None:
    wide, narrow = (Traffic.of(shape("qwen3-8b"), [9, 5], [4, 6], weight_bytes=2, kv_bytes=n) for n in (2, 1))
    assert wide.weight_bytes == narrow.weight_bytes
    assert wide.kv_read_bytes == 2 * narrow.kv_read_bytes
    assert wide.kv_written_bytes == 2 * narrow.kv_written_bytes


def test_every_decoded_token_reads_what_came_before_it() -> None:
    model = dataclasses.replace(shape("llama-3.2-1b"), num_layers=1)
    traffic = Traffic.of(model, [3], [3], weight_bytes=2, kv_bytes=2)
    per_token = 2 * 8 * 64 * 2
    assert traffic.kv_read_bytes == (4 + 5) * per_token  # the first token comes from the prompt's step
    in_layer, head = num_weights(model)
    assert traffic.prompt_flops == 2 * in_layer * 3
    assert traffic.decode_flops == 2 * in_layer * 2 + 2 * head * 3


def test_a_mixture_reads_the_experts_that_somebody_chooses() -> None:
    model = shape("qwen3-30b-a3b")
    assert weights_read(model, 100_000) == pytest.approx(29.9e9, rel=0.01), "30 B but for head and embedding"
    assert num_weights(model)[0] == pytest.approx(2.73e9, rel=0.01), "a token meets 8 of 128 experts"
    expert = 3 * 2048 * 768
    shared = weights_read(model, 0)
    for tokens, chosen in ((1, 8), (2, 15.5), (64, 125.94)):
        assert weights_read(model, tokens) - shared == pytest.approx(48 * expert * chosen, rel=1e-3)
    dense = dataclasses.replace(model, experts=None)
    assert weights_read(dense, 1) == weights_read(dense, 1000)


def test_dense_layers_of_a_mixture_are_read_whole() -> None:
    experts = ExpertsConfig(
        num_experts=4, experts_per_token=2, intermediate_size=8, normalize_weights=True, dense_layers=frozenset({0, 9})
    )
    model = dataclasses.replace(shape("llama-3.2-1b"), num_layers=2, experts=experts)
    dense = dataclasses.replace(model, experts=None)
    mlp = 3 * 2048 * 8192
    assert num_weights(model)[0] == num_weights(dense)[0] - mlp + 2048 * (4 + 2 * 3 * 8)


def test_a_mixture_reads_fewer_experts_as_sequences_end() -> None:
    model = shape("qwen3-30b-a3b")
    head = num_weights(model)[1]
    traffic = Traffic.of(model, [30, 70], [2, 3], weight_bytes=2, kv_bytes=2)
    steps = [weights_read(model, tokens) + head for tokens in (100, 2, 1)]
    assert traffic.weight_bytes == pytest.approx(2 * sum(steps))


def test_an_operation_takes_the_longer_of_its_bytes_and_its_flops() -> None:
    ceilings = Ceilings(bytes_per_second=10, flops_per_second=100)
    assert ceilings.seconds(10, 50) == 1
    assert ceilings.seconds(10, 200) == 2
