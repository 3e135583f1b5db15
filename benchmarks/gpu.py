"""All that is claimed of one GPU, measured by one script: figures, the targets they are held to, and a JSON file.

    python benchmarks/gpu.py [--only offline,single,...] [--shapes qwen3-0.6b,qwen3-8b] [--json FILE]
    python benchmarks/gpu.py --show FILE

Each section adds its figures to the JSON as soon as it has them, beside what earlier calls left there, so the whole can
be measured piece by piece. Models are random weights of the shapes in benchmarks/shapes. `--show` measures nothing and
prints what the file holds; `python -m benchmarks.tables` puts what readers ask for into docs/performance.md.

    offline        256 sequences at once, better of two after a warm-up; profile and idle share of the device
    single         one stream, 964 tokens in and 724 out, better of two after a warm-up
    quantised      both in bfloat16, FP8 and 4 bits, in turns; with --shapes qwen3-30b-a3b, a mixture of experts
    speculation    what verifying drafts costs, and offline with drafts that are seldom right
    host           the host's time per decode step with 16 and with 256 running requests
    kernels        attention, products and small kernels alone, in CUDA graphs, at page sizes 16 and 64
    start          from the start of a process to its first token, with an empty Triton cache and with a full one
    deterministic  bitwise equality, and the offline workload in deterministic mode
    parity         the engine against transformers
    quantised_parity  likewise, with weights in FP8 and 4 bits
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mini_sglang.bench import report
from mini_sglang.bench.hardware import describe, measure_ceilings
from mini_sglang.bench.host_time import host_time
from mini_sglang.bench.kernels import measure_kernels
from mini_sglang.bench.latency import measure_latency
from mini_sglang.bench.offline import Workload, measure_offline
from mini_sglang.bench.roofline import Ceilings
from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.scheduling.speculation import Proposer
from mini_sglang.weights.hub import resolve_model
from mini_sglang.weights.model_config import load_model_config

ROOT = Path(__file__).parents[1]
SMALL, LARGE = "qwen3-0.6b", "qwen3-8b"
OFFLINE = Workload.random(256)
SINGLE = Workload.streams(1, 964, 724)
CONTEXT = 2112  # as much as either workload needs
PAGE_SIZES = (16, 64)
PROFILED_STEPS = 20
QUANTIZATIONS = ("none", "fp8", "fp8-block", "w4a16")
DEVICE = torch.device("cuda")
FIRST_TOKEN = """
import sys
from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.sampling_params import SamplingParams
engine = Engine(EngineConfig(model=sys.argv[1], load_format="dummy"))
engine.add_request("first", [1, 2, 3], SamplingParams(max_tokens=1))
while not engine.step():
    pass
print("first token", flush=True)
"""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What a section needs: which shapes, what the hardware reaches, and where to print."""

    shapes: list[str]
    ceilings: Ceilings
    console: Console


def offline(bench: Bench) -> Iterator[Figures]:
    for shape in bench.shapes:
        with engine_of(shape) as engine:
            measured = measure_offline(engine, OFFLINE, runs=2, profile_steps=PROFILED_STEPS)
            traffic = OFFLINE.traffic(engine)
        bench.console.rule(f"offline, {shape}")
        bench.console.print(*report.offline_tables(measured, traffic, bench.ceilings))
        floor = traffic.floor_seconds(bench.ceilings)
        yield {
            "offline_tok_s": {shape: measured.best.tokens_per_second},
            "offline_of_floor": {shape: floor / measured.best.seconds},
            "device_idle_share": {shape: measured.idle_share},
            "device_waits_for_host_share": {shape: measured.host_gap_share},
            "profiles": {shape: [asdict(profile) for profile in measured.profiles]},
        }


def single(bench: Bench) -> Iterator[Figures]:
    for shape in bench.shapes:
        with engine_of(shape) as engine:
            streams = measure_latency(engine, SINGLE, runs=2)
            traffic = SINGLE.traffic(engine)
        bench.console.rule(f"one stream, {shape}")
        bench.console.print(*report.latency_tables(streams, traffic, bench.ceilings))
        best = max(streams, key=lambda run: run.tokens_per_second)
        yield {
            "single_tok_s": {shape: best.tokens_per_second},
            "single_of_floor": {shape: traffic.floor_seconds(bench.ceilings) / best.seconds},
            "single_latency": {shape: asdict(best)},
        }


