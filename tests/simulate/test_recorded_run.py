"""The simulator beside a server on an H200: what steps took there predicts what its clients measured."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.simulate.commands import Simulator
from mini_sglang.simulate.cost import ReplicaCost

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RATES = (8.0, 16.0, 24.0, 32.0, 48.0)


def test_throughput_is_predicted_within_5_percent_and_medians_within_15() -> None:
    measured = json.loads((RESULTS / "h200-serving-online.json").read_text())
    saved = json.loads((RESULTS / "h200-simulated.json").read_text())["replica"]
    config = ServingConfig(**{**measured["config"], "header": ()})
    predicted, _ = Simulator(config, msgspec.convert(saved, ReplicaCost), "round_robin").results(1)
    of_rate = {result["rate"]: result for result in measured["results"]}
    assert {figures.rate for figures in predicted} >= set(RATES)
    for figures in predicted:
        if figures.rate in RATES:
            expected = of_rate[figures.rate]
            assert figures.requests_per_second == pytest.approx(expected["requests_per_second"], rel=0.05)
            assert figures.output_tokens_per_second == pytest.approx(expected["output_tokens_per_second"], rel=0.05)
            assert figures.ttft_ms is not None
            assert figures.itl_ms is not None
            assert figures.ttft_ms.p50 == pytest.approx(expected["ttft_ms"]["p50"], rel=0.15)
            assert figures.itl_ms.p50 == pytest.approx(expected["itl_ms"]["p50"], rel=0.15)
