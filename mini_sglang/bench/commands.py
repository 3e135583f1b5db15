"""`mini-sglang bench`: build what is measured, measure, print tables and write JSON.

The ceilings are measured last, in memory that the engine has given back, unless they are given.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mini_sglang.bench import report
from mini_sglang.bench.hardware import describe, measure_ceilings, torch_dtype
from mini_sglang.bench.latency import measure_latency
from mini_sglang.bench.offline import Workload, measure_offline
from mini_sglang.bench.output import show
from mini_sglang.bench.roofline import Ceilings, Traffic
from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.weights.hub import find_model
from mini_sglang.weights.model_config import load_model_config


@dataclass(frozen=True)
class Output:
    """Where results go, and the ceilings they are set against; what is None is measured."""

    json_path: Path | None = None
    copy_tb_s: float | None = None
    gemm_tflop_s: float | None = None

    def ceilings(self, device: torch.device, dtype: torch.dtype) -> Ceilings:
        copy, gemm = (None if given is None else given * 1e12 for given in (self.copy_tb_s, self.gemm_tflop_s))
        if copy is None or gemm is None:
            measured = measure_ceilings(device, dtype)
            copy, gemm = copy or measured.bytes_per_second, gemm or measured.flops_per_second
        return Ceilings(copy, gemm)


def bench_offline(config: EngineConfig, workload: Workload, output: Output, *, runs: int, profile_steps: int) -> None:
    """Throughput of `workload`, all of it at once. Raises ValueError for a profile without a GPU."""
    if profile_steps and not torch.cuda.is_available():
        raise ValueError("--profile needs an NVIDIA GPU, and none was found")
    start = time.perf_counter()
    engine = Engine(_with_context(config, workload))
    start_s = time.perf_counter() - start
    measured = measure_offline(engine, workload, runs=runs, profile_steps=profile_steps)
    traffic, ceilings = workload.traffic(engine), _release(engine, output)
    figures = {
        "tokens_per_second": measured.best.tokens_per_second,
        "engine_start_s": start_s,
        "idle_share": measured.idle_share,
        "host_gap_share": measured.host_gap_share,
        **vars(measured),
    }
    figures |= _setting(engine.config, traffic, ceilings, measured.best.seconds)
    show(report.offline_tables(measured, traffic, ceilings), figures, output.json_path)


def bench_latency(config: EngineConfig, workload: Workload, output: Output, *, runs: int) -> None:
    """Time to the first token and between tokens of streams that start together."""
    engine = Engine(_with_context(config, workload))
    streams = measure_latency(engine, workload, runs=runs)
    traffic, ceilings = workload.traffic(engine), _release(engine, output)
    best = max(streams, key=lambda run: run.tokens_per_second)
    sizes = {"batch": len(workload.prompts), "input": len(workload.prompts[0]), "output": workload.output_lengths[0]}
    figures = {**sizes, **vars(best), "runs": streams, **_setting(engine.config, traffic, ceilings, best.seconds)}
    show(report.latency_tables(streams, traffic, ceilings), figures, output.json_path)


def bench_kernels(config: EngineConfig, output: Output, *, groups: Sequence[str]) -> None:
    """Each kernel alone, for the sizes of the model. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs an NVIDIA GPU, and none was found")
    from mini_sglang.bench.kernels import measure_kernels  # Triton: only where there is a GPU

    source = find_model(config)
    dtype = torch.bfloat16 if config.dtype == "auto" else torch_dtype(config.dtype)
    ceilings = output.ceilings(torch.device("cuda"), dtype)
    times = measure_kernels(load_model_config(source), ceilings, groups=groups, page_size=config.page_size, dtype=dtype)
    figures = {"kernels": times, "page_size": config.page_size}
    figures |= {"model": config.model, "machine": describe(torch.device("cuda")), "ceilings": ceilings}
    show([report.kernel_table(times, ceilings)], figures, output.json_path)


def _with_context(config: EngineConfig, workload: Workload) -> EngineConfig:
    """`config` with a context just long enough for the workload, where none was given."""
    if config.context_length is not None:
        return config
    lengths = zip(workload.prompts, workload.output_lengths, strict=True)
    return config.replace(context_length=max(len(prompt) + output for prompt, output in lengths))


def _release(engine: Engine, output: Output) -> Ceilings:
    """Close the engine; the memory is then free for measuring the ceilings, those of all its ranks together."""
    engine.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    one_device = output.ceilings(torch.device(engine.config.device), torch_dtype(engine.config.dtype))
    return one_device.times(engine.config.tp)


def _setting(config: EngineConfig, traffic: Traffic, ceilings: Ceilings, seconds: float) -> dict[str, Any]:
    """What the figures of a run of `seconds` are set against."""
    floor = traffic.floor_seconds(ceilings)
    return {
        "floor_s": floor,
        "of_floor": floor / seconds,
        "traffic": traffic,
        "ceilings": ceilings,
        "machine": describe(torch.device(config.device)),
        "config": config,
    }
