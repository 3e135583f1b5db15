"""The command line: `mini-sglang serve | chat | generate | bench | learn | verify | pull`.

Options of the engine and the server are made from the fields of their dataclasses, so names, defaults and help live in
one place. What a command does is imported when it runs: `--help` loads no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import mini_sglang
from mini_sglang.bench.kernel_time import GROUPS
from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.config import EngineConfig, ServerConfig
from mini_sglang.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mini_sglang.bench.commands import Output

FAILED = 1
USER_ERROR = 2
INTERRUPTED = 130
PROFILE_STEPS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for a mistake of the user's, said in one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--shell" in words and words[0].startswith("-"):  # python -m mini_sglang --model PATH --shell
        words = ["chat", *(word for word in words if word != "--shell")]
    options = _build_parser().parse_args(words)
    try:
        if getattr(options, "node_rank", 0) > 0:
            return lend_devices(_engine_config(options))
        return int(options.command(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"mini-sglang: error: {error}", file=sys.stderr)
        return USER_ERROR
    except RuntimeError as error:
        if not _is_of_another_rank(error):
            raise
        print(f"mini-sglang: error: {error}", file=sys.stderr)
        return FAILED


def _is_of_another_rank(error: RuntimeError) -> bool:
    """Whether its message says all: a traceback would only show where this rank was when another one failed."""
    from mini_sglang.parallel.tensor_parallel import CollectiveError, RankError

    return isinstance(error, RankError) and isinstance(error.__cause__, CollectiveError | ValueError | OSError | None)


def serve(options: argparse.Namespace) -> int:
    engine_config, server_config = _engine_config(options), _from_options(ServerConfig, options)
    from mini_sglang.server.run import serve as serve_engine

    return serve_engine(engine_config, server_config)


def lend_devices(config: EngineConfig) -> int:
    """What every command does on the other nodes."""
    from mini_sglang.execution.node import serve_node

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve_node(config)
    return 0


def chat(options: argparse.Namespace) -> int:
    config, params = _engine_config(options), _sampling_params(options)
    from mini_sglang.chat import run_shell
    from mini_sglang.llm import LLM

    with LLM(**dataclasses.asdict(config)) as llm:
        return run_shell(llm, params, system=options.system)


def generate(options: argparse.Namespace) -> int:
    config, params = _engine_config(options), _sampling_params(options)
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    from mini_sglang.llm import LLM

    with LLM(**dataclasses.asdict(config)) as llm:
        for output in llm.stream(prompt, params):
            if not options.json:
                print(output.text_delta, end="", flush=True)
        if options.json:
            print(json.dumps(_as_json(prompt, output), ensure_ascii=False))
        else:
            print()
    if output.error is not None:
        print(f"mini-sglang: error: {output.error}", file=sys.stderr)
        return FAILED
    return 0


def verify(options: argparse.Namespace) -> int:
    config = _engine_config(options)
    from mini_sglang.verify import verify_model

    return 0 if verify_model(config, max_tokens=options.max_tokens) else 1


def bench_offline(options: argparse.Namespace) -> int:
    config = _engine_config(options)
    if options.profile_steps is not None and not options.profile:
        raise ValueError(f"--profile-steps {options.profile_steps} says how long to profile, so it needs --profile")
    from mini_sglang.bench import commands
    from mini_sglang.bench.offline import Workload

    workload = Workload.random(options.sequences, options.longest, options.shortest)
    profile_steps = (options.profile_steps or PROFILE_STEPS) if options.profile else 0
    commands.bench_offline(config, workload, _bench_output(options), runs=options.runs, profile_steps=profile_steps)
    return 0


def bench_latency(options: argparse.Namespace) -> int:
    config = _engine_config(options)
    from mini_sglang.bench import commands
    from mini_sglang.bench.offline import Workload

    workload = Workload.streams(options.batch, options.input, options.output)
    commands.bench_latency(config, workload, _bench_output(options), runs=options.runs)
    return 0


def bench_kernels(options: argparse.Namespace) -> int:
    config = _engine_config(options)
    from mini_sglang.bench import commands

    commands.bench_kernels(config, _bench_output(options), groups=options.only or GROUPS)
    return 0


def bench_explain(options: argparse.Namespace) -> int:
    from mini_sglang.bench.explain import explain

    explain(options.file, json_path=options.json, plot_path=options.plot, window=(options.start, options.end))
    return 0


def bench_serving(options: argparse.Namespace) -> int:
    config = _from_options(ServingConfig, options)
    try:
        from mini_sglang.bench.serving import bench_serving as measure
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ValueError("bench serving needs aiohttp: pip install 'mini-sglang[bench]'") from None
    return 0 if measure(config, json_path=options.json, plot_path=options.plot) else FAILED


def bench_prefix(options: argparse.Namespace) -> int:
    from mini_sglang.bench import prefix_report
    from mini_sglang.bench.prefix import SHARES, measure_prefix
    from mini_sglang.bench.pyplot import load_pyplot
    from mini_sglang.bench.traces import read_trace

    if options.plot is not None:
        load_pyplot()  # fails before the work, not after it
    report = measure_prefix(
        read_trace(options.trace)[: options.requests],
        shares=options.share or SHARES,
        cached_tokens=options.cached_tokens,
        page_size=options.page_size,
    )
    prefix_report.print_tables(report)
    if options.json is not None:
        prefix_report.write_json(report, options.json)
    if options.plot is not None:
        prefix_report.write_plot(report, options.plot)
    return 0


def _bench_output(options: argparse.Namespace) -> Output:
    from mini_sglang.bench.commands import Output

    return Output(options.json, options.copy_tb_s, options.gemm_tflop_s)


def pull(options: argparse.Namespace) -> int:
    config = _engine_config(options)
    from mini_sglang.weights import hub

    print(hub.pull(config.model, source=config.model_source, revision=config.revision).path)
    return 0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message}\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mini-sglang", description="Generate text with a language model, or serve it.")
    parser.add_argument("--version", action="version", version=f"mini-sglang {mini_sglang.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    command = _add_command(commands, serve, "serve a model over HTTP, with OpenAI's API and others")
    _add_fields(command, EngineConfig, "engine")
    _add_fields(command, ServerConfig, "server")

    command = _add_command(commands, chat, "talk to a model in the terminal")
    command.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    _add_sampling(command, max_tokens=None, temperature=0.7)
    _add_fields(command, EngineConfig, "engine", leave_out={"seed"})

    command = _add_command(commands, generate, "continue a prompt")
    command.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    command.add_argument("--json", action="store_true", help="print one JSON object with text, token ids and usage")
    _add_sampling(command, max_tokens=256, temperature=1.0)
    _add_fields(command, EngineConfig, "engine", leave_out={"seed"})

    _add_bench(commands)
    _add_learn(commands)

    command = _add_command(commands, verify, "compare greedy output with transformers, token for token")
    command.add_argument("--max-tokens", type=int, default=20, metavar="N", help="tokens per prompt (default: 20)")
    _add_fields(command, EngineConfig, "engine", leave_out={"dtype", "weights", "device", "load_format"})

    command = _add_command(commands, pull, "fetch a model ahead of time and print where it lies")
    _add_fields(command, EngineConfig, "model", only={"model", "model_source", "revision"})
    return parser


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    """`bench serving | prefix | explain | offline | latency | kernels`, the last three on random weights by default."""
    help = "measure speed and set it against the hardware's ceilings"
    parser = commands.add_parser("bench", help=help, description=help[0].upper() + help[1:] + ".")
    benches = parser.add_subparsers(metavar="WHAT", required=True)
    dummy = {"load_format": "dummy"}

    command = _add_command(benches, bench_offline, "throughput of many prompts of random length at once")
    _add_counts(command, sequences=256, shortest=100, longest=1024, runs=2)
    command.add_argument("--profile", action="store_true", help="add a run that says where the GPU's time goes")
    help = f"steps to profile at the run's start and in its middle (default: {PROFILE_STEPS})"
    command.add_argument("--profile-steps", type=_count, metavar="N", help=help)
    _add_bench_output(command)
    _add_fields(command, EngineConfig, "engine", defaults=dummy)

    command = _add_command(benches, bench_latency, "time to the first token and between tokens, one stream or a few")
    _add_counts(command, batch=1, input=964, output=724, runs=2)
    _add_bench_output(command)
    _add_fields(command, EngineConfig, "engine", defaults=dummy)

    command = _add_command(benches, bench_serving, "latencies and throughput of a running server under load")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves of a --sweep there (PNG, SVG, PDF)")
    _add_fields(command, ServingConfig, "load")

    command = _add_command(benches, bench_kernels, "each GPU kernel alone, for the sizes of a model")
    command.add_argument("--only", action="append", choices=GROUPS, help="measure this group; may be repeated")
    _add_bench_output(command)
    fields = {"model", "model_source", "revision", "load_format", "dtype", "page_size"}
    _add_fields(command, EngineConfig, "engine", only=fields, defaults=dummy)

    command = _add_command(benches, bench_explain, "where the time went, from a log that --step-log has written")
    command.add_argument("file", type=Path, metavar="FILE", help="the log; it may still be growing")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw the time line there, as .svg")
    command.add_argument("--start", type=float, default=0.0, metavar="S", help="second that it begins at (default: 0)")
    command.add_argument("--end", type=float, metavar="S", help="second that it ends at (default: the log's last)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")

    command = _add_command(benches, bench_prefix, "the prefix cache on a trace: hits beside the optimum, CPU time")
    command.add_argument("trace", type=Path, metavar="TRACE", help="a Mooncake or Qwen-Bailian JSONL, or an Azure CSV")
    command.add_argument("--requests", type=_count, metavar="N", help="only the first N of the trace")
    help = "pool size as a share of the trace's distinct blocks; may be repeated (default: from 1 to 0.02)"
    command.add_argument("--share", action="append", type=_positive, metavar="X", help=help)
    _add_counts(command, cached_tokens=1_000_000, page_size=EngineConfig.page_size)
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw hit rates over pool sizes (needs matplotlib)")


def _add_learn(commands: argparse._SubParsersAction[_Parser]) -> None:
    """`learn list | start | check | hint | solution | play`."""
    help = "the course: write parts of the engine yourself, and run it with them"
    parser = commands.add_parser("learn", help=help, description=help[0].upper() + help[1:] + ".")
    actions = parser.add_subparsers(metavar="WHAT", required=True)

    def add(name: str, help: str, run: Callable[[Any, argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = actions.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        command.set_defaults(command=lambda options: _learn(run, options))
        if name != "list":
            command.add_argument("lesson", metavar="LESSON", help="such as L2")
        return command

    def add_folder(command: argparse.ArgumentParser, name: str = "folder") -> None:
        help = "the workspace (default: mini-sglang-course/LESSON)"
        nargs = None if name.startswith("-") else "?"
        command.add_argument(name, metavar="DIR", type=Path, nargs=nargs, help=help)

    command = add("list", "all lessons, and how far you are", lambda learn, o: learn.list_lessons(o.course))
    help = "the folder of the workspaces (default: mini-sglang-course)"
    command.add_argument("course", metavar="DIR", nargs="?", type=Path, default=Path("mini-sglang-course"), help=help)
    add_folder(add("start", "write a workspace", lambda learn, o: learn.start(o.lesson, o.folder)))
    add_folder(add("check", "run the engine with your code", lambda learn, o: learn.check(o.lesson, o.folder)))
    command = add("hint", "help, more each time", lambda learn, o: learn.hint(o.lesson, o.function, o.level, o.folder))
    command.add_argument("function", metavar="FUNCTION", nargs="?", help="default: the first that is not written yet")
    command.add_argument("--level", type=int, choices=(1, 2, 3), help="1 asks, 3 all but tells")
    add_folder(command, "--folder")
    add_folder(add("solution", "the engine's own code, as a diff", lambda learn, o: learn.solution(o.lesson, o.folder)))
    add("play", "watch the lesson's subject move", lambda learn, o: learn.play(o.lesson))


def _learn(run: Callable[[Any, argparse.Namespace], int], options: argparse.Namespace) -> int:
    from mini_sglang.learn import commands

    return run(commands, options)


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


def _add_bench_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    for name, what in (("copy-tb-s", "TB/s of a device copy"), ("gemm-tflop-s", "TFLOP/s of a large product")):
        parser.add_argument(f"--{name}", type=_positive, metavar="X", help=f"ceiling: {what} (default: measured)")


def _add_command(
    commands: argparse._SubParsersAction[_Parser], run: Callable[[argparse.Namespace], int], help: str
) -> argparse.ArgumentParser:
    name = run.__name__.removeprefix("bench_")
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.set_defaults(command=run)
    return parser


def _add_fields(
    parser: argparse.ArgumentParser,
    config_class: type[EngineConfig] | type[ServerConfig] | type[ServingConfig],
    title: str,
    *,
    only: set[str] | None = None,
    leave_out: set[str] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> None:
    """One option for each field of the dataclass; only those given, or named in `defaults`, end up in the namespace."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if field.name in (leave_out or ()) or (only is not None and field.name not in only):
            continue
        default = (defaults or {}).get(field.name, field.default)
        help = field.metadata["help"] + ("" if default in (None, ()) else f" (default: {default})")
        if field.name == "model":
            group.add_argument("model_argument", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=help)
            help = "the same as MODEL"
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=(defaults or {}).get(field.name, argparse.SUPPRESS),
            help=help.replace("%", "%%"),
            **_value_arguments(hints[field.name]),
        )
        if field.name == "run_ahead":
            group.add_argument(
                "--no-overlap", dest="run_ahead", action="store_const", const=0, default=argparse.SUPPRESS,
                help="the same as --run-ahead 0",
            )  # fmt: skip


