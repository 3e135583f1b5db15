"""Which rate to measure next, and what the highest rate is at which a given share of the requests is good.

Pure functions of what was measured so far. Knows no server, no load and no tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

PRECISION = 0.05  # the search ends when the lowest rate that fails is at most this much above the highest that passes
FIRST, LOWEST, HIGHEST = 1.0, 0.25, 1024.0  # requests/s of a search that is given no rates


@dataclass(frozen=True)
class HighestRate:
    """The highest rate, of those measured, up to which each had the share of good requests that was asked for.

    A rate that passes above one that fails is luck, and does not count.
    """

    good: float  # the share asked for
    rate: float | None  # requests/s; None: not even the lowest rate passed
    good_share: float | None  # of the requests at `rate`
    failed_rate: float | None  # requests/s, the lowest that failed; None: none did
    failed_share: float | None  # of the requests at `failed_rate` that were good

    @classmethod
    def of(cls, shares: Mapping[float, float], good: float) -> HighestRate:
        """From the measured share of good requests by rate."""
        failed = min((rate for rate, share in shares.items() if share < good), default=None)
        passed = max((rate for rate in shares if failed is None or rate < failed), default=None)
        return cls(
            good=good,
            rate=passed,
            good_share=None if passed is None else shares[passed],
            failed_rate=failed,
            failed_share=None if failed is None else shares[failed],
        )


def next_rate(shares: Mapping[float, float], good: float, *, listed: bool) -> float | None:
    """The rate to measure after those of `shares`, which are shares of good requests by rate; None: the search is over.

    Between a rate that passes and one that fails it is their geometric mean. Where there is only one kind, a search
    doubles or halves, from FIRST and within LOWEST and HIGHEST; one through `listed` rates stays within the list.
    """
    found = HighestRate.of(shares, good)
    passed, failed = found.rate, found.failed_rate
    if passed is not None and failed is not None:
        return None if failed <= passed * (1 + PRECISION) else _between(passed, failed)
    if listed:
        return None
    if failed is not None:
        return failed / 2 if failed > LOWEST else None
    if passed is not None:
        return passed * 2 if passed < HIGHEST else None
    return FIRST


def _between(low: float, high: float) -> float:
    """Their geometric mean, in three digits."""
    return float(f"{math.sqrt(low) * math.sqrt(high):.3g}")
