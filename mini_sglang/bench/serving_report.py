"""What `bench serving` shows: tables, and curves over rates. Knows figures alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mini_sglang.bench.output import load_pyplot, table
from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.bench.serving_figures import Distribution, Figures

_ROWS = {
    "TTFT, ms": "ttft_ms",
    "ITL, ms": "itl_ms",
    "TPOT, ms": "tpot_ms",
    "E2E, ms": "e2e_ms",
    "queue, ms": "queue_ms",
    "input tokens": "input_tokens",
    "cached tokens": "cached_tokens",
    "output tokens": "output_tokens",
    "sent late, ms": "late_ms",
}
_PARTS = ("mean", "p50", "p90", "p95", "p99")


def serving_report(config: ServingConfig, results: Sequence[Figures]) -> list[Table | str]:
    """Lines and a table for each rate, and for several rates a table that sets them side by side."""
    runs = f", medians of {config.repeats} runs" if config.repeats > 1 else ""
    parts: list[Table | str] = []
    for result in results:
        title = f"\n{config.api} at {config.url}: {_load_of(config, result)}{runs}"
        parts += [title, _table_of(result), *_lines_of(result)]
    return [*parts, "\nLatencies in ms:", _rates_table(results)] if len(results) > 1 else parts


def _table_of(figures: Figures) -> Table:
    made = table("", "", *_PARTS)
    for title, name in _ROWS.items():
        distribution: Distribution | None = getattr(figures, name)
        made.add_row(title, *(_short(None if distribution is None else getattr(distribution, part)) for part in _PARTS))
    return made


def _load_of(config: ServingConfig, figures: Figures) -> str:
    if config.concurrency is not None:
        return f"{config.concurrency} under way"
    if figures.rate is None:
        return f"trace at {config.speed:g} times its speed"
    return f"{figures.rate:g} requests/s, {config.arrival}"


def _lines_of(figures: Figures) -> list[str]:
    """Throughput, errors, and what the generator took."""
    cached = "" if figures.cached_share is None else f" ({figures.cached_share:.1%} cached)"
    goodput = "" if figures.goodput is None else f", {figures.goodput:,.2f} within the SLO (goodput)"
    late = 0.0 if figures.late_ms is None else figures.late_ms.max
    return [
        f"{figures.num_completed:g} of {figures.num_requests:g} requests in {figures.seconds:.2f} s",
        f"requests/s: {figures.requests_per_second:,.2f}{goodput}",
        f"tokens/s: {figures.input_tokens_per_second:,.1f} in{cached}, {figures.output_tokens_per_second:,.1f} out",
        *(f"{count:g} failed: {kind} {figures.details.get(kind, '')[:200]}" for kind, count in figures.errors.items()),
        f"generator: {figures.cpu_us_per_request:.0f} µs of CPU a request, {figures.cpu_share:.1%} of a core, "
        f"sent at most {late:.1f} ms late",
    ]


def _rates_table(results: Sequence[Figures]) -> Table:
    columns = ("sent/s", "done/s", "good/s", "TTFT p50", "p99", "ITL p50", "p99", "tokens/s", "errors")
    made = table("", *columns, names=False)
    for figures in results:
        ttft, itl = figures.ttft_ms, figures.itl_ms
        made.add_row(
            f"{figures.rate:g}",
            f"{figures.requests_per_second:,.2f}",
            "–" if figures.goodput is None else f"{figures.goodput:,.2f}",
            *(_short(part) for of in (ttft, itl) for part in ((of.p50, of.p99) if of else (None, None))),
            f"{figures.output_tokens_per_second:,.1f}",
            f"{sum(figures.errors.values()):g}",
        )
    return made


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def plot_rates(path: Path, results: Sequence[Figures]) -> None:
    """Latencies, throughput and goodput over the rate asked for, as a picture of the kind that the name says."""
    pyplot = load_pyplot()
    rates = [result.rate for result in results]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), sharex=True, layout="constrained")
    _plot_percentiles(axes[0, 0], "time to first token, ms", rates, [result.ttft_ms for result in results])
    _plot_percentiles(axes[0, 1], "inter-token latency, ms", rates, [result.itl_ms for result in results])
    axes[1, 0].plot(rates, [result.input_tokens_per_second for result in results], marker="o", label="input")
    axes[1, 0].plot(rates, [result.output_tokens_per_second for result in results], marker="o", label="output")
    axes[1, 0].set(title="tokens/s", xlabel="requests/s sent", ylim=(0, None))
    axes[1, 1].plot(rates, rates, color="grey", linestyle="dotted", label="sent")
    axes[1, 1].plot(rates, [result.requests_per_second for result in results], marker="o", label="completed")
    if any(result.goodput is not None for result in results):
        axes[1, 1].plot(rates, [result.goodput for result in results], marker="o", label="within the SLO (goodput)")
    axes[1, 1].set(title="requests/s", xlabel="requests/s sent", ylim=(0, None))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _plot_percentiles(axis: Any, title: str, rates: Sequence[Any], latencies: Sequence[Distribution | None]) -> None:
    """On a logarithmic scale where overload takes latencies to another order, else from 0."""
    spread: list[float] = []
    for part in ("p99", "p90", "p50"):
        values = [float("nan") if latency is None else getattr(latency, part) for latency in latencies]
        axis.plot(rates, values, marker="o", label=part)
        spread += [value for value in values if value > 0]
    axis.set(title=title)
    if spread and max(spread) > 10 * min(spread):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axis.set_ylim(0, None)
