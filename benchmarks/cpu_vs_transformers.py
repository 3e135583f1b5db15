"""This engine against transformers' `generate` on the built-in model, on a CPU: three workloads, three weight formats.

    python benchmarks/cpu_vs_transformers.py [--rounds 5] [--only float32,bfloat16,packed] [--json FILE]

Both sides live in this process and take turns, so that a change of the machine's speed hits both. Every prompt is new
random tokens, the same for both; end tokens are ignored. Rates count generated tokens (prompt tokens for `prefill`)
over the time of the whole call. `packed` multiplies the file's blocks and is compared with transformers in bfloat16,
the fastest that it offers. The engine's own overhead is the time of a step with 16 running requests that is not spent
inside the executor.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from mini_sglang import LLM, SamplingParams
from mini_sglang.engine import Engine
from mini_sglang.scheduling.batch import ScheduledBatch
from mini_sglang.verify import load_reference
from mini_sglang.weights.hub import resolve_model

MODEL = "smollm2-135m"
FORMATS: dict[str, tuple[dict[str, Any], torch.dtype]] = {  # name -> (settings of this engine, transformers' dtype)
    "float32": ({"dtype": "float32"}, torch.float32),
    "bfloat16": ({"dtype": "bfloat16", "weights": "dense"}, torch.bfloat16),
    "packed": ({"weights": "packed"}, torch.bfloat16),
}


@dataclass(frozen=True)
class Workload:
    """`batch` prompts of `prompt` tokens at once, `output` tokens each; the rate counts these or the prompts."""

    name: str
    batch: int
    prompt: int
    output: int
    counts_prompt: bool = False

    @property
    def counted_tokens(self) -> int:
        return self.batch * (self.prompt if self.counts_prompt else self.output)


WORKLOADS = [
    Workload("one stream (32 + 128)", 1, 32, 128),
    Workload("16 at once (32 + 64)", 16, 32, 64),
    Workload("prefill of 512", 1, 512, 1, counts_prompt=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(FORMATS), help="comma-separated formats")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "formats": {}}
    for name in args.only.split(","):
        results["formats"][name] = measure(name, args.rounds)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Alternate both sides over all workloads and print the table of one format."""
    settings, dtype = FORMATS[name]
    reference = load_reference(resolve_model(MODEL)).to(dtype)
    figures: dict[str, Any] = {}
    with LLM(MODEL, **settings) as llm:
        for workload in WORKLOADS:
            sides = {"ours": ours(llm, workload), "transformers": theirs(reference, workload)}
            figures[workload.name] = alternate(sides, workload, rounds)
    figures["overhead_ms"] = overhead_ms(settings)
    print_table(name, figures)
    return figures


Prompts = list[list[int]]


def alternate(sides: dict[str, Callable[[Prompts], None]], workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each side in each round; one warm-up round is not counted."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(rounds + 1):
        rng = random.Random(index)
        prompts = [[rng.randrange(1000, 49000) for _ in range(workload.prompt)] for _ in range(workload.batch)]
        for side, run in sides.items():
            start = time.perf_counter()
            run(prompts)
            if index > 0:
                rates[side].append(workload.counted_tokens / (time.perf_counter() - start))
    return rates


def ours(llm: LLM, workload: Workload) -> Callable[[Prompts], None]:
    params = SamplingParams(temperature=0, max_tokens=workload.output, ignore_eos=True)

    def run(prompts: Prompts) -> None:
        outputs = llm.generate(prompts, params, progress=False)
        if sum(len(output.token_ids) for output in outputs) != workload.batch * workload.output:
            raise RuntimeError("an answer is shorter than asked for")

    return run


def theirs(model: Any, workload: Workload) -> Callable[[Prompts], None]:
    model.generation_config = GenerationConfig()  # greedy, no end token

    def run(prompts: Prompts) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=workload.output
            )
        if output.shape[1] != workload.prompt + workload.output:
            raise RuntimeError("an answer is shorter than asked for")

    return run


def overhead_ms(settings: dict[str, Any], running: int = 16, steps: int = 40) -> float:
    """Median time of an engine step with `running` requests, less what it spent in the executor."""
    with LLM(MODEL, **settings) as llm:
        engine: Engine = llm.engine
        inside = [0.0]
        launch = engine.executor.launch

        def timed(batch: ScheduledBatch) -> Any:
            start = time.perf_counter()
            handle = launch(batch)
            handle.result()
            inside[0] += time.perf_counter() - start
            return handle

        engine.executor.launch = timed  # type: ignore[method-assign]
        rng = random.Random(0)
        params = SamplingParams(temperature=0, max_tokens=steps + 10, ignore_eos=True)
        for index in range(running):
            engine.add_request(str(index), [rng.randrange(1000, 49000) for _ in range(32)], params)
        times = []
        while engine.has_work:
            inside[0], start = 0.0, time.perf_counter()
            outputs = engine.step()
            if len(outputs) == running:
                times.append(time.perf_counter() - start - inside[0])
    return statistics.median(times) * 1e3


def print_table(name: str, figures: dict[str, Any]) -> None:
    table = Table(title=f"{name}: tokens/s, median of alternating rounds")
    for column in ("workload", "mini_sglang", "transformers", "ratio (median of rounds)", "lowest", "highest"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for workload in WORKLOADS:
        rates = figures[workload.name]
        ratios = [mine / other for mine, other in zip(rates["ours"], rates["transformers"], strict=True)]
        table.add_row(
            workload.name,
            f"{statistics.median(rates['ours']):.1f}",
            f"{statistics.median(rates['transformers']):.1f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
        )
    console = Console(width=110)
    console.print(table)
    console.print(f"engine overhead at 16 running requests: {figures['overhead_ms']:.2f} ms a step")


if __name__ == "__main__":
    main()
