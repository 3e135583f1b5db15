"""All that is claimed of several GPUs that share a model (`--tp`), measured by one script.

    python -m benchmarks.gpu_parallel [--only offline,single,...] [--tp 2] [--all-reduce nccl] [--json FILE]
    python -m benchmarks.gpu_parallel --rehearse        # a tiny model on a CPU: whether the script itself works

Each part runs in a process of its own and for a limited time: one that fails or hangs does not stop the others. Figures
are printed and added to the JSON file as soon as they are there, beside what earlier calls left in it. Models are
random weights of the shapes in benchmarks/shapes.

    sums           what a sum takes, by size: NCCL and symmetric memory (all_reduce.py)
    offline        the large shape, 256 sequences at once after a warm-up; where the first GPU's time goes
    single         the large shape, one stream, 964 tokens in and 724 out
    shares         a shape that fits one GPU: on one, on all, and on all with every sum through NCCL
    parity         a small model on one GPU and on all: bfloat16 log-probabilities beside transformers', float32 tokens
    deterministic  the bits of logits alone and in batches, on all GPUs; and beside those of one
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig

from benchmarks import gpu, gpu_deterministic, gpu_parity
from benchmarks.gpu import Figures, Target, getter
from mini_sglang.bench import report
from mini_sglang.bench.hardware import describe, measure_ceilings
from mini_sglang.bench.latency import measure_latency
from mini_sglang.bench.offline import Workload, measure_offline
from mini_sglang.bench.roofline import Ceilings
from mini_sglang.engine import Engine
from mini_sglang.sampling_params import SamplingParams

LARGE, MIDDLE, SMALL = "qwen3-32b", "qwen3-8b", "qwen3-0.6b"
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAWN = {
    "greedy": SamplingParams(temperature=0, max_tokens=64, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=1, max_tokens=64, ignore_eos=True),
}
_TRACE_BEFORE_S = 15  # a part that is about to run out of time says where it is


@dataclass(frozen=True)
class Bench:
    """What is measured, on what, and where it is printed. Shapes are folders of benchmarks/shapes, or any others."""

    tp: int
    all_reduce: str
    device: str
    large: str
    middle: str
    small: str
    offline: Workload
    single: Workload
    num_tokens: int  # that are scored
    runs: int  # after a warm-up; the best counts
    ceilings: Ceilings  # of one device
    console: Console

    @property
    def shared(self) -> dict[str, Any]:
        """The settings of an engine on all devices."""
        return {"tp": self.tp, "all_reduce": self.all_reduce}

    def engine(self, shape: str, **fields: Any) -> AbstractContextManager[Engine]:
        dtype = "bfloat16" if self.device == "cuda" else "float32"
        return gpu.engine_of(shape, device=self.device, dtype=dtype, **fields)


def sums(bench: Bench) -> Iterator[Figures]:
    if bench.device != "cuda":
        raise ValueError("sums are timed on GPUs alone")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sums.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={bench.tp}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(gpu.ROOT), os.environ.get("PYTHONPATH", "")])}
        subprocess.run(
            [*command, "benchmarks/all_reduce.py", "--json", str(path)], cwd=gpu.ROOT, env=environment, check=True
        )
        yield {"microseconds": json.loads(path.read_text())}


def offline(bench: Bench) -> Iterator[Figures]:
    with bench.engine(bench.large, **bench.shared) as engine:
        yield offline_figures(bench, engine)


def single(bench: Bench) -> Iterator[Figures]:
    with bench.engine(bench.large, **bench.shared) as engine:
        yield single_figures(bench, engine)


def shares(bench: Bench) -> Iterator[Figures]:
    """`efficiency`: how much faster several are than one, by their number."""
    settings: dict[str, dict[str, Any]] = {"tp 1": {}, f"tp {bench.tp}": bench.shared}
    if bench.device == "cuda":
        settings[f"tp {bench.tp}, NCCL alone"] = {"tp": bench.tp, "all_reduce": "nccl"}
    measured: Figures = {}
    for name, fields in settings.items():
        with bench.engine(bench.middle, **fields) as engine:
            measured[name] = offline_figures(bench, engine)
            yield {name: measured[name]}
            measured[name] |= single_figures(bench, engine)
        of_one = {key: measured[name][key] / measured["tp 1"][key] for key in ("offline_tok_s", "single_tok_s")}
        measured[name]["efficiency"] = {key: gain / fields.get("tp", 1) for key, gain in of_one.items()}
        bench.console.print(f"{name}: efficiency {measured[name]['efficiency']}")
        yield {name: measured[name]}


def parity(bench: Bench) -> Iterator[Figures]:
    torch.set_float32_matmul_precision("highest")  # no TF32 in what is taken as exact
    with random_model(bench) as (model, prompts):
        sequences, decoded = gpu_parity.sample_and_score(model, prompts, bench.device, bench.num_tokens, **bench.shared)
        prefilled = gpu_parity.score_by_prefill(model, sequences, bench.device, **bench.shared)
        by_one = gpu_parity.score_by_prefill(model, sequences, bench.device)
        yield {"tokens": len(decoded), "prefill, all from one": gpu_parity.distances(prefilled, by_one)}
        exact, theirs = gpu_parity.score_by_transformers(model, sequences, bench.device)
        ours = {"decode, all": decoded, "prefill, all": prefilled, "prefill, one": by_one}
        from_exact = {name: gpu_parity.distances(logprobs, exact) for name, logprobs in ours.items()}
        bound = gpu_parity.distances(theirs, exact)
        no_worse = all(distance[key] <= bound[key] for distance in from_exact.values() for key in ("mean", "p99"))
        yield {"bfloat16 from float32": {**from_exact, "transformers": bound}, "no_worse_than_transformers": no_worse}
        one, several = (float32_tokens(bench, model, prompts, **fields) for fields in ({}, bench.shared))
        yield {f"equal_{kind}": one[kind] == several[kind] for kind in one}


def deterministic(bench: Bench) -> Iterator[Figures]:
    """`equal_to_one_rank`: the share of log-probabilities. Few are to be: each rank rounds its part of a sum."""
    if bench.device != "cuda":
        raise ValueError("deterministic mode is of GPUs alone")
    yield gpu_deterministic.deterministic(gpu.folder_of(bench.small), requests=50, **bench.shared)
    with random_model(bench) as (model, prompts):
        sequences, _ = gpu_parity.sample_and_score(model, prompts, bench.device, 200)
        one, several = (
            gpu_parity.score_by_prefill(model, sequences, bench.device, deterministic=True, **fields)
            for fields in ({}, bench.shared)
        )
        yield {"equal_to_one_rank": float((one == several).double().mean())}


PARTS: dict[str, Callable[[Bench], Iterator[Figures]]] = {
    part.__name__: part for part in (sums, offline, single, shares, parity, deterministic)
}


def offline_figures(bench: Bench, engine: Engine) -> Figures:
    steps = gpu.PROFILED_STEPS if bench.device == "cuda" else 0
    measured = measure_offline(engine, bench.offline, runs=bench.runs, profile_steps=steps)
    traffic, ceilings = bench.offline.traffic(engine), bench.ceilings.times(engine.config.tp)
    bench.console.rule(f"offline, {Path(engine.config.model).name}, tp {engine.config.tp}")
    bench.console.print(*report.offline_tables(measured, traffic, ceilings))
    return {
        "offline_tok_s": measured.best.tokens_per_second,
        "offline_of_floor": traffic.floor_seconds(ceilings) / measured.best.seconds,
        "all_reduce_share": {profile.window: profile.all_reduce_share for profile in measured.profiles},
        "offline": asdict(measured),
    }


def single_figures(bench: Bench, engine: Engine) -> Figures:
    """Beside the floor of the whole run there is that of weights alone, all of which each token reads."""
    streams = measure_latency(engine, bench.single, runs=bench.runs)
    traffic, ceilings = bench.single.traffic(engine), bench.ceilings.times(engine.config.tp)
    bench.console.rule(f"one stream, {Path(engine.config.model).name}, tp {engine.config.tp}")
    bench.console.print(*report.latency_tables(streams, traffic, ceilings))
    best = max(streams, key=lambda run: run.tokens_per_second)
    return {
        "single_tok_s": best.tokens_per_second,
        "single_of_floor": traffic.floor_seconds(ceilings) / best.seconds,
        "single_of_weights_alone": traffic.weight_bytes / ceilings.bytes_per_second / best.seconds,
        "single": asdict(best),
    }


@contextmanager
def random_model(bench: Bench) -> Iterator[tuple[str, list[list[int]]]]:
    """A checkpoint of random weights of the small shape, and prompts for it."""
    with tempfile.TemporaryDirectory() as folder:
        gpu_parity.write_random_model(gpu.folder_of(bench.small), Path(folder), bench.device)
        yield folder, gpu_parity.random_prompts(AutoConfig.from_pretrained(folder).vocab_size)


def float32_tokens(bench: Bench, model: str, prompts: list[list[int]], **fields: Any) -> dict[str, list[list[int]]]:
    engine = gpu_parity.make_engine(model, bench.device, dtype="float32", **fields)
    outputs = {kind: gpu_parity.generate(engine, prompts, [how] * len(prompts)) for kind, how in DRAWN.items()}
    engine.close()
    return {kind: gpu_parity.token_ids(output) for kind, output in outputs.items()}


def targets() -> list[Target]:
    """What must hold of any GPUs, and what is asked of two H100s."""
    return [
        Target("greedy float32 tokens as on one", getter("parity", "equal_greedy"), 1),
        Target("seeded float32 tokens as on one", getter("parity", "equal_seeded"), 1),
        Target("log-probs no worse than transformers'", getter("parity", "no_worse_than_transformers"), 1),
        Target("deterministic: bitwise equal", getter("deterministic", "deterministic_equal"), 1),
        Target("one stream, of the weights alone", getter("single", "single_of_weights_alone"), 0.75),
        Target("offline, of the floor", getter("offline", "offline_of_floor"), 0.774),
        Target("offline, tok/s", getter("offline", "offline_tok_s"), 4_700),
    ]


@contextmanager
def bench_of(options: argparse.Namespace) -> Iterator[Bench]:
    device = "cpu" if options.rehearse else "cuda"
    ceilings = measure_ceilings(torch.device(device), torch.float32 if options.rehearse else torch.bfloat16)
    if not options.rehearse:
        torch.cuda.empty_cache()
        shapes = LARGE, MIDDLE, SMALL
        work = gpu.OFFLINE, gpu.SINGLE, 2000
        yield Bench(options.tp, options.all_reduce, device, *shapes, *work, options.runs, ceilings, Console(width=120))
        return
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((gpu.folder_of(SMALL) / "config.json").read_text())
        (Path(folder) / "config.json").write_text(json.dumps(config | TINY))
        short = Workload.random(8, longest=20, shortest=10), Workload.streams(1, 20, 10), 80
        yield Bench(
            options.tp,
            options.all_reduce,
            device,
            folder,
            folder,
            folder,
            *short,
            options.runs,
            ceilings,
            Console(width=120),
        )


def run_here(part: str, options: argparse.Namespace) -> None:
    """Run one part, and keep the file up to date."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s rank 0: %(message)s")
    faulthandler.dump_traceback_later(max(options.limit - _TRACE_BEFORE_S, 1))
    with bench_of(options) as bench:
        versions = describe(torch.device(bench.device))
        about: Figures = {"card": versions.pop("device"), "date": versions.pop("date"), "versions": versions}
        about |= {"tp": bench.tp, "ceilings": asdict(bench.ceilings)}
        for new in PARTS[part](bench):
            if part in ("parity", "deterministic"):
                bench.console.print(part, new)
            add_to(options.json, {**about, part: new})


