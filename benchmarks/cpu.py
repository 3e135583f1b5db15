"""The CPU set: every script behind a figure about CPUs, one after the other, and its table in docs/performance.md.

    python -m benchmarks.cpu                                       # what `make bench` runs
    python -m benchmarks.cpu --only transformers,accuracy
    python -m benchmarks.cpu --llama-server PATH --vllm PATH       # with these peers

Each script runs in a process of its own. Its figures go to benchmarks/results with the machine, the versions and the
day; tables.py makes the tables from there. A benchmark whose packages are missing is left out, and said so.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import tables

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder, by its module's name, with its arguments."""

    name: str
    words: tuple[str, ...]
    packages: tuple[str, ...] = ()  # what the script imports that may not be installed

    @property
    def missing(self) -> list[str]:
        return [package for package in self.packages if importlib.util.find_spec(package) is None]

    @property
    def results(self) -> Path:
        return tables.RESULTS / f"cpu-{self.name}.json"

    def run(self) -> None:
        """Measure, and keep the figures. Raises CalledProcessError if the script fails."""
        script, *arguments = self.words
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "figures.json"
            command = [sys.executable, "-m", f"benchmarks.{script}", *arguments, "--json", str(out)]
            subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
            figures = json.loads(out.read_text())
        said = " ".join(Path(word).name if "/" in word else word for word in self.words)
        run = {**provenance(), "command": f"python -m benchmarks.{said}", "figures": figures}
        self.results.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n")


def provenance() -> dict[str, Any]:
    """Machine, versions and day."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = cpus[0].partition(": ")[2] if cpus else "CPU"
    return {
        "machine": f"{name}, {len(os.sched_getaffinity(0))} cores",
        "versions": {package: metadata.version(package) for package in ("torch", "transformers")},
        "date": datetime.date.today().isoformat(),
    }


def benchmarks(
    llama_server: str | None = None, vllm: str | None = None, libraries: str | None = None
) -> list[Benchmark]:
    peers = {"llama.cpp": llama_server, "vllm": vllm}
    server = () if llama_server is None else ("--llama-server", llama_server)
    return [
        *([Benchmark("peers", ("cpu_vs_peers", "--peers", libraries, *server))] if libraries else []),
        Benchmark("loading", ("first_token", "--large", *server), ("gguf",)),
        Benchmark("transformers", ("cpu_vs_transformers",)),
        Benchmark("accuracy", ("load_generator_accuracy",), ("aiohttp",)),
        *(
            Benchmark(peer, ("serving_vs_peers", "--peer", peer, "--command", program), ("aiohttp",))
            for peer, program in peers.items()
            if program is not None
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="comma-separated names")
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server, to be measured against")
    parser.add_argument("--vllm", metavar="PATH", help="the Python that has vLLM's CPU build, to be measured against")
    parser.add_argument("--libraries", metavar="PATH", help="the Python that has llama-cpp-python and openvino-genai")
    args = parser.parse_args()
    found = {benchmark.name: benchmark for benchmark in benchmarks(args.llama_server, args.vllm, args.libraries)}
    for name in args.only.split(",") if args.only else found:
        if name not in found:
            parser.error(f"--only knows {', '.join(found)} (peers need their option), got {name!r}")
        if missing := found[name].missing:
            print(f"{name}: left out, since {' and '.join(missing)} is not installed")
            continue
        found[name].run()
        tables.write()
        print(f"{name}: {tables.DOCUMENT.relative_to(ROOT)} is up to date")


if __name__ == "__main__":
    main()
