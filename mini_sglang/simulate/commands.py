"""`mini-sglang simulate`: replay a load on simulated replicas, or look for how many it takes; show what came of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from mini_sglang.bench.datasets import Requests, open_dataset
from mini_sglang.bench.output import load_pyplot, show
from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.bench.serving_figures import Figures, figures_of, medians
from mini_sglang.bench.serving_report import plot_rates
from mini_sglang.bench.sweep import highest_rate, send_times, sweep
from mini_sglang.routing import POLICIES
from mini_sglang.simulate.cost import ReplicaCost
from mini_sglang.simulate.fleet import Fleet, FleetLoad
from mini_sglang.simulate.report import plot_replicas, replicas_table, run_report
from mini_sglang.simulate.settings import MOST_REPLICAS
from mini_sglang.simulate.target import Target, next_number


@dataclass(frozen=True)
class FleetFigures:
    """What one run's replicas had of it."""

    replicas: int
    rate: float | None
    seconds: float  # of virtual time, from the first request to the end
    busy: float  # share of it in which a replica's device computed, on average
    most_to_mean: float  # requests of the replica that got most, by the mean
    cost: float | None  # of the replicas for that time, in the currency of the price
    cost_per_million_tokens: float | None  # generated ones
    simulated_in_s: float  # of this machine's time


@dataclass(frozen=True)
class Simulator:
    """Runs a load on fleets of any size."""

    config: ServingConfig
    cost: ReplicaCost
    routing: str
    price: float | None = None  # of a replica for an hour

    def results(self, num_replicas: int) -> tuple[list[Figures], list[FleetFigures]]:
        """Medians over the repeats for each rate, and what replicas had of each run."""
        requests = open_dataset(self.config)
        fleets: list[FleetFigures] = []

        async def measure_once(rate: float | None, seed: int, times: int) -> Figures:
            figures, fleet = self._run(requests, num_replicas, rate, seed, times)
            fleets.append(fleet)
            return figures

        return [medians(runs) for runs in asyncio.run(sweep(self.config, measure_once))], fleets

    def _run(
        self, requests: Requests, num_replicas: int, rate: float | None, seed: int, times: int
    ) -> tuple[Figures, FleetFigures]:
        config, began_s = self.config, time.perf_counter()
        sent = requests(seed)[: config.num_requests_at(rate)]
        fleet = Fleet(self.cost, num_replicas, POLICIES[self.routing](), sent)
        if config.concurrency is not None:
            run = fleet.at_concurrency(config.concurrency)
        else:
            run = fleet.at_times(send_times(config, sent, rate, times), in_turn=rate is None)
        figures = figures_of(run.load, rate=rate, slos=config.slos(), queue_ms=run.queue_ms)
        return figures, self._fleet_figures(run, rate, figures, time.perf_counter() - began_s)

    def _fleet_figures(self, run: FleetLoad, rate: float | None, figures: Figures, took_s: float) -> FleetFigures:
        count, seconds = len(run.num_requests), run.load.seconds
        price = None if self.price is None else self.price * count * seconds / 3600
        generated = figures.output_tokens_per_second * figures.seconds
        return FleetFigures(
            replicas=count,
            rate=rate,
            seconds=seconds,
            busy=sum(run.busy) / count,
            most_to_mean=max(run.num_requests) * count / max(sum(run.num_requests), 1),
            cost=price,
            cost_per_million_tokens=None if price is None else price / max(generated, 1) * 1e6,
            simulated_in_s=took_s,
        )


def simulate(
    simulator: Simulator, num_replicas: int, *, json_path: Path | None = None, plot_path: Path | None = None
) -> bool:
    """Run the load on so many replicas; True if any request was answered. Raises ValueError or OSError as data does."""
    config = simulator.config
    if plot_path is not None:
        if config.sweep is None:
            raise ValueError("--plot draws curves over rates or replicas, so it needs --sweep or --find-replicas")
        load_pyplot()
    results, fleets = simulator.results(num_replicas)
    highest = highest_rate(config, results)
    figures = {**_setting(simulator), "highest_rate": highest, "results": results, "fleets": fleets}
    show(run_report(config, results, fleets, highest), figures, json_path)
    if plot_path is not None:
        plot_rates(plot_path, results, highest)
    return any(result.num_completed for result in results)


def find_replicas(
    simulator: Simulator, target: Target, *, json_path: Path | None = None, plot_path: Path | None = None
) -> bool:
    """Look for the fewest replicas that meet the target; True if there is such a number up to `MOST_REPLICAS`."""
    if simulator.config.sweep is not None:
        raise ValueError("find_replicas looks at one load, so it takes no --sweep")
    if plot_path is not None:
        load_pyplot()
    results: dict[int, Figures] = {}
    fleets: dict[int, FleetFigures] = {}
    met: dict[int, bool] = {}
    while (number := next_number(met, MOST_REPLICAS)) is not None:
        [results[number]], [fleets[number], *_] = simulator.results(number)
        met[number] = target.is_met(results[number])
    enough = min((number for number, is_met in met.items() if is_met), default=None)
    tried = sorted(met)
    line = f"{enough} replicas are enough" if enough else f"{MOST_REPLICAS} replicas are too few"
    parts: list[Table | str] = [line, replicas_table([(results[n], fleets[n], met[n]) for n in tried])]
    if enough is not None:
        parts += run_report(simulator.config, [results[enough]], [fleets[enough]], None)
    figures = {
        **_setting(simulator),
        "enough": enough,
        "tried": [{"met": met[n], "fleet": fleets[n], "result": results[n]} for n in tried],
    }
    show(parts, figures, json_path)
    if plot_path is not None:
        plot_replicas(plot_path, tried, [results[n] for n in tried], enough)
    return enough is not None


def _setting(simulator: Simulator) -> dict[str, Any]:
    return {
        "load": simulator.config,
        "replica": msgspec.to_builtins(simulator.cost),
        "routing": simulator.routing,
    }