def quantised(bench: Bench) -> Iterator[Figures]:
    for shape in bench.shapes:
        for kind in QUANTIZATIONS:
            with engine_of(shape, quantization=kind) as engine:
                streams = measure_latency(engine, SINGLE, runs=2)
                measured = measure_offline(engine, OFFLINE, runs=2, profile_steps=PROFILED_STEPS)
                traffic, of_one = OFFLINE.traffic(engine), SINGLE.traffic(engine)
            bench.console.rule(f"{kind}, {shape}")
            bench.console.print(*report.latency_tables(streams, of_one, bench.ceilings))
            bench.console.print(*report.offline_tables(measured, traffic, bench.ceilings))
            stream = max(streams, key=lambda run: run.tokens_per_second)
            figures = {
                "offline_tok_s": measured.best.tokens_per_second,
                "offline_of_floor": traffic.floor_seconds(bench.ceilings) / measured.best.seconds,
                "single_tok_s": stream.tokens_per_second,
                "single_of_floor": of_one.floor_seconds(bench.ceilings) / stream.seconds,
            }
            yield {"quantised": {name: {shape: {kind: value}} for name, value in figures.items()}}


def host(bench: Bench) -> Iterator[Figures]:
    with engine_of(SMALL) as engine:
        times = [host_time(engine, running) for running in (16, 256)]
    bench.console.print(report.host_table(times))
    yield {
        "host_us_per_step": {str(time.running): time.total_us for time in times},
        "host_parts": {str(time.running): asdict(time) for time in times},
    }


def kernels(bench: Bench) -> Iterator[Figures]:
    for shape in bench.shapes:
        model = load_model_config(resolve_model(str(folder_of(shape)), weights_needed=False))
        for page_size in PAGE_SIZES:
            groups = ["decode", "prefill", *(["linear", "small"] if page_size == PAGE_SIZES[0] else [])]
            times = measure_kernels(model, bench.ceilings, groups=groups, page_size=page_size, dtype=torch.bfloat16)
            bench.console.rule(f"kernels, {shape}, page size {page_size}")
            bench.console.print(report.kernel_table(times, bench.ceilings))
            decode = {f"{time.shape}, page {page_size}": time.of_ceiling for time in times if time.group == "decode"}
            prefill = {f"{time.shape}, page {page_size}": time.of_cudnn for time in times if "prefill" in time.kernel}
            yield {
                "decode_attention_fraction": {shape: decode},
                "prefill_attention_fraction": {shape: prefill},
                "kernels": {shape: {f"page {page_size}": [asdict(time) for time in times]}},
            }


def start(bench: Bench) -> Iterator[Figures]:
    for shape in bench.shapes:
        with tempfile.TemporaryDirectory() as cache:
            seconds = {state: seconds_to_first_token(shape, Path(cache)) for state in ("cold", "warm")}
        bench.console.print(f"first token, {shape}: {seconds['cold']:.1f} s cold, {seconds['warm']:.1f} s warm")
        yield {"start_s": {shape: seconds}}


def deterministic(bench: Bench) -> Iterator[Figures]:
    figures = importlib.import_module("gpu_deterministic").deterministic()
    bench.console.print("deterministic", figures)
    yield {"deterministic_equal": figures["deterministic_equal"], "deterministic": figures}
    with engine_of(LARGE, deterministic=True) as engine:
        best = measure_offline(engine, OFFLINE, runs=2).best
    bench.console.print(f"deterministic, offline, {LARGE}: {best.tokens_per_second:,.0f} tok/s")
    yield {"deterministic_tok_s": best.tokens_per_second}


