"""Checks of L12: arithmetic of what must be moved and multiplied, times of tokens, and where a trace's time went."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from mini_sglang.bench.roofline import Ceilings, Traffic, num_weights, weights_read
from mini_sglang.learn.checking import expect, guards
from mini_sglang.model_config import ExpertsConfig, ModelConfig

SIZES: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
    "context_length": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
TINY = ModelConfig(**SIZES)  # a layer: 8 * 2 * (4 + 2 + 2 + 4) in attention, 3 * 8 * 16 in the MLP; head: 8 * 32
LAYERS, HEAD = 2 * (192 + 384), 256
PER_TOKEN = 2 * 2 * 2 * 2  # values of KV: keys and values, layers, KV heads, head_dim


def traffic(prompts: list[int], outputs: list[int]) -> Traffic:
    """Of the tiny model, with 2 bytes for a weight and 1 for a value of KV."""
    return Traffic.of(TINY, prompts, outputs, weight_bytes=2, kv_bytes=1)


# -- what must be moved -----------------------------------------------------------------------------------------------


@guards("embedding-read")
def test_the_embedding_is_looked_up_and_not_read() -> None:
    expect(
        num_weights(TINY),
        (LAYERS, HEAD),
        "weights that one token meets in the layers, and in the head",
        read="L12: Count what is read",
    )


@guards("weights-per-row")
def test_a_step_reads_the_weights_once_however_many_rows_it_has() -> None:
    expect(
        traffic([3, 5], [2, 4]).weight_bytes,
        4 * (LAYERS + HEAD) * 2,
        "bytes of weights read for prompts of 3 and 5 tokens and answers of 2 and 4: four steps",
        invariant="weights are read once a step",
        read="L12: Count what is read",
    )


@guards("all-experts-read")
def test_of_a_mixture_only_chosen_experts_are_read() -> None:
    experts = ExpertsConfig(num_experts=8, experts_per_token=2, intermediate_size=4, normalize_weights=True)
    model = ModelConfig(**SIZES, experts=experts)
    expect(
        round(weights_read(model, 1)),
        2 * (192 + 8 * (8 + 3 * 4 * 2)),
        "weights that one token reads, 2 layers with 8 experts of which it chooses 2",
        invariant="what nobody chose is not read",
        read="L12: Count what is read",
    )


@guards("keys-without-values", "all-heads")
def test_a_token_leaves_keys_and_values_of_every_kv_head() -> None:
    expect(
        traffic([3, 5], [2, 4]).kv_written_bytes,
        14 * PER_TOKEN,
        "bytes of KV written for 14 tokens: 2 layers, 2 KV heads (and 4 heads of queries), head_dim 2, 1 byte",
        read="L12: Count what is read",
    )


@guards("cache-does-not-grow")
def test_each_decoded_token_reads_all_tokens_so_far() -> None:
    expect(
        traffic([5], [4]).kv_read_bytes,
        (6 + 7 + 8) * PER_TOKEN,
        "bytes of KV read when 3 tokens are decoded behind a prompt of 5 and the token that it gave",
        invariant="a decoded token attends to itself and to all before it",
        read="L12: Count what is read",
    )


@guards("multiply-without-add")
def test_a_weight_costs_two_operations() -> None:
    expect(
        traffic([3, 5], [2, 4]).prompt_flops,
        2 * LAYERS * 8,
        "FLOPs of the products of 8 prompt tokens",
        invariant="one multiplication and one addition per weight and token",
        read="L12: The roofline",
    )


@guards("both-limits-added")
def test_an_operation_takes_as_long_as_the_slower_of_its_two_limits() -> None:
    expect(
        Ceilings(bytes_per_second=10.0, flops_per_second=100.0).seconds(num_bytes=30, flops=200),
        3.0,
        "seconds for 30 bytes at 10 a second and 200 FLOPs at 100 a second",
        invariant="moving and multiplying happen at the same time",
        read="L12: The roofline",
    )


# -- times of tokens --------------------------------------------------------------------------------------------------


class Clock:
    """An engine that takes the given seconds for each of its steps, and gives one token to each request per step."""

    def __init__(self, *step_seconds: float) -> None:
        self.now = 0.0
        self._steps = list(step_seconds)
        self._ids: list[str] = []
        self.model_config = SimpleNamespace(vocab_size=100, context_length=100)
        self.config = SimpleNamespace(page_size=1)

    def add_request(self, request_id: str, prompt_ids: list[int], params: object) -> None:
        self._ids.append(request_id)

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(num_pages=100)

    @property
    def has_work(self) -> bool:
        return bool(self._steps)

    def step(self) -> list[Any]:
        self.now += self._steps.pop(0)
        return [SimpleNamespace(error=None, request_id=request_id, token_ids=[7]) for request_id in self._ids]


def timed(*step_seconds: float) -> Any:
    """What `stream` says of one request, whose tokens take so long."""
    from mini_sglang.bench import latency
    from mini_sglang.bench.offline import Workload

    engine: Any = Clock(*step_seconds)
    with mock.patch("time.perf_counter", side_effect=lambda: engine.now):
        return latency.stream(engine, Workload([[1, 2, 3]], [len(step_seconds)]))


@guards("clock-before-the-step")
def test_a_token_comes_at_the_end_of_its_step() -> None:
    expect(
        round(timed(0.5, 0.02, 0.02).first_token_ms),
        500,
        "ms to the first token, when the first step takes 500 ms",
        read="L12: What a user feels",
    )


@guards("first-token-in-the-gaps")
def test_the_wait_for_the_first_token_is_no_gap_between_tokens() -> None:
    found = timed(0.5, 0.02)
    expect(
        round(found.token_ms_median),
        20,
        "ms between tokens, of an answer of two tokens that came after 500 and 520 ms",
        invariant="n tokens have n - 1 gaps",
        read="L12: What a user feels",
    )


# -- reading a trace --------------------------------------------------------------------------------------------------


def spans(*times: tuple[str, float, float]) -> Any:
    from mini_sglang.bench.profile import Span, summarise

    return summarise([Span(*each) for each in times], "lesson", steps=1)


@guards("overlap-counted-twice")
def test_overlapping_kernels_share_one_clock() -> None:
    found = spans(("gemm_a", 0.0, 100.0), ("norm", 60.0, 140.0))
    expect(
        (round(found.products_ms, 6), round(found.other_ms, 6), round(found.elapsed_ms, 6)),
        (0.1, 0.04, 0.14),
        "ms of products, of other kernels and in all: one runs from 0 to 100 µs, the other from 60 to 140",
        invariant="the parts sum up to the window",
        read="L12: Reading a trace",
    )


@guards("gap-inside-a-kernel")
def test_there_is_no_gap_while_a_longer_kernel_still_runs() -> None:
    found = spans(("gemm_a", 0.0, 100.0), ("norm", 10.0, 20.0), ("rope", 100.0, 120.0))
    expect(
        (round(found.host_gaps_ms, 6), round(found.elapsed_ms, 6)),
        (0.0, 0.12),
        "ms of waiting for the host, and in all: a short kernel lies within a long one, the third follows",
        invariant="the parts sum up to the window",
        read="L12: Reading a trace",
    )


@guards("host-blamed-for-all")
def test_short_gaps_are_those_of_the_device() -> None:
    found = spans(("gemm_a", 0.0, 100.0), ("norm", 101.0, 111.0), ("gemm_b", 141.0, 151.0))
    expect(
        (round(found.short_gaps_ms, 6), round(found.host_gaps_ms, 6)),
        (0.001, 0.03),
        "ms of gaps between kernels that follow each other (1 µs), and of waiting for the host (30 µs)",
        read="L12: Reading a trace",
    )


def test_the_floor_is_bytes_and_then_the_prompts_products() -> None:
    found = Traffic(weight_bytes=60, kv_read_bytes=30, kv_written_bytes=10, prompt_flops=500, decode_flops=70)
    expect(found.floor_seconds(Ceilings(10.0, 100.0)), 15.0, "seconds: 100 bytes at 10, 500 FLOPs at 100 a second")


def test_the_parts_of_a_profile_sum_up_to_its_window() -> None:
    found = spans(("decode_attention", 0.0, 5.0), ("gemm", 5.0, 9.0), ("norm", 30.0, 31.5), ("gemm", 29.0, 33.0))
    parts = found.attention_ms + found.products_ms + found.other_ms + found.short_gaps_ms + found.host_gaps_ms
    expect(round(parts, 9), 0.033, "ms of all parts, of spans from 0 to 33 µs")
