"""From the start of a process to its first token: an `LLM` in one process, and servers over HTTP, in turns.

    python -m benchmarks.first_token [--large] [--llama-server PATH] [--rounds 5] [--json FILE] [-- OPTIONS ...]

All sides load the same model and answer the same prompt, so that a change of the machine's speed hits all: `LLM`,
`serve`, and with its path llama.cpp's server. Another process only imports torch. Without options the built-in model is
loaded as it is by default and in float32, with --large also a random model of 470 MB in Q4_0. Seconds are from the
start of the process to the first token that its caller reads; CPU seconds are those of all its processes, up to their
end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks import llama_server
from mini_sglang.weights.hub import resolve_model

PROMPT = "The capital of France is"
LLM = f"""
import dataclasses, sys
from mini_sglang import LLM, SamplingParams
from mini_sglang.options import Parser, add_fields, engine_config
from mini_sglang.config import EngineConfig
parser = Parser()
add_fields(parser, EngineConfig, "engine")
with LLM(**dataclasses.asdict(engine_config(parser.parse_args(sys.argv[1:])))) as llm:
    for output in llm.stream({PROMPT!r}, SamplingParams(temperature=0, max_tokens=1)):
        print(repr(output.text), flush=True)
"""
TORCH = "import torch, time; print('imported', flush=True); time.sleep(60)"
FLOAT32 = ("--dtype", "float32")
TORCH_SIDE, LLM_SIDE, SERVE_SIDE, LLAMA_SIDE = "import torch", "LLM", "serve", "llama.cpp server"
Process = subprocess.Popen[str]


@dataclass(frozen=True)
class Start:
    """One start. Seconds."""

    first_token: float
    cpu: float


Side = Callable[[Sequence[str]], Start]  # of the engine's options


def torch(options: Sequence[str]) -> Start:
    return _measure([sys.executable, "-c", TORCH], _line)


def llm(options: Sequence[str]) -> Start:
    return _measure([sys.executable, "-c", LLM, *options], _line)


def serve(options: Sequence[str]) -> Start:
    return _measure([sys.executable, "-m", "mini_sglang", "serve", "--port", "0", *options], _answer)


def llama(program: str, options: Sequence[str]) -> Start:
    """Of the options it takes the model."""
    model = options[options.index("--model") + 1] if "--model" in options else built_in()
    port = llama_server.free_port()

    def read(process: Process) -> str:
        llama_server.wait(process, port)
        return _first_event(f"{llama_server.HOST}:{port}")

    return _measure(llama_server.command(program, model, port), read)


def _measure(command: Sequence[str], read_token: Callable[[Process], str]) -> Start:
    """Run a command until it has been read a token from. Raises RuntimeError if there is none."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        if not read_token(process):
            raise RuntimeError(f"{' '.join(command)} gave no token")
        seconds = time.perf_counter() - begin
        process.terminate()  # a server needs it; an LLM has said all, and may have ended
    except BaseException:
        process.kill()
        process.wait()
        raise
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return Start(seconds, usage.ru_utime + usage.ru_stime)


def _line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _answer(process: Process) -> str:
    """The first event of a streamed answer of the server that has just said its address."""
    return _first_event(_line(process).rpartition("//")[2].strip())


def _first_event(address: str) -> str:
    connection = http.client.HTTPConnection(address)
    body = json.dumps({"prompt": PROMPT, "temperature": 0, "max_tokens": 1, "stream": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection.getresponse().readline().decode()


def built_in() -> str:
    return str(resolve_model("smollm2-135m").path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="also load a random model of 470 MB")
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server, to be measured against")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("options", nargs="*", help="of the engine, after --")
    args = parser.parse_args()
    sides: dict[str, Side] = {TORCH_SIDE: torch, LLM_SIDE: llm, SERVE_SIDE: serve}
    if args.llama_server is not None:
        sides[LLAMA_SIDE] = partial(llama, args.llama_server)
    with tempfile.TemporaryDirectory() as folder:
        cases = {" ".join(args.options): args.options} if args.options else _cases(Path(folder), args.large)
        found = {case: _in_turns(case, options, sides, args.rounds) for case, options in cases.items()}
    if args.json is not None:
        starts = {
            case: {side: list(map(asdict, of_side)) for side, of_side in row.items()} for case, row in found.items()
        }
        args.json.write_text(json.dumps(starts))


def _cases(folder: Path, large: bool) -> dict[str, Sequence[str]]:
    """Options of the engine, by what they load."""
    files = {"built-in": built_in()}
    if large:
        from benchmarks.random_gguf import write_random_gguf  # the package gguf: only where it is of use

        files["random"] = str(folder / "random.gguf")
        write_random_gguf(Path(files["random"]), resolve_model("smollm2-135m").gguf)
    named = {f"{name}, {Path(file).stat().st_size / 1e6:.0f} MB": ("--model", file) for name, file in files.items()}
    return named | {f"{name}, float32": (*options, *FLOAT32) for name, options in named.items()}


def _in_turns(case: str, options: Sequence[str], sides: Mapping[str, Side], rounds: int) -> dict[str, list[Start]]:
    for start in sides.values():  # once unmeasured: compiled modules and kernels, the file cache
        start(options)
    starts: dict[str, list[Start]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, start in sides.items():
            starts[side].append(start(options))
    for side, of_side in starts.items():
        first, cpu = (statistics.median(getattr(start, name) for start in of_side) for name in ("first_token", "cpu"))
        print(f"{case}, {side}: first token after {first:.2f} s, CPU {cpu:.2f} s (medians of {rounds})", flush=True)
    return starts


if __name__ == "__main__":
    main()
