"""The command line: `mini-sglang serve | deploy | chat | generate | bench | simulate | learn | verify | pull | …`.

Options of the engine and the server are made from the fields of their dataclasses; other commands add their own.
What a command does is imported when it runs: `--help` loads no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mini_sglang
from mini_sglang.bench.cli import add_bench
from mini_sglang.config import EngineConfig
from mini_sglang.deploy import add_deploy
from mini_sglang.learn.cli import add_learn
from mini_sglang.options import FAILED, USER_ERROR, Parser, add_command, add_fields, engine_config, from_options
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.server.config import ServerConfig
from mini_sglang.simulate.cli import add_simulate

INTERRUPTED = 130
QUANTIZE_TO = {
    "fp8": "8 bits, a scale for each output",
    "fp8-block": "8 bits, a scale for each block of 128 by 128",
    "w4a16": "4 bits, a scale for each 128 inputs",
}
_HUSHED = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for a mistake of the user's, said in one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--shell" in words and words[0].startswith("-"):  # python -m mini_sglang --model PATH --shell
        words = ["chat", *(word for word in words if word != "--shell")]
    options = _build_parser().parse_args(words)
    try:
        if getattr(options, "node_rank", 0) > 0:
            return lend_devices(engine_config(options))
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
    config, server_config = engine_config(options), from_options(ServerConfig, options)
    _hush_libraries()
    from mini_sglang.server.run import serve as serve_engine

    return serve_engine(config, server_config)


def lend_devices(config: EngineConfig) -> int:
    """What every command does on the other nodes."""
    from mini_sglang.execution.node import serve_node

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve_node(config)
    return 0


def chat(options: argparse.Namespace) -> int:
    config, params = engine_config(options), _sampling_params(options)
    _hush_libraries()
    from mini_sglang.chat import run_shell
    from mini_sglang.llm import LLM

    with LLM(**dataclasses.asdict(config)) as llm:
        return run_shell(llm, params, system=options.system)


def generate(options: argparse.Namespace) -> int:
    config, params = engine_config(options), _sampling_params(options)
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    _hush_libraries()
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
    config = engine_config(options)
    from mini_sglang.verify import verify_model

    return 0 if verify_model(config, max_tokens=options.max_tokens) else FAILED


def pull(options: argparse.Namespace) -> int:
    config = engine_config(options)
    from mini_sglang.weights import hub

    print(hub.pull(config.model, source=config.model_source, revision=config.revision).path)
    return 0


def quantize(options: argparse.Namespace) -> int:
    config = engine_config(options)
    from mini_sglang.quantize import quantize_model, show_report
    from mini_sglang.weights import hub

    show_report(quantize_model(hub.find_model(config), Path(options.out), options.to))
    return 0


def _hush_libraries() -> None:
    """Keep warnings of libraries from those who did not write the code, here and in processes that are started.

    Call it before these libraries are imported. What the environment or -W says instead goes first.
    """
    for name, value in _HUSHED.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _build_parser() -> Parser:
    parser = Parser(prog="mini-sglang", description="Generate text with a language model, or serve it.")
    parser.add_argument("--version", action="version", version=f"mini-sglang {mini_sglang.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    command = add_command(commands, "serve", "serve a model over HTTP, with OpenAI's API and others", serve)
    add_fields(command, EngineConfig, "engine")
    add_fields(command, ServerConfig, "server")

    add_deploy(commands)

    command = add_command(commands, "chat", "talk to a model in the terminal", chat)
    command.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    _add_sampling(command, max_tokens=None, temperature=0.7)
    add_fields(command, EngineConfig, "engine", leave_out={"seed"})

    command = add_command(commands, "generate", "continue a prompt", generate)
    command.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    command.add_argument("--json", action="store_true", help="print one JSON object with text, token ids and usage")
    _add_sampling(command, max_tokens=256, temperature=1.0)
    add_fields(command, EngineConfig, "engine", leave_out={"seed"})

    add_bench(commands)
    add_simulate(commands)
    add_learn(commands)

    command = add_command(commands, "verify", "compare greedy output with transformers, token for token", verify)
    command.add_argument("--max-tokens", type=int, default=20, metavar="N", help="tokens per prompt (default: 20)")
    add_fields(command, EngineConfig, "engine", leave_out={"dtype", "weights", "device", "load_format"})

    command = add_command(commands, "pull", "fetch a model ahead of time and print where it lies", pull)
    add_fields(command, EngineConfig, "model", only={"model", "model_source", "revision"})

    help = "write a model with weights of few bits, rounded to nearest, as compressed-tensors that vLLM reads as well"
    command = add_command(commands, "quantize", help, quantize)
    command.add_argument("model", metavar="MODEL", help="folder of unquantised safetensors, or id on the hub")
    command.add_argument("out", metavar="OUT", help="folder to write; must be empty or not exist")
    command.add_argument(
        "--to", required=True, choices=QUANTIZE_TO, help="; ".join(f"{to}: {QUANTIZE_TO[to]}" for to in QUANTIZE_TO)
    )
    add_fields(command, EngineConfig, "where the model is", only={"model_source", "revision"})
    return parser


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
