"""What `bench serving` shows: tables, and curves over rates. Knows figures alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mini_sglang.bench.output import load_pyplot, table
from mini_sglang.bench.rate_search import HighestRate
from mini_sglang.bench.serving_config import ServingConfig, enough_requests
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


def serving_report(
    config: ServingConfig, results: Sequence[Figures], highest: HighestRate | None = None
) -> list[Table | str]:
    """Lines and a table for each rate, and for several rates a table that sets them side by side.

    A search opens with what it found, and has lines and a table for the rates on both sides of that alone.
    """
    if highest is not None:
        around = [result for result in results if result.rate in (highest.rate, highest.failed_rate)]
        return [*_search_lines(config, results, highest), *_side_by_side(results), *_details(config, around)]
    details = _details(config, results)
    return [*details, *_side_by_side(results)] if len(results) > 1 else details


def _side_by_side(results: Sequence[Figures]) -> list[Table | str]:
    return ["\nLatencies in ms:", rates_table(results)]


def _details(config: ServingConfig, results: Sequence[Figures]) -> list[Table | str]:
    runs = f", medians of {config.repeats} runs" if config.repeats > 1 else ""
    parts: list[Table | str] = []
    for result in results:
        title = f"\n{config.api} at {config.url}: {load_of(config, result)}{runs}"
        parts += [title, figures_table(result), *throughput_lines(result), _generator_line(result)]
    return parts


def headline(highest: HighestRate) -> str:
    """What a search found, in one line."""
    what = f"highest rate with >= {_asked(highest)} good"
    if highest.rate is None:
        return f"{what}: none, {highest.failed_rate:g} requests/s is too high already"
    if highest.failed_rate is None:
        return f"{what}: at least {highest.rate:g} requests/s, the highest measured"
    return f"{what}: {highest.rate:g} requests/s"


def _search_lines(config: ServingConfig, results: Sequence[Figures], highest: HighestRate) -> list[str]:
    """What was found, the rates on both sides of it and those that passed by luck, what good means, and any doubt."""
    lines, doubt = [headline(highest)], ""
    for result in results:
        share, rate = result.good_share or 0.0, result.rate or 0.0
        lucky = highest.failed_rate is not None and rate > highest.failed_rate and share >= highest.good
        if lucky or rate in (highest.rate, highest.failed_rate):
            ending = ", which does not count above a rate that failed" if lucky else ""
            lines.append(f"at {rate:g} requests/s {share:.1%} of {result.num_requests:g} requests are good{ending}")
        if rate == highest.rate and result.num_requests < (enough := enough_requests(rate, highest.good)):
            seconds = result.num_requests / rate
            doubt = f"{result.num_requests:g} requests are {seconds:.1f} s of it; {enough} would tell whether it lasts"
    lines.append("good: " + ", ".join(f"{name} <= {limit:g} ms" for name, limit in config.slos().items()))
    return [*lines, doubt] if doubt else lines


def _asked(highest: HighestRate) -> str:
    return f"{highest.good * 100:g} %"


def figures_table(figures: Figures) -> Table:
    """Latencies and lengths of one run."""
    made = table("", "", *_PARTS)
    for title, name in _ROWS.items():
        distribution: Distribution | None = getattr(figures, name)
        made.add_row(title, *(_short(None if distribution is None else getattr(distribution, part)) for part in _PARTS))
    return made


def load_of(config: ServingConfig, figures: Figures) -> str:
    """How requests came, in words."""
    if config.concurrency is not None:
        return f"{config.concurrency} under way"
    if figures.rate is None:
        return f"trace at {config.speed:g} times its speed"
    return f"{figures.rate:g} requests/s, {config.arrival}"


def throughput_lines(figures: Figures) -> list[str]:
    """Throughput, drafts and errors."""
    cached = "" if figures.cached_share is None else f" ({figures.cached_share:.1%} cached)"
    goodput = "" if figures.goodput is None else f", {figures.goodput:,.2f} within the SLO (goodput)"
    good = "" if figures.good_share is None else f", {figures.good_share:.1%} good"
    return [
        f"{figures.num_completed:g} of {figures.num_requests:g} requests in {figures.seconds:.2f} s{good}",
        f"requests/s: {figures.requests_per_second:,.2f}{goodput}",
        f"tokens/s: {figures.input_tokens_per_second:,.1f} in{cached}, {figures.output_tokens_per_second:,.1f} out",
        *([] if figures.drafts is None else [str(figures.drafts)]),
        *(f"{count:g} failed: {kind} {figures.details.get(kind, '')[:200]}" for kind, count in figures.errors.items()),
    ]


def _generator_line(figures: Figures) -> str:
    """What the generator took."""
    late = 0.0 if figures.late_ms is None else figures.late_ms.max
    return (
        f"generator: {figures.cpu_us_per_request:.0f} µs of CPU a request, {figures.cpu_share:.1%} of a core, "
        f"sent at most {late:.1f} ms late"
    )


def rates_table(results: Sequence[Figures]) -> Table:
    """Several rates side by side."""
    columns = ("sent/s", "done/s", "good/s", "good %", "TTFT p50", "p99", "ITL p50", "p99", "tokens /s", "errors")
    made = table("", *columns, names=False)
    made.pad_edge, made.collapse_padding = False, True  # fits 80 characters
    for figures in results:
        ttft, itl = figures.ttft_ms, figures.itl_ms
        made.add_row(
            f"{figures.rate:g}",
            f"{figures.requests_per_second:,.2f}",
            "–" if figures.goodput is None else f"{figures.goodput:,.2f}",
            "–" if figures.good_share is None else f"{figures.good_share * 100:.1f}",
            *(_short(part) for of in (ttft, itl) for part in ((of.p50, of.p99) if of else (None, None))),
            _short(figures.output_tokens_per_second),
            f"{sum(figures.errors.values()):g}",
        )
    return made


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def plot_rates(path: Path, results: Sequence[Figures], highest: HighestRate | None = None) -> None:
    """Latencies, throughput and goodput over the rate asked for, as a picture of the kind that the name says.

    Above them, with an SLO, the share of good requests, and what a search found.
    """
    pyplot = load_pyplot()
    rates = [result.rate for result in results]
    rows = [["ttft", "itl"], ["tokens", "requests"]]
    if any(result.good_share is not None for result in results):
        rows.insert(0, ["good", "good"])
    figure, axes = pyplot.subplot_mosaic(rows, figsize=(11, 3.75 * len(rows)), sharex=True, layout="constrained")
    if "good" in axes:
        _plot_good(axes["good"], rates, [result.good_share for result in results], highest)
    plot_percentiles(axes["ttft"], "time to first token, ms", rates, [result.ttft_ms for result in results])
    plot_percentiles(axes["itl"], "inter-token latency, ms", rates, [result.itl_ms for result in results])
    tokens, requests = axes["tokens"], axes["requests"]
    tokens.plot(rates, [result.input_tokens_per_second for result in results], marker="o", label="input")
    tokens.plot(rates, [result.output_tokens_per_second for result in results], marker="o", label="output")
    tokens.set(title="tokens/s", xlabel="requests/s sent", ylim=(0, None))
    requests.plot(rates, rates, color="grey", linestyle="dotted", label="sent")
    requests.plot(rates, [result.requests_per_second for result in results], marker="o", label="completed")
    if any(result.goodput is not None for result in results):
        requests.plot(rates, [result.goodput for result in results], marker="o", label="within the SLO (goodput)")
    requests.set(title="requests/s", xlabel="requests/s sent", ylim=(0, None))
    for axis in axes.values():
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _plot_good(axis: Any, rates: Sequence[Any], shares: Sequence[float | None], highest: HighestRate | None) -> None:
    """The share of good requests, the share asked for, and the rate found."""
    percent = [float("nan") if share is None else share * 100 for share in shares]
    axis.plot(rates, percent, marker="o", label="good requests")
    axis.set(title="good requests", ylabel="%", xlabel="requests/s sent", ylim=(-4, 104))
    axis.tick_params(labelbottom=True)
    if highest is None:
        return
    axis.set(title=headline(highest))
    axis.axhline(highest.good * 100, color="grey", linestyle="dashed", label=f"{_asked(highest)} asked for")
    if highest.rate is not None:
        axis.axvline(highest.rate, color="tab:green", label=f"{highest.rate:g} requests/s")


def plot_percentiles(axis: Any, title: str, rates: Sequence[Any], latencies: Sequence[Distribution | None]) -> None:
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
