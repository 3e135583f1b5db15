"""When requests are sent: drawn from a distribution. Times are seconds since the first request could be sent."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Arrival = Literal["poisson", "gamma", "fixed"]


def arrival_times(
    count: int, rate: float, arrival: Arrival, rng: np.random.Generator, burstiness: float = 1.0
) -> np.ndarray[Any, Any]:
    """`count` times, float64 and not decreasing, `rate` a second on average; an infinite rate sends all at once.

    poisson: requests arrive independently of each other. fixed: all gaps are equal. gamma: gaps follow a gamma
    distribution of shape `burstiness`: 1 is Poisson, less comes in bursts (the squared coefficient of variation is
    1 / burstiness). Raises ValueError for a rate or a burstiness that is not positive.
    """
    if not rate > 0:
        raise ValueError(f"rate must be above 0 requests/s, got {rate}")
    if not burstiness > 0:
        raise ValueError(f"burstiness must be above 0, got {burstiness}")
    if np.isinf(rate):
        return np.zeros(count)
    if arrival == "fixed":
        return np.arange(count) / rate
    shape = burstiness if arrival == "gamma" else 1.0
    return np.cumsum(rng.gamma(shape, 1 / (rate * shape), count))
