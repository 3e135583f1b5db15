"""Two checkouts of the engine, measured in turns on one machine: is one faster than the other, and where?

    python benchmarks/compare_checkouts.py --other PATH [--model MODEL] [--rows 1,16,64] [--json FILE]

`--other` is a folder that holds the other checkout's `mini_sglang`. Each turn is a process of its own that loads the
model once, lets each number of rows decode together, and then runs the offline workload; A B A B … takes out a machine
that gets slower. It uses public names of the package alone, so that checkouts may differ in everything else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PROMPT = 64  # tokens; decoding begins behind it
SETTLE = 20  # steps after the last prompt that are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, metavar="PATH", help="folder of the other mini_sglang")
    parser.add_argument("--model", default="smollm2-135m", help="a model; a folder without weights gets random ones")
    parser.add_argument("--rows", default="1,16,64", help="rows that decode together, comma-separated")
    parser.add_argument("--steps", type=int, default=200, help="decode steps for each of them")
    parser.add_argument(
        "--offline", type=int, default=0, metavar="N", help="sequences of the offline workload; 0: none"
    )
    parser.add_argument("--turns", type=int, default=3, help="processes of each checkout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        print(json.dumps(measure(args.model, [int(rows) for rows in args.rows.split(",")], args.steps, args.offline)))
        return
    checkouts = {"this": ROOT, "other": args.other.resolve()}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(args.turns):
        for name, folder in checkouts.items():
            figures[name].append(run_turn(folder))
    show(figures)
    if args.json is not None:
        args.json.write_text(json.dumps({"model": args.model, "turns": figures}, indent=1) + "\n")


def run_turn(folder: Path) -> dict[str, float]:
    """One process with `folder`'s package, from the arguments of this one."""
    command = [sys.executable, __file__, *sys.argv[1:], "--turn"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True, cwd=folder).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def measure(model: str, rows: list[int], steps: int, offline: int) -> dict[str, float]:
    """By name: tokens per second, and the host's microseconds per step where it does not compute itself."""
    import mini_sglang  # here, since a turn has a path of its own

    folder = Path(model)
    is_shape = folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    began = time.perf_counter()
    engine = mini_sglang.Engine(
        mini_sglang.EngineConfig(
            model=model,
            load_format="dummy" if is_shape else "auto",
            context_length=2112,
            max_running_requests=max([*rows, min(offline, 256)]),
        )
    )
    figures = {"load, s": time.perf_counter() - began}
    for count in rows:
        host = HostClock(engine)
        figures[f"{count} rows, tok/s"] = decode(mini_sglang, engine, count, steps, host)
        figures[f"{count} rows, host us"] = statistics.median(host.steps) * 1e6 if host.steps else 0.0
    if offline:
        figures["offline, tok/s"] = max(run_offline(mini_sglang, engine, offline, seed) for seed in (1, 2))
    engine.close()
    return figures


class HostClock:
    """Times what the host does for a step: scheduling, launching (on a GPU, where that does not compute), reading."""

    def __init__(self, engine: Any) -> None:
        self.steps: list[float] = []
        self._spent = 0.0
        verbs = [(engine.scheduler, "schedule"), (engine.scheduler, "update")]
        if engine.config.device != "cpu":
            verbs.append((engine.executor, "launch"))
        for owner, verb in verbs:
            setattr(owner, verb, self._timed(getattr(type(owner), verb).__get__(owner)))

    def _timed(self, call: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._spent += time.perf_counter() - start

        return timed

    def step_done(self) -> None:
        self.steps.append(self._spent)
        self.begin()

    def begin(self) -> None:
        self._spent = 0.0


def decode(mini_sglang: Any, engine: Any, rows: int, steps: int, host: HostClock) -> float:
    """Tokens per second of `rows` requests that decode together for `steps` steps."""
    rng = random.Random(rows)
    length = steps + 4 * SETTLE + rows
    params = mini_sglang.SamplingParams(temperature=0.6, max_tokens=min(length, 1900), ignore_eos=True)
    engine.scheduler.expected_output = 0.0
    ids = [f"decode-{index}" for index in range(rows)]
    for request_id in ids:
        prompt = [rng.randrange(1000, 10_000) for _ in range(PROMPT + rng.randrange(16))]
        engine.add_request(request_id, prompt, params)
    settled = 0
    while settled < SETTLE:
        settled = settled + 1 if len(engine.step()) == rows else 0
    host.begin()
    began, tokens = time.perf_counter(), 0
    for _ in range(steps):
        tokens += engine.step().num_tokens
        host.step_done()
    seconds = time.perf_counter() - began
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    engine.flush_cache()
    return tokens / seconds


def run_offline(mini_sglang: Any, engine: Any, sequences: int, seed: int) -> float:
    """Tokens per second of sequences with 100 to 1,024 tokens of prompt and as many of answer, all added at once."""
    rng = random.Random(seed)
    began, tokens = time.perf_counter(), 0
    for index in range(sequences):
        prompt = [rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))]
        params = mini_sglang.SamplingParams(temperature=0.6, max_tokens=rng.randint(100, 1024), ignore_eos=True)
        engine.add_request(f"offline-{index}", prompt, params)
    while engine.has_work:
        tokens += engine.step().num_tokens
    seconds = time.perf_counter() - began
    engine.flush_cache()
    return tokens / seconds


def show(figures: dict[str, list[dict[str, float]]]) -> None:
    """Medians, and the ratio of this checkout's to the other's, turn by turn."""
    table = Table("", "this", "other", "this / other, by turn", "median")
    for name in figures["this"][0]:
        this, other = ([turn[name] for turn in figures[side]] for side in ("this", "other"))
        ratios = [a / b if b else float("nan") for a, b in zip(this, other, strict=True)]
        medians = [f"{statistics.median(values):,.1f}" for values in (this, other)]
        by_turn = " ".join(f"{ratio:.3f}" for ratio in ratios)
        table.add_row(name, *medians, by_turn, f"{statistics.median(ratios):.3f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
