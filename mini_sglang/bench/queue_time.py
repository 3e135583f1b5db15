"""How long requests waited in the server, from the histogram in its Prometheus metrics, where it has one.

vLLM, SGLang and this project put different words in front, but all end its name the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from mini_sglang.bench.serving_figures import Distribution

_SUFFIX = "queue_time_seconds"


@dataclass(frozen=True)
class QueueTimes:
    """The histogram since the server's start: by upper bound in seconds, how many requests waited no longer."""

    counts: dict[float, float]
    seconds: float  # of all requests together

    @classmethod
    def read(cls, metrics: str) -> QueueTimes | None:
        """Of the first such histogram of a page of metrics, all label sets together; None if it has none.

        There may be a second one, of the same requests under another server's name.

        Raises ValueError for a page that is no such text.
        """
        counts: Counter[float] = Counter()
        seconds = 0.0
        for family in text_string_to_metric_families(metrics):
            if family.type == "histogram" and family.name.endswith(_SUFFIX):
                for sample in family.samples:
                    if sample.name.endswith("_bucket"):
                        counts[float(sample.labels["le"])] += sample.value  # type: ignore[assignment]  # a float
                    elif sample.name.endswith("_sum"):
                        seconds += sample.value
                break
        return cls(dict(sorted(counts.items())), seconds) if counts else None

    def since(self, before: QueueTimes) -> Distribution | None:
        """Of the requests after `before`, in ms; None if there are none.

        Percentiles are interpolated inside a bucket, which may be wide, but are no larger than the mean allows
        (Markov's inequality).
        """
        new = {bound: count - before.counts.get(bound, 0.0) for bound, count in self.counts.items()}
        total = max(new.values())
        if total <= 0:
            return None
        seconds = self.seconds - before.seconds
        quantiles = [
            min(_quantile(new, share * total), seconds / max(total * (1 - share), 1))
            for share in (0.5, 0.9, 0.95, 0.99, 1.0)
        ]
        return Distribution(seconds / total * 1e3, *(quantile * 1e3 for quantile in quantiles))


def _quantile(counts: dict[float, float], rank: float) -> float:
    """The value that `rank` requests do not exceed; the last finite bound for those above it."""
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= rank:
            if math.isinf(bound):
                break
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower
