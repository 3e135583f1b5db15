"""The search for the highest rate with enough good requests: what it measures, how often, and what it finds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_sglang.bench.rate_search import FIRST, HIGHEST, LOWEST, PRECISION, HighestRate, next_rate

SHARES = st.floats(0.01, 1.0)
MOST_DOUBLINGS = round(math.log2(HIGHEST / FIRST)) + 1
MOST_HALVINGS = 5  # of the gap between a rate and its double, until it is within the precision


def search(share_at: Callable[[float], float], good: float, listed: tuple[float, ...] = ()) -> dict[float, float]:
    """The share at each rate measured, in the order of measuring."""
    shares = {rate: share_at(rate) for rate in listed}
    while (rate := next_rate(shares, good, listed=bool(listed))) is not None:
        assert rate not in shares
        shares[rate] = share_at(rate)
        assert len(shares) < 100, "it does not end"
    return shares


def falling(limit: float) -> Callable[[float], float]:
    """All requests are good up to `limit` requests/s, and fewer and fewer beyond."""
    return lambda rate: min(1.0, (limit / rate) ** 3)


@given(limit=st.floats(LOWEST, HIGHEST), good=SHARES)
def test_it_finds_the_limit_to_its_precision(limit: float, good: float) -> None:
    share_at = falling(limit)
    true_limit = limit / good ** (1 / 3)
    shares = search(share_at, good)
    found = HighestRate.of(shares, good)
    assert found.rate is not None
    assert found.rate <= true_limit * (1 + 1e-9)
    if found.failed_rate is None:
        assert found.rate >= HIGHEST
    else:
        assert found.rate <= true_limit * (1 + 1e-9) < found.failed_rate * (1 + 1e-8)
        assert found.failed_rate <= found.rate * (1 + PRECISION)


@given(limit=st.floats(0.001, 1e5), good=SHARES)
def test_it_measures_a_bounded_number_of_rates(limit: float, good: float) -> None:
    assert len(search(falling(limit), good)) <= MOST_DOUBLINGS + MOST_HALVINGS


@given(
    rates=st.lists(st.floats(0.01, 1e4), min_size=1, max_size=6, unique=True), limit=st.floats(0.001, 1e5), good=SHARES
)
def test_a_list_is_measured_and_then_only_the_gap_where_it_fails(rates: list[float], limit: float, good: float) -> None:
    shares = search(falling(limit), good, tuple(rates))
    assert set(rates) <= set(shares)
    passed = [rate for rate in rates if falling(limit)(rate) >= good]
    failed = [rate for rate in rates if rate not in passed]
    more = [rate for rate in shares if rate not in rates]
    if not passed or not failed:
        assert more == []
    else:
        assert all(max(passed) < rate < min(failed) for rate in more)
        found = HighestRate.of(shares, good)
        assert found.rate is not None
        assert found.failed_rate is not None
        assert found.failed_rate <= found.rate * (1 + PRECISION)
        assert len(more) <= 10


@given(seed=st.integers(0, 10_000), limit=st.floats(0.3, 900), good=st.floats(0.5, 1.0), noise=st.floats(0, 0.3))
def test_noise_changes_what_is_found_but_not_what_it_means(seed: int, limit: float, good: float, noise: float) -> None:
    """Every rate up to the one found had the share, the next one measured had not, and the two are close."""
    rng = random.Random(seed)
    shares = search(lambda rate: min(1.0, max(0.0, falling(limit)(rate) + rng.uniform(-noise, noise))), good)
    found = HighestRate.of(shares, good)
    below = [share for rate, share in shares.items() if found.rate is not None and rate <= found.rate]
    assert all(share >= good for share in below)
    if found.failed_rate is not None:
        assert shares[found.failed_rate] < good
        assert all(rate <= (found.rate or 0) for rate in shares if rate < found.failed_rate)
    if found.rate is not None and found.failed_rate is not None:
        assert found.failed_rate <= found.rate * (1 + PRECISION)
        assert (found.good_share, found.failed_share) == (shares[found.rate], shares[found.failed_rate])
    assert len(shares) <= MOST_DOUBLINGS + MOST_HALVINGS


def test_without_rates_it_doubles_from_one_and_then_halves_the_gap() -> None:
    rates = list(search(falling(22.4), 1.0))
    assert rates[:6] == [1, 2, 4, 8, 16, 32]
    assert rates[6:] == [22.6, 19.0, 20.7, 21.6]


def test_rates_below_one_are_looked_for_too() -> None:
    shares = search(falling(0.3), 1.0)
    assert list(shares)[:3] == [1, 0.5, 0.25]
    found = HighestRate.of(shares, 1.0)
    assert found.rate is not None
    assert 0.28 < found.rate <= 0.3


def test_a_server_that_is_never_good_has_no_highest_rate() -> None:
    shares = search(lambda _: 0.5, 0.95)
    assert list(shares) == [1, 0.5, 0.25]
    assert HighestRate.of(shares, 0.95) == HighestRate(0.95, None, None, 0.25, 0.5)


def test_a_server_that_is_always_good_is_measured_up_to_the_highest_rate() -> None:
    shares = search(lambda _: 1.0, 0.95)
    assert list(shares) == [FIRST * 2**power for power in range(MOST_DOUBLINGS)]
    assert HighestRate.of(shares, 0.95) == HighestRate(0.95, HIGHEST, 1.0, None, None)


def test_a_rate_that_passes_above_one_that_fails_does_not_count() -> None:
    assert HighestRate.of({8: 1.0, 16: 0.9, 24: 0.97}, 0.95) == HighestRate(0.95, 8, 1.0, 16, 0.9)


@pytest.mark.parametrize("good", [0.5, 0.95, 1.0])
def test_the_share_asked_for_is_enough(good: float) -> None:
    assert HighestRate.of({4: good}, good).rate == 4


@pytest.mark.parametrize("order", list(itertools.permutations([8.0, 16.0, 24.0])))
def test_the_order_of_measuring_does_not_matter(order: tuple[float, ...]) -> None:
    shares = {rate: falling(10)(rate) for rate in order}
    assert next_rate(shares, 0.95, listed=True) == 11.3
    assert HighestRate.of(shares, 0.95).rate == 8
