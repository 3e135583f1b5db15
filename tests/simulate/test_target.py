"""What a fleet has to keep, and the search for how many replicas that takes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_sglang.bench.load_generator import Load, Outcome
from mini_sglang.bench.serving_figures import Figures, figures_of
from mini_sglang.simulate.target import Target, next_number


def figures(ttft_ms: float, **more: Any) -> Figures:
    outcome = Outcome(0.0, 0.0, e2e=1.0, ttft=ttft_ms / 1e3, output_tokens=1, **more)
    return figures_of(Load([outcome], 1.0, 0.0), rate=None, slos={"ttft": 300.0})


def test_limits_are_read_in_any_unit() -> None:
    target = Target.read("ttft_p99<500ms, itl_p50<=50,e2e_max < 2.5s,good>95%")
    assert target.limits == {("ttft", "p99"): 500, ("itl", "p50"): 50, ("e2e", "max"): 2500}
    assert target.good == 0.95


@pytest.mark.parametrize(
    "text", ["", "ttft<5", "ttft_p98<5", "ttft_p99>5", "good<0.5", "ttft_p99<5m", "ttft_p99<1.2.3"]
)
def test_what_is_no_limit_is_said_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"find_replicas must be like ttft_p99<500ms"):
        Target.read(text)


def test_a_share_of_more_than_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1"):
        Target.read("good>2")


def test_a_target_is_met_if_every_limit_is_kept_and_every_request_answered() -> None:
    assert Target.read("ttft_p99<500ms").is_met(figures(499))
    assert not Target.read("ttft_p99<500ms").is_met(figures(501))
    assert not Target.read("ttft_p99<500ms").is_met(figures(1, error="HTTP 400"))
    assert Target.read("itl_p99<1").is_met(figures(1))  # an answer of one token has no gap
    assert Target.read("good>0.9").is_met(figures(200))
    assert not Target.read("good>0.9").is_met(figures(400))


@given(least=st.integers(1, 1200), most=st.integers(1, 1000))
def test_the_search_finds_the_fewest_replicas(least: int, most: int) -> None:
    met: dict[int, bool] = {}
    while (number := next_number(met, most)) is not None:
        assert 1 <= number <= most
        assert number not in met
        met[number] = number >= least
    found = min((number for number, is_met in met.items() if is_met), default=None)
    assert found == (least if least <= most else None)
    assert len(met) <= 21
