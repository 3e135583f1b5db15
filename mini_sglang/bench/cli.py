"""The options of `mini-sglang bench serving | prefix | explain | offline | latency | kernels`, and what each runs.

Measurements are imported when they run: `--help` loads no torch.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from mini_sglang.bench.kernel_time import GROUPS
from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.config import EngineConfig
from mini_sglang.options import FAILED, Commands, add_command, add_fields, add_group, engine_config, from_options

if TYPE_CHECKING:
    from mini_sglang.bench.commands import Output

PROFILE_STEPS = 20
RANDOM_WEIGHTS = {"load_format": "dummy"}  # unless told otherwise


def add_bench(commands: Commands) -> None:
    benches = add_group(commands, "bench", "measure speed and set it against the hardware's ceilings")
    _add_offline(benches)
    _add_latency(benches)
    _add_serving(benches)
    _add_kernels(benches)
    _add_explain(benches)
    _add_prefix(benches)


def _add_offline(benches: Commands) -> None:
    command = add_command(benches, "offline", "throughput of many prompts of random length at once", _offline)
    _add_counts(command, sequences=256, shortest=100, longest=1024, runs=2)
    command.add_argument("--profile", action="store_true", help="add a run that says where the GPU's time goes")
    help = f"steps to profile at the run's start and in its middle (default: {PROFILE_STEPS})"
    command.add_argument("--profile-steps", type=_count, metavar="N", help=help)
    _add_output(command)
    add_fields(command, EngineConfig, "engine", defaults=RANDOM_WEIGHTS)


def _offline(options: argparse.Namespace) -> int:
    config = engine_config(options)
    if options.profile_steps is not None and not options.profile:
        raise ValueError(f"--profile-steps {options.profile_steps} says how long to profile, so it needs --profile")
    from mini_sglang.bench.commands import bench_offline
    from mini_sglang.bench.offline import Workload

    workload = Workload.random(options.sequences, options.longest, options.shortest)
    profile_steps = (options.profile_steps or PROFILE_STEPS) if options.profile else 0
    bench_offline(config, workload, _output(options), runs=options.runs, profile_steps=profile_steps)
    return 0


def _add_latency(benches: Commands) -> None:
    help = "time to the first token and between tokens, one stream or a few"
    command = add_command(benches, "latency", help, _latency)
    _add_counts(command, batch=1, input=964, output=724, runs=2)
    _add_output(command)
    add_fields(command, EngineConfig, "engine", defaults=RANDOM_WEIGHTS)


def _latency(options: argparse.Namespace) -> int:
    config = engine_config(options)
    from mini_sglang.bench.commands import bench_latency
    from mini_sglang.bench.offline import Workload

    workload = Workload.streams(options.batch, options.input, options.output)
    bench_latency(config, workload, _output(options), runs=options.runs)
    return 0


def _add_serving(benches: Commands) -> None:
    command = add_command(benches, "serving", "latencies and throughput of a running server under load", _serving)
    _add_json(command)
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves of a --sweep there (PNG, SVG, PDF)")
    add_fields(command, ServingConfig, "load")


def _serving(options: argparse.Namespace) -> int:
    config = from_options(ServingConfig, options)
    try:
        from mini_sglang.bench.serving import bench_serving
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ValueError("bench serving needs aiohttp: pip install 'mini-sglang[bench]'") from None
    return 0 if bench_serving(config, json_path=options.json, plot_path=options.plot) else FAILED


def _add_kernels(benches: Commands) -> None:
    command = add_command(benches, "kernels", "each GPU kernel alone, for the sizes of a model", _kernels)
    command.add_argument("--only", action="append", choices=GROUPS, help="measure this group; may be repeated")
    _add_output(command)
    fields = {"model", "model_source", "revision", "load_format", "dtype", "page_size"}
    add_fields(command, EngineConfig, "engine", only=fields, defaults=RANDOM_WEIGHTS)


def _kernels(options: argparse.Namespace) -> int:
    config = engine_config(options)
    from mini_sglang.bench.commands import bench_kernels

    bench_kernels(config, _output(options), groups=options.only or GROUPS)
    return 0


def _add_explain(benches: Commands) -> None:
    command = add_command(benches, "explain", "where the time went, from a log that --step-log has written", _explain)
    command.add_argument("file", type=Path, metavar="FILE", help="the log; it may still be growing")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw the time line there, as .svg")
    command.add_argument("--start", type=float, default=0.0, metavar="S", help="second that it begins at (default: 0)")
    command.add_argument("--end", type=float, metavar="S", help="second that it ends at (default: the log's last)")
    _add_json(command)


def _explain(options: argparse.Namespace) -> int:
    from mini_sglang.bench.explain import explain

    explain(options.file, json_path=options.json, plot_path=options.plot, window=(options.start, options.end))
    return 0


def _add_prefix(benches: Commands) -> None:
    help = "the prefix cache on a trace: hits beside the optimum, CPU time"
    command = add_command(benches, "prefix", help, _prefix)
    command.add_argument("trace", type=Path, metavar="TRACE", help="a Mooncake or Qwen-Bailian JSONL, or an Azure CSV")
    command.add_argument("--requests", type=_count, metavar="N", help="only the first N of the trace")
    help = "pool size as a share of the trace's distinct blocks; may be repeated (default: from 1 to 0.02)"
    command.add_argument("--share", action="append", type=_positive, metavar="X", help=help)
    _add_counts(command, cached_tokens=1_000_000, page_size=EngineConfig.page_size)
    _add_json(command)
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw hit rates over pool sizes (needs matplotlib)")


def _prefix(options: argparse.Namespace) -> int:
    from mini_sglang.bench import prefix_report
    from mini_sglang.bench.output import load_pyplot, show
    from mini_sglang.bench.prefix import SHARES, measure_prefix
    from mini_sglang.bench.traces import read_trace

    if options.plot is not None:
        load_pyplot()  # fails before the work, not after it
    report = measure_prefix(
        read_trace(options.trace)[: options.requests],
        shares=options.share or SHARES,
        cached_tokens=options.cached_tokens,
        page_size=options.page_size,
    )
    tables = [prefix_report.hits_table(report), prefix_report.cost_table(report.cost)]
    show(tables, prefix_report.figures(report), options.json)
    if options.plot is not None:
        prefix_report.write_plot(report, options.plot)
    return 0


def _add_output(parser: argparse.ArgumentParser) -> None:
    _add_json(parser)
    for name, what in (("copy-tb-s", "TB/s of a device copy"), ("gemm-tflop-s", "TFLOP/s of a large product")):
        parser.add_argument(f"--{name}", type=_positive, metavar="X", help=f"ceiling: {what} (default: measured)")


def _output(options: argparse.Namespace) -> Output:
    from mini_sglang.bench.commands import Output

    return Output(options.json, options.copy_tb_s, options.gemm_tflop_s)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def _add_counts(parser: argparse.ArgumentParser, **defaults: int) -> None:
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=_count, default=default, metavar="N", help=f"default: {default}")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:  # which not-a-number is not either
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return number