def run_apart(part: str, options: argparse.Namespace) -> str | None:
    """Run one part in a process of its own, which is ended when its time is up. Returns how it failed, if it did."""
    command = [sys.executable, "-m", "benchmarks.gpu_parallel", *sys.argv[1:]]
    process = subprocess.Popen(
        [*command, "--json", str(options.json.absolute()), "--here", part], cwd=gpu.ROOT, process_group=0
    )
    try:
        status = process.wait(options.limit)
        return None if status == 0 else f"ended with status {status}"
    except subprocess.TimeoutExpired:
        return f"did not end within {options.limit} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has left behind, too
        process.wait()


def figures_in(path: Path) -> Figures:
    return json.loads(path.read_text()) if path.exists() else {}


def add_to(path: Path, new: Figures) -> None:
    path.write_text(json.dumps(gpu.merged(figures_in(path), new), indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--tp", type=int, default=2, help="ranks, each on a GPU of its own")
    parser.add_argument("--all-reduce", choices=("auto", "nccl"), default="auto", help="as of the engine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to this file")
    parser.add_argument("--runs", type=int, default=1, help="after a warm-up; the best counts")
    parser.add_argument("--limit", type=int, default=400, help="seconds that one part may take")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # the part that this process is for
    options = parser.parse_args()
    if options.here:
        run_here(options.here, options)
        return 0
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    if not options.rehearse and torch.cuda.device_count() < options.tp:
        parser.error(f"--tp {options.tp} needs as many NVIDIA GPUs, and {torch.cuda.device_count()} were found")
    with tempfile.TemporaryDirectory() as folder:
        options.json = options.json or Path(folder) / "figures.json"
        failed = {part: how for part in parts if (how := run_apart(part, options)) is not None}
        Console(width=120).print(gpu.target_table(figures_in(options.json), targets()))
    for part, how in failed.items():
        print(f"{part} {how}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
