"""How exact `mini-sglang bench serving` is: its percentiles beside those that a scripted server recorded of itself.

The server draws latencies from known distributions, notes when it had read a request and when it wrote each token, and
runs on a core of its own where there are two. Prints, for each rate, both sides' percentiles, the error, the CPU that a
request cost the generator, and how late it sent. Exits with 1 if an error is above 2 %.

    python benchmarks/load_generator_accuracy.py --rates 10,1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from mini_sglang.bench.apis import APIS, Sampling
from mini_sglang.bench.http_client import HttpClient
from mini_sglang.bench.load_generator import Load, LoadGenerator, LoadRequest, arrival_times
from mini_sglang.bench.serving_figures import Distribution, Figures, figures_of

PARTS = ("mean", "p50", "p90", "p95", "p99")
NAMES = {"TTFT, ms": "ttft_ms", "ITL, ms": "itl_ms", "TPOT, ms": "tpot_ms", "E2E, ms": "e2e_ms"}
TOLERANCE = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="10,1000", help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each run")
    parser.add_argument("--tokens", type=int, default=10, help="tokens of each answer")
    parser.add_argument("--ttft-ms", type=float, default=80.0, help="median time to the first token")
    parser.add_argument("--itl-ms", type=float, default=20.0, help="mean time between tokens")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    latencies = ["--ttft-ms", str(args.ttft_ms), "--itl-ms", str(args.itl_ms)]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    results = [measure(float(rate), args.seconds, args.tokens, latencies, cores[-1]) for rate in args.rates.split(",")]
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    worst = max(result["worst_error"] for result in results)
    print(f"largest error of a percentile: {worst:.2%} (at most {TOLERANCE:.0%} wanted)")
    return 0 if worst <= TOLERANCE else 1


def measure(rate: float, seconds: float, tokens: int, latencies: list[str], server_core: int) -> dict[str, Any]:
    """One rate against a fresh server on a core of its own; prints its table."""
    server = Path(__file__).with_name("scripted_server.py")
    with subprocess.Popen([sys.executable, str(server), *latencies], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[-1]
            os.sched_setaffinity(process.pid, (server_core,))
            load, record = asyncio.run(_run(url, rate, max(10, round(rate * seconds)), tokens))
        finally:
            process.kill()
    figures = figures_of(load, rate=rate, slos={})
    recorded = _recorded(record)
    errors = {
        name: {part: getattr(getattr(figures, name), part) / getattr(recorded[name], part) - 1 for part in PARTS}
        for name in NAMES.values()
    }
    _print(figures, recorded, errors)
    return {
        "rate": rate,
        "num_requests": figures.num_requests,
        "failed": figures.errors,
        "errors": errors,
        "worst_error": max(abs(error) for by_part in errors.values() for error in by_part.values()),
        "cpu_us_per_request": figures.cpu_us_per_request,
        "cpu_share": figures.cpu_share,
        "late_ms": msgspec.to_builtins(figures.late_ms),
    }


async def _run(url: str, rate: float, count: int, tokens: int) -> tuple[Load, list[list[float]]]:
    requests = [LoadRequest(lambda: [7] * 64, tokens) for _ in range(count)]
    times = arrival_times(count, rate, "poisson", np.random.default_rng(0)).tolist()
    async with HttpClient(url) as client:
        generator = LoadGenerator(client, APIS["completions"], Sampling(), requests, lambda sent, ended: None)
        load = await generator.at_times(times)
        record: list[list[float]] = msgspec.json.decode((await client.get("/record")).body)
    return load, record


def _recorded(record: list[list[float]]) -> dict[str, Distribution]:
    """What the server says, in ms."""
    seconds = {
        "ttft_ms": [times[1] - times[0] for times in record],
        "itl_ms": [gap for times in record for gap in np.diff(times[1:])],
        "tpot_ms": [(times[-1] - times[1]) / (len(times) - 2) for times in record],
        "e2e_ms": [times[-1] - times[0] for times in record],
    }
    found = {name: Distribution.of(np.asarray(values) * 1e3) for name, values in seconds.items()}
    return {name: distribution for name, distribution in found.items() if distribution is not None}


def _print(figures: Figures, recorded: dict[str, Distribution], errors: dict[str, dict[str, float]]) -> None:
    table = Table()
    for column in ("", *PARTS):
        table.add_column(column, justify="right" if column else "left")
    for title, name in NAMES.items():
        table.add_row(f"{title}, recorded", *(f"{getattr(recorded[name], part):.2f}" for part in PARTS))
        table.add_row("reported", *(f"{getattr(getattr(figures, name), part):.2f}" for part in PARTS))
        table.add_row("error", *(f"{errors[name][part]:+.2%}" for part in PARTS), end_section=True)
    late = figures.late_ms
    assert late is not None
    console = Console()
    console.print(f"{figures.rate:g} requests/s, {figures.num_completed:g} of {figures.num_requests:g} requests")
    console.print(table)
    console.print(
        f"generator: {figures.cpu_us_per_request:.0f} µs of CPU a request, {figures.cpu_share:.1%} of a core; "
        f"sent late by {late.p50:.2f} ms (p50), {late.p99:.2f} ms (p99), {late.max:.2f} ms (most)"
    )


if __name__ == "__main__":
    sys.exit(main())
