"""What `mini-sglang simulate` predicts beside what `bench serving` measures: on a server of this machine, or recorded.

    python benchmarks/simulate_vs_server.py server [--rounds 2] [--json FILE]
    python benchmarks/simulate_vs_server.py recorded STEP_LOG FIGURES [--json FILE]

`server`: two servers with the built-in model and one thread take turns. One computes prompts of all lengths in a step
(--max-step-ms 0), and what steps take is fitted to its log; the other one has default settings and is measured, at half
of what it can do, at that, and beyond. A shared machine is not equally fast all the time, so what predicts a run is
fitted to the turns right before and after it, and what counts is the median over rounds.

`recorded`: STEP_LOG is the log of the server that FIGURES, the JSON of a `bench serving`, was measured on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from mini_sglang.bench.datasets import open_dataset
from mini_sglang.bench.serving import measure
from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.observability.step_log import Header, StepLog, read_lines
from mini_sglang.simulate.commands import Simulator
from mini_sglang.simulate.cost import ReplicaCost, fit_cost
from mini_sglang.simulate.settings import SETTINGS

LOAD: dict[str, Any] = {"input_length": "16:64", "output_length": "8:24", "vocab": "1000:40000", "warmup": 0}
CALIBRATIONS: Sequence[dict[str, Any]] = (
    {"rate": 1.5, "num_requests": 15},
    {"rate": float("inf"), "num_requests": 15},
)
LOADS = {"half": 0.5, "at": 1.0, "beyond": 1.5}  # by name, as shares of what the server can do
CAPACITY_REQUESTS = 60
WITHIN = {"requests/s": 0.05, "TTFT p50, ms": 0.15, "ITL p50, ms": 0.15}
Window = tuple[float, float]  # Unix times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    server = ways.add_parser("server")
    server.add_argument("--rounds", type=int, default=2)
    server.add_argument("--seconds", type=float, default=20.0, help="of arrivals at each load")
    recorded = ways.add_parser("recorded")
    recorded.add_argument("step_log", type=Path)
    recorded.add_argument("figures", type=Path)
    for way in (server, recorded):
        way.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    if args.way == "server":
        found = compare_server(args.rounds, args.seconds)
    else:
        found = compare_recorded(args.step_log, args.figures)
    show(found["loads"])
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def compare_server(rounds: int, seconds: float) -> dict[str, Any]:
    """Predictions and measurements of each load, of each round."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        logs = {"calibrated": folder / "calibrated.jsonl", "measured": folder / "measured.jsonl"}
        with running(logs["calibrated"], "--max-step-ms", "0") as url:
            calibrate(url, 0)
        settings = {name: getattr_of(logs["calibrated"], name) for name in SETTINGS} | {"max_step_ms": 200}
        capacity = predict(
            ServingConfig(**LOAD, rate=float("inf"), num_requests=CAPACITY_REQUESTS),
            fit_cost(logs["calibrated"]).cost.with_settings(settings),
        )["requests/s"]
        loads = {
            name: ServingConfig(**LOAD, rate=round(capacity * share, 2), num_requests=round(capacity * share * seconds))
            for name, share in LOADS.items()
        }
        turns: list[tuple[str, ServingConfig, dict[str, float], Window]] = []
        windows: list[Window] = []
        with (
            running(logs["calibrated"], "--max-step-ms", "0") as calibrated,
            running(logs["measured"]) as measured,
        ):
            windows.append(calibrate(calibrated, 1))
            for number in range(rounds):
                for index, (load, config) in enumerate(loads.items()):  # each with prompts that no cache has
                    config = dataclasses.replace(config, url=measured, seed=1000 * (number + 1) + 100 * index)
                    began = time.time()
                    [[figures]] = asyncio.run(measure(config, open_dataset(config)))
                    turns.append((load, config, summary(dataclasses.asdict(figures)), (began, time.time())))
                    windows.append(calibrate(calibrated, len(windows) + 1))
        settings = {name: getattr_of(logs["measured"], name) for name in SETTINGS}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in LOADS}
        for index, (load, config, figures_of_run, own) in enumerate(turns):
            around = fit_cost(cut(logs["calibrated"], windows[index : index + 2], folder / "cut.jsonl"))
            itself = fit_cost(cut(logs["measured"], [own], folder / "cut.jsonl"))
            found[load].append(
                {
                    "rate": config.rate,
                    "measured": figures_of_run,
                    "predicted": predict(config, around.cost.with_settings(settings)),
                    "predicted from its own log": predict(config, itself.cost),
                    "device_us": [msgspec.to_builtins(fit.cost.device_us) for fit in (around, itself)],
                    "spread": [fit.cost.spread for fit in (around, itself)],
                }
            )
    machine = {"cores": os.cpu_count(), "threads": 1, "busy": os.getloadavg()}
    return {"machine": machine, "capacity": capacity, "loads": found}


