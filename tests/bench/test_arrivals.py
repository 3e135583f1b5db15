"""Arrivals come at the rate and with the burstiness asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mini_sglang.bench.load_generator import Arrival, arrival_times


def gaps(arrival: Arrival, rate: float = 50.0, burstiness: float = 1.0) -> np.ndarray[Any, Any]:
    return np.diff(arrival_times(20_000, rate, arrival, np.random.default_rng(0), burstiness))


@pytest.mark.parametrize(("arrival", "burstiness"), [("poisson", 1.0), ("gamma", 0.25), ("gamma", 4.0)])
def test_gaps_have_the_mean_and_the_spread_asked_for(arrival: Arrival, burstiness: float) -> None:
    found = gaps(arrival, burstiness=burstiness)
    assert found.min() >= 0
    assert found.mean() == pytest.approx(1 / 50, rel=0.03)
    assert found.var() / found.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.06)


def test_fixed_gaps_are_equal_and_the_first_request_is_at_once() -> None:
    assert arrival_times(4, 10, "fixed", np.random.default_rng(0)).tolist() == pytest.approx([0, 0.1, 0.2, 0.3])


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, float("inf"), "poisson", np.random.default_rng(0)).tolist() == [0, 0, 0]


def test_burstiness_is_gammas_alone() -> None:
    assert gaps("poisson", burstiness=0.1).tolist() == gaps("poisson").tolist()


@pytest.mark.parametrize(
    ("rate", "burstiness", "message"), [(0, 1, "rate must be above 0"), (1, -1, "burstiness must be above 0, got -1")]
)
def test_what_makes_no_arrivals_is_refused(rate: float, burstiness: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gaps("gamma", rate, burstiness)
