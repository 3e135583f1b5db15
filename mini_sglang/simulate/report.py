"""What `mini-sglang simulate` shows: tables and curves. Knows figures alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from mini_sglang.bench.output import load_pyplot, table
from mini_sglang.bench.rate_search import HighestRate
from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.bench.serving_figures import Figures
from mini_sglang.bench.serving_report import (
    figures_table,
    headline,
    load_of,
    plot_percentiles,
    rates_table,
    throughput_lines,
)

if TYPE_CHECKING:
    from mini_sglang.simulate.commands import FleetFigures


def run_report(
    config: ServingConfig, results: Sequence[Figures], fleets: Sequence[FleetFigures], highest: HighestRate | None
) -> list[Table | str]:
    """Lines and a table for each rate, and for several rates a table that sets them side by side."""
    parts: list[Table | str] = [] if highest is None else [headline(highest)]
    if len(results) > 1:
        parts += ["\nLatencies in ms:", rates_table(results)]
    if highest is None:
        for result in results:
            fleet = next(fleet for fleet in fleets if fleet.rate == result.rate)
            title = f"\n{fleet.replicas} replicas, {load_of(config, result)}"
            parts += [title, figures_table(result), *throughput_lines(result), *_fleet_lines(fleet)]
    return parts


def _fleet_lines(fleet: FleetFigures) -> list[str]:
    lines = [
        f"replicas: {fleet.busy:.1%} busy, the one with most requests has {fleet.most_to_mean:.2f} times the mean",
        f"simulated {fleet.seconds:,.1f} s in {fleet.simulated_in_s:,.1f} s",
    ]
    if fleet.cost is not None and fleet.cost_per_million_tokens is not None:
        lines.append(f"cost: {fleet.cost:,.2f}, {fleet.cost_per_million_tokens:,.3f} a million generated tokens")
    return lines


def replicas_table(tried: Sequence[tuple[Figures, FleetFigures, bool]]) -> Table:
    """Numbers of replicas side by side."""
    made = table(
        "", "replicas", "target", "TTFT p50", "p99", "ITL p50", "p99", "good %", "cached %", "busy %", "cost",
        names=False,
    )  # fmt: skip
    for figures, fleet, is_met in tried:
        latencies = [
            "–" if of is None else f"{getattr(of, part):,.1f}"
            for of in (figures.ttft_ms, figures.itl_ms)
            for part in ("p50", "p99")
        ]
        made.add_row(
            str(fleet.replicas),
            "met" if is_met else "missed",
            *latencies,
            "–" if figures.good_share is None else f"{figures.good_share * 100:.1f}",
            "–" if figures.cached_share is None else f"{figures.cached_share * 100:.1f}",
            f"{fleet.busy * 100:.0f}",
            "–" if fleet.cost is None else f"{fleet.cost:,.2f}",
        )
    return made


def plot_replicas(path: Path, replicas: Sequence[int], results: Sequence[Figures], enough: int | None) -> None:
    """Latencies and cache hits over the number of replicas."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    plot_percentiles(axes[0], "time to first token, ms", replicas, [result.ttft_ms for result in results])
    plot_percentiles(axes[1], "inter-token latency, ms", replicas, [result.itl_ms for result in results])
    shares = [(result.cached_share or 0.0) * 100 for result in results]
    axes[2].plot(replicas, shares, marker="o", label="prompt tokens cached")
    if any(result.good_share is not None for result in results):
        axes[2].plot(replicas, [(result.good_share or 0.0) * 100 for result in results], marker="o", label="good")
    axes[2].set(title="shares, %", ylim=(-4, 104))
    for axis in axes:
        axis.set_xlabel("replicas")
        if enough is not None:
            axis.axvline(enough, color="tab:green", label=f"{enough} are enough")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