def _value_arguments(hint: Any) -> dict[str, Any]:
    """What argparse needs to know to read a value of this type.

    It is a Literal, bool, int, float or str, or such or None, or a tuple of strings.
    """
    if isinstance(hint, types.UnionType):
        [hint] = [choice for choice in typing.get_args(hint) if choice is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return {"action": "append", "metavar": "TEXT"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": hint, "metavar": {int: "N", float: "X"}.get(hint, "TEXT")}


def _add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None, temperature: float) -> None:
    group = parser.add_argument_group("sampling")

    def add(name: str, kind: type, default: object, help: str) -> None:
        shown = "" if default is None else f" (default: {default})"
        metavar = "N" if kind is int else "X"
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=help + shown)

    none = SamplingParams()
    add("max-tokens", int, max_tokens, "most tokens to generate")
    add("temperature", float, temperature, "0 is greedy")
    add("top-k", int, none.top_k, "choose among the k likeliest tokens; 0: all")
    add("top-p", float, none.top_p, "choose among the likeliest tokens that together have this probability")
    add("min-p", float, none.min_p, "choose among tokens at least this likely, relative to the likeliest")
    add("repetition-penalty", float, none.repetition_penalty, "above 1: discourage tokens that were used")
    add("presence-penalty", float, none.presence_penalty, "subtracted from tokens that were generated")
    add("frequency-penalty", float, none.frequency_penalty, "subtracted as often as tokens were generated")
    add("seed", int, None, "same seed, same text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def _from_options(config_class: type[Any], options: argparse.Namespace) -> Any:
    """The dataclass, from what was given: fields that are absent from the options, or None, keep their default."""
    given = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(config_class)}
    return config_class(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value is not None
        }
    )


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    if hasattr(options, "model_argument"):
        if hasattr(options, "model"):
            raise ValueError(f"model was given twice: {options.model_argument} and --model {options.model}")
        options.model = options.model_argument
    config: EngineConfig = _from_options(EngineConfig, options)
    return config


def _sampling_params(options: argparse.Namespace) -> SamplingParams:
    params = SamplingParams(
        **{name: getattr(options, name) for name in SamplingParams.__struct_fields__ if hasattr(options, name)}
    )
    params.validate()
    return params


def _as_json(prompt: str, output: mini_sglang.RequestOutput) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "cached_tokens": output.usage.cached_tokens,
        },
    }
