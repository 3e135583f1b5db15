"""Which runs a measurement has: the rates, the repeats of each, their seeds, and when the requests of a run are sent.

The same for a real server and for a simulated fleet, so that what one predicts and the other measures is one load.
Knows neither.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from mini_sglang.bench.load_generator import LoadRequest, arrival_times
from mini_sglang.bench.rate_search import HighestRate, next_rate
from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.bench.serving_figures import Figures, medians

OTHER_DATA = 1 << 20  # added to a run's seed for its warm-up, and to that of its arrivals
# Measures at a rate, if there is one; with the seed of its requests, and the seed of their arrivals.
MeasureOnce = Callable[[float | None, int, int], Awaitable[Figures]]


async def sweep(config: ServingConfig, measure_once: MeasureOnce) -> list[list[Figures]]:
    """The figures of each run at each rate, a search's by rising rate."""
    runs: list[list[Figures]] = []

    async def measure_at(rate: float | None) -> None:
        runs.append([])
        for repeat in range(config.repeats):
            seed = config.seed + sum(map(len, runs))  # so that no run finds the prompts of another in a cache
            times = config.seed + repeat  # but at every rate they come in the same rhythm
            runs[-1].append(await measure_once(rate, seed, times))

    for rate in config.rates:
        await measure_at(rate)
    while config.good is not None and (rate := _rate_to_try(config, config.good, runs)) is not None:
        await measure_at(rate)
    return runs if config.good is None else sorted(runs, key=lambda of_rate: of_rate[0].rate or 0.0)


def send_times(config: ServingConfig, requests: Sequence[LoadRequest], rate: float | None, seed: int) -> list[float]:
    """When each request is sent, in seconds: at a rate, with gaps drawn from `seed`, or else as in its trace."""
    if rate is None:
        return [(request.timestamp or 0.0) / config.speed for request in requests]
    rng = np.random.default_rng((seed, OTHER_DATA))
    times: list[float] = arrival_times(len(requests), rate, config.arrival, rng, config.burstiness).tolist()
    return times


def highest_rate(config: ServingConfig, results: Sequence[Figures]) -> HighestRate | None:
    """What a search found; None if it was none."""
    return None if config.good is None else HighestRate.of(_shares(results), config.good)


def _rate_to_try(config: ServingConfig, good: float, runs: Sequence[Sequence[Figures]]) -> float | None:
    """Where the search goes on; None where it ends, as with a server that answers nothing at all."""
    if runs and not any(run.num_completed for run in runs[-1]):
        return None
    return next_rate(_shares([medians(of_rate) for of_rate in runs]), good, listed=bool(config.rates))


def _shares(results: Sequence[Figures]) -> dict[float, float]:
    """The share of good requests by rate."""
    return {result.rate or 0.0: result.good_share or 0.0 for result in results}
