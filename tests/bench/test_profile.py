"""A profile shares a window's time out among kinds of kernels and gaps, and loses none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_sglang.bench.offline import Offline, Run, Workload, measure_offline
from mini_sglang.bench.profile import Profile, Span, spans_of, summarise
from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine


def test_time_goes_to_kinds_of_kernels_and_to_gaps() -> None:
    spans = [
        Span("_decode_kernel", 100, 150),
        Span("nvjet_tst_64x8", 151, 181),  # 1 µs later: within a graph
        Span("_norm_kernel", 281, 291),  # 100 µs later: the host was late
    ]
    profile = summarise(spans, "middle", steps=2)
    assert (profile.attention_ms, profile.products_ms, profile.other_ms) == (0.05, 0.03, 0.01)
    assert (profile.short_gaps_ms, profile.host_gaps_ms) == (0.001, 0.1)
    assert profile.elapsed_ms == pytest.approx(0.191)
    assert profile.idle_share == pytest.approx(101 / 191)
    assert profile.top[0] == ("_decode_kernel", 0.05)


def test_kernels_that_overlap_are_counted_once() -> None:
    spans = [Span("gemm", 0, 10), Span("_norm_kernel", 5, 12), Span("copy", 6, 8)]
    profile = summarise(spans, "middle", steps=1)
    assert (profile.products_ms, profile.other_ms) == (0.01, 0.002)
    assert profile.idle_share == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_decode_kernel", "attention"),
        ("_prefill_kernel", "attention"),
        ("_plan_kernel", "attention"),
        ("void flash::FlashAttnFwdSm90<...>", "attention"),
        ("_gemv_kernel", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "products"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopB_TNT", "products"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("void c10d::(anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16, 2>", "all_reduce"),
        ("void two_shot_all_reduce_kernel<c10::BFloat16, 16, 2>", "all_reduce"),
        ("_rope_store_kernel", "other"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
    ],
)
def test_kernels_are_known_by_name(name: str, kind: str) -> None:
    profile = summarise([Span(name, 0, 1000)], "middle", steps=1)
    assert getattr(profile, f"{kind}_ms") == 1.0


def test_a_trace_is_read_for_what_ran_on_the_device() -> None:
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 10.5, "dur": 2.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.0, "dur": 9.0},
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "gpu_memcpy", "name": "b", "ts": 20, "dur": 1},
    ]
    assert spans_of({"traceEvents": events}) == [Span("a", 10.5, 12.5), Span("b", 20.0, 21.0)]


def test_an_empty_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="window 'start': nothing ran on the device"):
        summarise([], "start", steps=1)


def test_the_idle_share_of_a_run_weighs_its_start_and_the_rest() -> None:
    def window(busy_ms: float, idle_ms: float) -> Profile:
        return Profile("w", 1, busy_ms, 0, 0, 0, 0, idle_ms, [])

    run = Run(tokens_per_second=1, seconds=1.0, steps=9)
    offline = Offline([run], [], [window(100, 100), window(90, 10)])
    assert offline.idle_share == pytest.approx(0.2 * 0.5 + 0.8 * 0.1)
    assert offline.host_gap_share == pytest.approx(offline.idle_share)  # there are no other gaps


@pytest.mark.gpu
def test_an_offline_run_is_profiled_at_its_start_and_in_its_middle() -> None:
    model = str(Path(__file__).parents[2] / "benchmarks" / "shapes" / "qwen3-0.6b")
    engine = Engine(EngineConfig(model=model, load_format="dummy", context_length=256, max_running_requests=16))
    measured = measure_offline(engine, Workload.random(16, longest=60, shortest=40), runs=1, profile_steps=5)
    engine.close()
    torch.cuda.empty_cache()
    assert [profile.window for profile in measured.profiles] == ["start", "middle"]
    middle = measured.profiles[1]
    assert middle.attention_ms > 0
    assert middle.products_ms > 0
    assert measured.idle_share is not None
    assert 0 <= measured.idle_share < 1
