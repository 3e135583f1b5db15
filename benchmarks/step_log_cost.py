"""What --step-log costs the host in each step: the engine's loop around a model that takes no time, with the log and
without.

    python benchmarks/step_log_cost.py --json FILE

Everything but the device's work is real: scheduler, observer, log file. On a GPU two CUDA events come in addition,
which `mini-sglang bench latency --step-log FILE` shows in earnest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import ScheduledBatch, StepResult

RUNNING = (1, 16, 64, 256)
STEPS = 1500  # of each round
ROUNDS = 5
SHAPE = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


class Instant:
    """A step that has been computed already: every row samples token 5."""

    device_us = None

    def __init__(self, batch: ScheduledBatch) -> None:
        rows = sum(row.samples for row in batch.rows)
        self._result = StepResult([5] * rows, [None] * rows)

    def result(self) -> StepResult:
        return self._result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        engines = {name: make_engine(folder, log) for name, log in (("off", None), ("on", f"{folder}/steps.jsonl"))}
        figures = [measure(engines, running) for running in RUNNING]
        num_steps = engines["on"].stats().num_steps
        for engine in engines.values():
            engine.close()
        bytes_a_step = (Path(folder) / "steps.jsonl").stat().st_size / num_steps
    table = Table(title="Host, µs a decode step without its model", title_justify="left")
    for column in ("running requests", "without log", "with log", "cost of the log", "below 1 % for steps over"):
        table.add_column(column, justify="right")
    for row in figures:
        cost = row["cost_us"]
        table.add_row(
            str(row["running"]), f"{row['off_us']:.1f}", f"{row['on_us']:.1f}", f"{cost:.1f}", f"{cost / 10:.2f} ms"
        )
    table.caption = f"{bytes_a_step:.0f} bytes a step"
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def make_engine(model: str, log: str | None) -> Engine:
    config = EngineConfig(
        model=model, load_format="dummy", device="cpu", dtype="float32", num_pages=16_384, max_running_requests=256,
        step_log=log, num_threads=1, max_prefill_tokens=8192,
    )  # fmt: skip
    engine = Engine(config)
    engine.executor.launch = Instant  # type: ignore[method-assign,assignment]
    return engine


def measure(engines: dict[str, Engine], running: int) -> dict[str, Any]:
    """Medians over rounds that take turns, so that what else the machine does meets both."""
    for engine in engines.values():
        for index in range(running):
            params = SamplingParams(max_tokens=ROUNDS * STEPS, ignore_eos=True)
            engine.add_request(f"chatcmpl-0123456789abcdef-{index}", [1], params)
        engine.step()
        engine.step()
    seen: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            start = time.process_time()
            for _ in range(STEPS // running.bit_length()):
                engine.step()
            seen[name].append((time.process_time() - start) / (STEPS // running.bit_length()) * 1e6)
    for engine in engines.values():
        for index in range(running):
            engine.abort(f"chatcmpl-0123456789abcdef-{index}")
    off, on = (statistics.median(seen[name]) for name in ("off", "on"))
    return {"running": running, "off_us": off, "on_us": on, "cost_us": on - off}


if __name__ == "__main__":
    main()