def speculation(bench: Bench) -> Iterator[Figures]:
    module = importlib.import_module("gpu_speculation")
    figures: Figures = {}
    for gate in (False, True):
        replay = module.Replay()
        fields = {"speculative": "ngram", "speculative_tokens": 16, "speculative_gate": gate, "deterministic": gate}
        with engine_of(LARGE, proposer=replay, **fields) as engine:
            figures["gated, deterministic" if gate else "whole drafts"] = module.measure(engine, replay)
    bench.console.print("speculation, replayed", figures)
    yield {"speculation": {"replay": {LARGE: figures}}}
    offline = {}
    for kind in ("none", "ngram"):
        with engine_of(LARGE, speculative=kind) as engine:
            offline[kind] = measure_offline(engine, OFFLINE, runs=2).best.tokens_per_second
    bench.console.print("speculation, offline, tok/s", offline)
    yield {"speculation": {"offline_tok_s": {LARGE: offline}}}


def parity(bench: Bench) -> Iterator[Figures]:
    figures = importlib.import_module("gpu_parity").parity()
    bench.console.print("parity", figures)
    yield {"parity": figures}


def quantised_parity(bench: Bench) -> Iterator[Figures]:
    figures = importlib.import_module("gpu_parity").quantised_parity()
    bench.console.print("parity of quantised weights", figures)
    yield {"quantised_parity": figures}


_ALL = (host, single, quantised, speculation, kernels, offline, start, deterministic, parity, quantised_parity)
SECTIONS: dict[str, Callable[[Bench], Iterator[Figures]]] = {section.__name__: section for section in _ALL}


@dataclass(frozen=True)
class Target:
    """One line of what is promised; `value` finds it in the figures, None where it was not measured."""

    name: str
    value: Callable[[Figures], float | None]
    bound: float
    at_least: bool = True  # else at most

    def met(self, figures: Figures) -> bool | None:
        value = self.value(figures)
        if value is None:
            return None
        return value >= self.bound if self.at_least else value <= self.bound


def targets() -> list[Target]:
    """What is promised of an H100 in bfloat16; a card with faster memory is held to the shares."""
    made = [
        Target(
            "parity holds, nothing left out", lambda f: both(at(f, "parity", "holds"), at(f, "parity", "complete")), 1
        )
    ]
    for shape, tok_s, share, stream, stream_share in (
        (SMALL, 20_500, 0.80, 1_000, 0.45),
        (LARGE, 8_200, 0.84, 160, 0.82),
    ):
        made += [
            Target(f"offline {shape}, tok/s", getter("offline_tok_s", shape), tok_s),
            Target(f"offline {shape}, of the floor", getter("offline_of_floor", shape), share),
            Target(f"one stream {shape}, tok/s", getter("single_tok_s", shape), stream),
            Target(f"one stream {shape}, of the floor", getter("single_of_floor", shape), stream_share),
            Target(f"device idle, offline {shape}", getter("device_idle_share", shape), 0.03, at_least=False),
            Target(f"first token {shape}, cold caches, s", getter("start_s", shape, "cold"), 10, at_least=False),
            Target(f"first token {shape}, warm caches, s", getter("start_s", shape, "warm"), 10, at_least=False),
        ]
        for page_size in PAGE_SIZES:
            for rows, share in (("256 x 100-2000", 0.88), ("64 x 100-2000", 0.75), ("8 x 8000", 0.75)):
                key = f"{rows}, page {page_size}"
                value = getter("decode_attention_fraction", shape, key)
                made.append(Target(f"decode attention {shape}, {key}, of copy", value, share))
            key = f"8192 tokens, page {page_size}"
            value = getter("prefill_attention_fraction", shape, key)
            made.append(Target(f"prefill attention {shape}, {key}, of cuDNN", value, 0.65))
    many, few = getter("host_us_per_step", "256"), getter("host_us_per_step", "16")
    return [
        *made,
        Target("host at 256 requests, µs a step", many, 400, at_least=False),
        Target("host at 256 over 16 requests", lambda f: ratio(many(f), few(f)), 1.5, at_least=False),
        Target("deterministic: bitwise equal", getter("deterministic_equal"), 1),
        Target(
            f"deterministic {LARGE}, of normal speed",
            lambda f: ratio(at(f, "deterministic_tok_s"), at(f, "offline_tok_s", LARGE)),
            0.8,
        ),
    ]


def at(figures: Figures, *keys: str) -> float | None:
    """The figure below `keys`, or None where there is none."""
    value: Any = figures
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def getter(*keys: str) -> Callable[[Figures], float | None]:
    return lambda figures: at(figures, *keys)


def both(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else min(a, b)


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


@contextmanager
def engine_of(shape: str, *, proposer: Proposer | None = None, **fields: Any) -> Iterator[Engine]:
    """An engine on random weights; its memory is free again when the context is left."""
    config = EngineConfig(model=str(folder_of(shape)), load_format="dummy", context_length=CONTEXT, **fields)
    engine = Engine(config, proposer=proposer)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def folder_of(shape: str) -> Path:
    return ROOT / "benchmarks" / "shapes" / shape


def seconds_to_first_token(shape: str, triton_cache: Path) -> float:
    """From the start of a process to the first token of an engine with default settings on random weights."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(triton_cache)}
    begin = time.perf_counter()
    command = [sys.executable, "-c", FIRST_TOKEN, str(folder_of(shape))]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
    if line != "first token\n" or process.returncode != 0:
        raise RuntimeError(f"no first token from {shape}: exit status {process.returncode}, output {line!r}")
    return seconds


def merged(old: Figures, new: Figures) -> Figures:
    """`old` with what is new, dictionary by dictionary."""
    both = {**old, **new}
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            both[key] = merged(old[key], value)
    return both


class NotingFigures(dict[str, Any]):
    """Figures that note which of them are read."""

    def __init__(self, figures: Figures) -> None:
        super().__init__(figures)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def day_of(target: Target, figures: Figures) -> str:
    """When the oldest of the figures that `target` reads was measured, as far as that is known."""
    noting = NotingFigures(figures)
    target.value(noting)
    measured = figures.get("measured", {})
    return min((measured[key] for key in noting.read if key in measured), default="")


def target_table(figures: Figures, promised: list[Target]) -> Table:
    """Every promise beside its figure, and the figure's day, which need not be the last call's."""
    table = Table(title=f"{figures.get('card', 'no card')}, {figures.get('date', 'no date')}", title_justify="left")
    table.add_column("what")
    for column in ("measured", "target", "", "on"):
        table.add_column(column, justify="right")
    for target in promised:
        value, met = target.value(figures), target.met(figures)
        shown = "not measured" if value is None else f"{value:,.3f}" if abs(value) < 10 else f"{value:,.0f}"
        table.add_row(
            target.name,
            shown,
            f"{'>=' if target.at_least else '<='} {target.bound:,g}",
            {True: "met", False: "MISSED", None: ""}[met],
            day_of(target, figures),
        )
    return table


def figures_of(card: str) -> Path:
    """Where the figures of "NVIDIA H100 80GB HBM3" and of other cards lie: h100.json, ..."""
    return ROOT / "benchmarks" / "results" / f"{card.removeprefix('NVIDIA ').split()[0].lower()}.json"


def measure(sections: list[str], shapes: list[str], path: Path, console: Console) -> Figures:
    """Run the sections and keep the file up to date, figure by figure."""
    figures: Figures = json.loads(path.read_text()) if path.exists() else {}
    bench = Bench(shapes, measure_ceilings(DEVICE, torch.bfloat16), console)
    torch.cuda.empty_cache()
    versions = describe(DEVICE)
    card, date = versions.pop("device"), versions.pop("date")
    about = {"card": card, "versions": versions, "date": date, "ceilings": asdict(bench.ceilings)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in sections:
        for new in SECTIONS[name](bench):
            dated = {"measured": dict.fromkeys(new, date)}
            figures = merged(merged(merged(figures, about), dated), new)
            path.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--shapes", default=f"{SMALL},{LARGE}", help="comma-separated folders of benchmarks/shapes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="by default benchmarks/results/<card>.json")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print what this file holds, measure nothing")
    options = parser.parse_args()
    console = Console(width=120)
    if options.show:
        console.print(target_table(json.loads(options.show.read_text()), targets()))
        return
    sections = options.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"--only takes {', '.join(SECTIONS)}; got {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("these figures need an NVIDIA GPU, and none was found")
    path = options.json or figures_of(torch.cuda.get_device_name())
    console.print(target_table(measure(sections, options.shapes.split(","), path, console), targets()))


if __name__ == "__main__":
    main()
