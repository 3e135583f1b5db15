"""The CPU set: every script behind a figure about CPUs, one after the other, and its table in docs/performance.md.

    python benchmarks/cpu.py                                       # what `make bench` runs
    python benchmarks/cpu.py --only transformers,accuracy
    python benchmarks/cpu.py --llama-server PATH --vllm PATH       # with these peers

Each script runs in a process of its own and leaves its figures in benchmarks/results/; the table made from them takes
the place of what stands between the markers of its name. A benchmark whose peer is not there is left out, and said so.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
Rows = list[list[str]]  # the first one is the head


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder with its arguments, and how its figures become a table."""

    name: str
    words: tuple[str, ...]
    rows: Callable[[Any], Rows]
    packages: tuple[str, ...] = ()  # what is measured too, and need not be installed

    @property
    def missing(self) -> list[str]:
        return [package for package in self.packages if importlib.util.find_spec(package) is None]

    def run(self) -> str:
        """Measure, and return the table with its provenance. Raises CalledProcessError if the script fails."""
        script, *arguments = self.words
        out = RESULTS / f"cpu-{self.name}.json"
        command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments, "--json", str(out)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
        said = " ".join(Path(word).name if "/" in word else word for word in self.words)
        return f"{provenance()}, `python benchmarks/{said}`.\n\n{table(self.rows(json.loads(out.read_text())))}"


def transformers_rows(figures: Mapping[str, Any]) -> Rows:
    """Of cpu_vs_transformers.py."""
    rows = [["Weights", "Workload", "mini_sglang, tok/s", "transformers, tok/s", "ratio"]]
    for weights, workloads in figures["formats"].items():
        for workload, rates in workloads.items():
            if workload != "overhead_ms":
                rows.append([weights, workload, *_sides(rates["ours"], rates["transformers"])])
    return rows


def accuracy_rows(figures: Sequence[Mapping[str, Any]]) -> Rows:
    """Of load_generator_accuracy.py."""
    head = ["Requests/s", "worst error: TTFT", "ITL", "TPOT", "E2E", "CPU a request", "of a core", "late: p50", "p99"]
    rows = [head]
    for result in figures:
        errors = [max(map(abs, result["errors"][f"{name}_ms"].values())) for name in ("ttft", "itl", "tpot", "e2e")]
        late = [f"{result['late_ms'][part]:.1f} ms" for part in ("p50", "p99")]
        cost = [f"{result['cpu_us_per_request']:.0f} µs", f"{result['cpu_share']:.1%}"]
        rows.append([f"{result['rate']:g}", *(f"{error:.2%}" for error in errors), *cost, *late])
    return rows


def peer_rows(figures: Mapping[str, Any]) -> Rows:
    """Of serving_vs_peers.py."""
    rows = [["Workload", "", "mini_sglang", figures["peer"], "ratio"]]
    for workload, by_figure in figures["workloads"].items():
        for name, sides in by_figure.items():
            rows.append([workload, name, *_sides(sides["ours"], sides["peer"])])
    return rows


def _sides(ours: Sequence[float], theirs: Sequence[float]) -> list[str]:
    """Medians of both sides, and of the rounds' ratios."""
    ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    return [f"{statistics.median(ours):.1f}", f"{statistics.median(theirs):.1f}", f"{ratio:.2f}"]


def provenance() -> str:
    """Machine, versions and day."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = cpus[0].partition(": ")[2] if cpus else "CPU"
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("torch", "transformers"))
    return f"{name}, {len(os.sched_getaffinity(0))} cores; {versions}; {datetime.date.today().isoformat()}"


def table(rows: Rows) -> str:
    """Markdown."""
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])


def put(document: str, name: str, text: str) -> str:
    """`document` with `text` between the markers of `name`. Raises ValueError if it has none."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, found, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{DOCUMENT.name} has no place for {name}: it needs {begin.strip()} and {end}")
    return f"{before}{begin}{text}\n{end}{after}"


def benchmarks(llama_server: str | None = None, vllm: str | None = None) -> list[Benchmark]:
    peers = {"llama.cpp": llama_server, "vllm": vllm}
    return [
        Benchmark("transformers", ("cpu_vs_transformers.py",), transformers_rows),
        Benchmark("accuracy", ("load_generator_accuracy.py",), accuracy_rows, ("aiohttp",)),
        *(
            Benchmark(peer, ("serving_vs_peers.py", "--peer", peer, "--command", program), peer_rows, ("aiohttp",))
            for peer, program in peers.items()
            if program is not None
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="comma-separated names")
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server, to be measured against")
    parser.add_argument("--vllm", metavar="PATH", help="the Python that has vLLM's CPU build, to be measured against")
    args = parser.parse_args()
    found = {benchmark.name: benchmark for benchmark in benchmarks(args.llama_server, args.vllm)}
    for name in args.only.split(",") if args.only else found:
        if name not in found:
            parser.error(f"--only knows {', '.join(found)} (peers need their option), got {name!r}")
        if missing := found[name].missing:
            print(f"{name}: left out, since {' and '.join(missing)} is not installed")
            continue
        text = found[name].run()
        DOCUMENT.write_text(put(DOCUMENT.read_text(), name, text))
        print(f"{name}: {DOCUMENT.relative_to(ROOT)} is up to date")


if __name__ == "__main__":
    main()
