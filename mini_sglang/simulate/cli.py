"""The options of `mini-sglang simulate`, and what it runs, which is imported when it does."""

from __future__ import annotations

import argparse
from pathlib import Path

from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.config import EngineConfig
from mini_sglang.options import FAILED, Commands, add_command, add_fields, from_options
from mini_sglang.routing import POLICIES
from mini_sglang.simulate.settings import MOST_REPLICAS, SETTINGS

# Fields of a load that are about talking to a server, or about prompts that are text.
_LEFT_OUT = {
    "url", "api", "model_name", "api_key", "header", "extra_body", "ignore_eos", "temperature", "timeout", "warmup",
    "flush_cache", "turns", "tokenizer",
}  # fmt: skip


def add_simulate(commands: Commands) -> None:
    help = "what replicas of a server would do under a load: the real scheduler and cache, in virtual time"
    command = add_command(commands, "simulate", help, _simulate)
    help = "a Mooncake or Qwen-Bailian JSONL, or an Azure CSV, replayed at its own times unless told otherwise"
    command.add_argument("trace", type=Path, nargs="?", metavar="TRACE", help=help)
    group = command.add_argument_group("fleet")
    add = group.add_argument
    add("--step-log", type=Path, metavar="FILE", help="fit what steps take to this log of a real server's --step-log")
    help = "or to these files of bench latency --json, at least 3 of different --batch and --input; may be repeated"
    add("--latency", type=Path, action="append", metavar="FILE", help=help)
    add("--cost", type=Path, metavar="FILE", help="or read it from this file, which --save-cost has written")
    add("--save-cost", type=Path, metavar="FILE", help="write there what steps take, and the engine's settings")
    add("--replicas", type=_count, default=1, metavar="N", help=f"servers, up to {MOST_REPLICAS} (default: 1)")
    help = "which of them gets a request (default: least_loaded)"
    add("--routing", choices=tuple(POLICIES), default="least_loaded", help=help)
    help = "look for the fewest replicas that keep limits like ttft_p99<500ms,itl_p50<50ms or good>0.95 (of --slo)"
    add("--find-replicas", metavar="LIMITS", help=help.replace("%", "%%"))
    add("--price", type=float, metavar="X", help="of a replica for an hour, in any currency")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the curves of a --sweep or --find-replicas there",
    )
    add_fields(command, EngineConfig, "settings of a replica; those not given are the log's", only=set(SETTINGS))
    add_fields(command, ServingConfig, "load", leave_out=_LEFT_OUT)


def _simulate(options: argparse.Namespace) -> int:
    config = _load(options)
    if sum(given is not None for given in (options.step_log, options.latency, options.cost)) != 1:
        raise ValueError("simulate needs what steps take: give one of --step-log, --latency and --cost")
    if options.price is not None and not options.price > 0:
        raise ValueError(f"price must be above 0, got {options.price:g}")
    try:
        from mini_sglang.simulate.commands import Simulator, find_replicas, simulate
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ValueError("simulate needs aiohttp: pip install 'mini-sglang[bench]'") from None
    from mini_sglang.simulate.cost import fit_cost, fit_latency, load_cost
    from mini_sglang.simulate.target import Target

    if options.cost is not None:
        cost = load_cost(options.cost)
    else:
        fit = fit_cost(options.step_log) if options.latency is None else fit_latency(options.latency)
        cost = fit.cost
        print(f"fitted to {fit.num_steps:,} times of steps: the median one is off by {fit.median_error:.1%}")
    cost = cost.with_settings({name: getattr(options, name) for name in SETTINGS if hasattr(options, name)})
    if options.save_cost is not None:
        cost.save(options.save_cost)
    simulator = Simulator(config, cost, options.routing, options.price)
    if options.find_replicas is not None:
        target = Target.read(options.find_replicas)
        done = find_replicas(simulator, target, json_path=options.json, plot_path=options.plot)
    else:
        done = simulate(simulator, options.replicas, json_path=options.json, plot_path=options.plot)
    return 0 if done else FAILED


def _load(options: argparse.Namespace) -> ServingConfig:
    """The load, which is a replay of the trace if nothing else is said."""
    if options.trace is not None:
        if hasattr(options, "dataset") or hasattr(options, "dataset_path"):
            raise ValueError("TRACE is the data set: it takes no --dataset and no --dataset-path")
        options.dataset, options.dataset_path = "trace", str(options.trace)
        if not any(hasattr(options, name) for name in ("rate", "concurrency", "sweep")):
            options.replay = True
    if getattr(options, "dataset", "random") not in ("random", "trace"):
        raise ValueError(f"simulate takes prompts of token ids: a TRACE or --dataset random, got {options.dataset}")
    config: ServingConfig = from_options(ServingConfig, options)
    return config


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= MOST_REPLICAS:
        raise argparse.ArgumentTypeError(f"must be between 1 and {MOST_REPLICAS}, got {number}")
    return number