def compare_recorded(step_log: Path, figures: Path) -> dict[str, Any]:
    """Predictions and measurements of each rate of a recorded sweep."""
    recorded = json.loads(figures.read_text())
    with tempfile.TemporaryDirectory() as folder:
        path = step_log
        if step_log.suffix == ".gz":
            path = Path(folder) / "steps.jsonl"
            path.write_bytes(gzip.decompress(step_log.read_bytes()))
        fit = fit_cost(path)
    results = {result["rate"]: result for result in recorded["results"]}
    # The whole sweep, as it was measured: the lengths of requests depend on how many could be asked for.
    config = ServingConfig(**{**recorded["config"], "header": (), "sweep": ",".join(map(str, results))})
    predicted, _ = Simulator(config, fit.cost, "round_robin").results(1)
    found = {
        f"{figures.rate:g}/s": [
            {
                "rate": figures.rate,
                "measured": summary(results[figures.rate]),
                "predicted": summary(dataclasses.asdict(figures)),
            }
        ]
        for figures in predicted
        if figures.rate in results
    }
    return {"steps": fit.num_steps, "median_error": fit.median_error, "replica": msgspec.to_builtins(fit.cost),
            "loads": found}  # fmt: skip


def predict(config: ServingConfig, cost: ReplicaCost) -> dict[str, float]:
    [figures], _ = Simulator(config, cost, "round_robin").results(1)
    return summary(dataclasses.asdict(figures))


def summary(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that are compared."""
    named = {"requests/s": figures["requests_per_second"], "tokens/s": figures["output_tokens_per_second"]}
    for name in ("ttft", "itl"):
        for part in ("p50", "p99"):
            named[f"{name.upper()} {part}, ms"] = figures[f"{name}_ms"][part]
    return named


def getattr_of(log: Path, name: str) -> Any:
    """A setting of the engine that wrote a log."""
    header = next(read_lines(log))
    assert isinstance(header, Header)
    return header.config[name]


def calibrate(url: str, seed: int) -> Window:
    """Load the server with what its steps are fitted to; returns when that was."""
    began = time.time()
    for index, how in enumerate(CALIBRATIONS):
        config = ServingConfig(**LOAD, **how, url=url, seed=100_000 * (index + 1) + seed)
        asyncio.run(measure(config, open_dataset(config)))
    return began, time.time()


def cut(log: Path, windows: Sequence[Window], path: Path) -> Path:
    """The part of a log that was written in these windows, in each of which all requests came and ended."""
    lines = read_lines(log)
    header = next(lines)
    assert isinstance(header, Header)
    kept = StepLog(str(path))
    kept.write(header)
    for line in lines:
        if not isinstance(line, Header) and any(a <= header.began + line.at_us / 1e6 <= b for a, b in windows):
            kept.write(line)
    kept.close()
    return path


@contextlib.contextmanager
def running(log: Path, *options: str) -> Iterator[str]:
    """A server with one thread while it runs; its address. Raises RuntimeError if it does not start."""
    command = [sys.executable, "-m", "mini_sglang", "serve", "--port", "0", "--num-threads", "1"]
    command += ["--context-length", "1024", "--no-access-log", "--step-log", str(log), *options]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        log.with_suffix(".txt").open("w+") as said,
        subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=settings) as process,
    ):
        try:
            yield _address(process, log.with_suffix(".txt"))
        finally:
            process.terminate()
            process.wait(30)


def _address(process: subprocess.Popen[bytes], said: Path) -> str:
    """Where the server serves, once it says so."""
    while (found := re.search(r"^Serving .* at (http\S+)$", said.read_text(), re.MULTILINE)) is None:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}: {said.read_text()[-2000:]}")
        time.sleep(0.2)
    return found[1]


def show(loads: dict[str, list[dict[str, Any]]]) -> None:
    """Tables: what was predicted by what was measured, the median over rounds."""
    pairs = next(iter(loads.values()))
    for way in (name for name in pairs[0] if name.startswith("predicted")):
        table = Table(title=f"{way} / measured", title_justify="left")
        for column in ("load", "rate", *pairs[0]["measured"]):
            table.add_column(column, justify="right")
        for load, pairs in loads.items():
            cells: list[str] = []
            for name in pairs[0]["measured"]:
                ratio = statistics.median(pair[way][name] / pair["measured"][name] for pair in pairs)
                mark = " !" if abs(ratio - 1) > WITHIN.get(name, float("inf")) else ""
                cells.append(f"{ratio:.3f}{mark}")
            table.add_row(load, f"{pairs[0]['rate']:g}", *cells)
        Console().print(table)
    Console().print(f"!: not within {', '.join(f'{share:.0%} of {name}' for name, share in WITHIN.items())}")


if __name__ == "__main__":
    main()
