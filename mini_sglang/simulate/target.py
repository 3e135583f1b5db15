"""What a fleet has to keep, as `--find-replicas "ttft_p99<500ms,good>0.95"` says it. Knows figures alone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mini_sglang.bench.serving_figures import Distribution, Figures

LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue")
PARTS = ("mean", "p50", "p90", "p95", "p99", "max")
_EXAMPLE = "ttft_p99<500ms"
_LATENCY = re.compile(rf"({'|'.join(LATENCIES)})_({'|'.join(PARTS)})\s*<=?\s*([0-9.]+)\s*(ms|s)?")
_GOOD = re.compile(r"good\s*>=?\s*([0-9.]+)\s*(%)?")


@dataclass(frozen=True)
class Target:
    """Limits in ms on latencies, by metric and part of its distribution, and the least share of good requests."""

    limits: dict[tuple[str, str], float]
    good: float = 0.0

    @classmethod
    def read(cls, text: str) -> Target:
        """Raises ValueError that says how to write it."""
        limits: dict[tuple[str, str], float] = {}
        good = 0.0
        for part in text.split(","):
            latency, share = _LATENCY.fullmatch(part.strip()), _GOOD.fullmatch(part.strip())
            try:
                if latency is not None:
                    name, of, number, unit = latency.groups()
                    limits[name, of] = float(number) * (1000 if unit == "s" else 1)
                elif share is not None:
                    good = float(share[1]) / (100 if share[2] else 1)
                else:
                    raise ValueError
            except ValueError:
                raise ValueError(
                    f"find_replicas must be like {_EXAMPLE}, with {', '.join(LATENCIES)} and {', '.join(PARTS)}, or "
                    f"like good>0.95, got {part.strip()!r}"
                ) from None
        if not 0 <= good <= 1:
            raise ValueError(f"find_replicas must ask for a share of good requests of at most 1, got {good:g}")
        return cls(limits, good)

    def is_met(self, figures: Figures) -> bool:
        """Whether all requests were answered, and within these limits."""
        if figures.num_completed < figures.num_requests or (figures.good_share or 0.0) < self.good:
            return False
        return all(_value(figures, name, part) <= limit for (name, part), limit in self.limits.items())


def _value(figures: Figures, name: str, part: str) -> float:
    distribution: Distribution | None = getattr(figures, f"{name}_ms")
    return 0.0 if distribution is None else float(getattr(distribution, part))


def next_number(met: dict[int, bool], most: int) -> int | None:
    """The number of replicas to try next, given whether those tried before met the target; None: the search is over.

    It doubles until the target is met, and then halves the gap to the highest number that did not meet it. More
    replicas are taken to be no worse.
    """
    enough = min((number for number, is_met in met.items() if is_met), default=None)
    too_few = max((number for number, is_met in met.items() if not is_met), default=0)
    if enough is None:
        return None if too_few >= most else min(max(2 * too_few, 1), most)
    return None if enough - too_few <= 1 else math.floor((enough + too_few) / 2)
