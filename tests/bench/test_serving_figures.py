"""Figures of runs: goodput, medians over repeats, and the queue time in a server's metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mini_sglang.bench.acceptance import Acceptance
from mini_sglang.bench.load_generator import Load, Outcome
from mini_sglang.bench.queue_time import QueueTimes
from mini_sglang.bench.serving_figures import Distribution, Figures, figures_of, medians
from mini_sglang.bench.slo import is_good, read_limits


def outcome(ttft: float, *gaps: float, **fields: Any) -> Outcome:
    return Outcome(
        due=0.0, started=0.0, e2e=ttft + sum(gaps), ttft=ttft, gaps=np.array(gaps), output_tokens=1 + len(gaps),
        **{"input_tokens": 10, **fields},
    )  # fmt: skip


def figures(*outcomes: Outcome, **slos: float) -> Figures:
    return figures_of(Load(list(outcomes), 2.0, 0.5), rate=3, slos=slos)


def test_a_distribution_interpolates() -> None:
    assert Distribution.of(range(101)) == Distribution(50, 50, 90, 95, 99, 100)
    assert Distribution.of([]) is None


def test_throughput_is_over_the_time_to_the_last_token() -> None:
    found = figures(outcome(1.0, 0.5, 0.5), outcome(0.5, 0.5, 0.5, 0.5, 2.0))
    assert found.seconds == 4.0
    assert (found.requests_per_second, found.input_tokens_per_second, found.output_tokens_per_second) == (0.5, 5, 2)
    assert found.tpot_ms is not None
    assert found.tpot_ms.mean == pytest.approx((500 + 875) / 2)
    assert (found.cpu_us_per_request, found.cpu_share) == (250_000, 0.25)
    assert found.cached_tokens is None
    assert found.goodput is None


@pytest.mark.parametrize(
    ("slos", "good"),
    [({"ttft": 600}, 1), ({"ttft": 1000, "e2e": 2000}, 1), ({"itl": 500}, 1), ({"tpot": 900}, 2), ({"tpot": 400}, 0)],
)
def test_goodput_counts_requests_that_keep_every_limit(slos: dict[str, float], good: int) -> None:
    found = figures(outcome(1.0, 0.5, 0.5), outcome(0.5, 0.5, 0.5, 0.5, 2.0), **slos)
    assert found.goodput == pytest.approx(good / found.seconds)


def test_a_request_that_failed_is_not_good() -> None:
    failed = Outcome(due=0, started=0, error="HTTP 500", detail="no")
    assert figures(outcome(0.1, 0.1), failed, outcome(0.2), outcome(0.9), ttft=500.0).good_share == 0.5
    assert figures(failed, ttft=500.0).good_share == 0
    assert figures(outcome(0.1), failed).good_share is None


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ("ttft=500", True),
        ("ttft=499.9", False),
        ("ttft=500ms,e2e=2500", True),
        ("ttft=500,e2e=2499", False),
        ("e2el=2499", False),
        ("tpot=20", True),
        ("tpot=19.9", False),
        ("itl_max=1010", True),
        ("itl_max=1009", False),
        ("itl_p99=20.2", True),  # the pause is one of a hundred gaps: the 99th percentile is 1 % of the way to it
        ("itl_p99=20", False),
        ("itl=20", False),
    ],
)
def test_each_limit_is_on_a_latency_of_the_request(slo: str, good: bool) -> None:
    one = outcome(0.5, *[0.01] * 99, 1.01)
    one.e2e = 2.5
    assert is_good(one, read_limits(slo)) is good


def test_a_request_of_one_token_has_no_time_per_token_and_keeps_its_limits() -> None:
    assert figures(outcome(1.0)).tpot_ms is None
    assert is_good(outcome(0.1), read_limits("tpot=1,itl_p99=1,itl_max=1"))


def test_repeats_are_reported_by_their_medians() -> None:
    failed = Outcome(due=0, started=0, error="HTTP 500", detail="no")
    runs = [figures(outcome(ttft, 0.1), *([failed] if ttft == 9 else [])) for ttft in (1.0, 9.0, 2.0)]
    found = medians(runs)
    assert found.ttft_ms == Distribution.of([2000.0])
    assert found.requests_per_second == pytest.approx(1 / 2.1)
    assert found.errors == {"HTTP 500": 0}
    assert found.details == {"HTTP 500": "no"}
    assert medians(runs[:1]) is runs[0]


def test_drafts_of_repeats_are_counted_together() -> None:
    runs = [Acceptance(2, 8, [1], 1 / 8, 0.5, [0.5]), None, Acceptance(6, 8, [3], 3 / 8, 0.5, [0.5])]
    load = Load([outcome(1.0)], 2.0, 0.5)
    found = medians([figures_of(load, rate=3, slos={}, drafts=run) for run in runs])
    assert found.drafts == Acceptance(8, 16, [4], 0.25, 0.5, [0.5])
    assert medians([figures(outcome(1.0))] * 2).drafts is None


def metrics(name: str, *cumulative: float, seconds: float) -> str:
    bounds = ["0.1", "0.5", "+Inf"]
    lines = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in zip(bounds, cumulative, strict=True)]
    return "\n".join(
        [f"# TYPE {name} histogram", *lines, f"{name}_sum {seconds}", f"{name}_count {cumulative[-1]}", ""]
    )


@pytest.mark.parametrize("name", ["vllm:request_queue_time_seconds", "sglang:queue_time_seconds"])
def test_queue_time_is_that_of_the_requests_since(name: str) -> None:
    before, after = (
        QueueTimes.read(metrics(name, *counts, seconds=seconds))
        for counts, seconds in (((1, 1, 1), 0.1), ((9, 11, 11), 1.1))
    )
    assert before is not None
    assert after is not None
    found = after.since(before)
    assert found is not None
    assert found.mean == pytest.approx(100)
    assert [found.p50, found.p90, found.max] == pytest.approx([62.5, 300, 500])
    assert after.since(after) is None


def test_percentiles_in_a_wide_bucket_are_no_larger_than_the_mean_allows() -> None:
    empty, after = (QueueTimes.read(metrics("x_queue_time_seconds", n, n, n, seconds=n * 1e-4)) for n in (0, 1000))
    assert empty is not None
    assert after is not None
    found = after.since(empty)
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert [found.p50, found.p90, found.p99] == pytest.approx([0.2, 1.0, 10.0])


def test_waits_beyond_the_last_bucket_are_at_least_its_bound() -> None:
    empty, after = (QueueTimes.read(metrics("x_queue_time_seconds", 0, 0, n, seconds=n)) for n in (0, 4))
    assert empty is not None
    assert after is not None
    found = after.since(empty)
    assert found is not None
    assert (found.mean, found.p99) == (1000, 500)


def test_a_server_without_such_metrics_has_no_queue_time() -> None:
    assert QueueTimes.read(metrics("ttft_seconds", 1, 2, 3, seconds=1)) is None


def test_a_histogram_under_two_names_is_read_once() -> None:
    pages = [metrics(f"{prefix}:request_queue_time_seconds", 1, 2, 3, seconds=1) for prefix in ("mini_sglang", "vllm")]
    assert QueueTimes.read("".join(pages)) == QueueTimes.read(pages[0])
