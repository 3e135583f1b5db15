"""From the start of a process to its first token: an `LLM` in one process, and `serve` over HTTP, in turns.

    python benchmarks/first_token.py [--model smollm2-135m] [--rounds 5] [--json FILE] [-- OPTIONS OF serve ...]

Both sides load the same model and answer the same prompt, so that a change of the machine's speed hits both. Seconds
are from the start of the process to the first token that its caller reads; CPU seconds are those of all its processes,
up to their end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

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
        print(output.text, flush=True)
"""


@dataclass(frozen=True)
class Start:
    """One start. Seconds."""

    first_token: float
    cpu: float


def llm(options: Sequence[str]) -> Start:
    return _measure([sys.executable, "-c", LLM, *options], lambda out: out.readline())


def serve(options: Sequence[str]) -> Start:
    return _measure([sys.executable, "-m", "mini_sglang", "serve", "--port", "0", *options], _ask)


def _measure(command: Sequence[str], read_token: Callable[[IO[str]], str]) -> Start:
    """Run a command until it has been read a token from. Raises RuntimeError if there is none."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if not read_token(process.stdout):
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


def _ask(out: IO[str]) -> str:
    """The first event of a streamed answer of the server that has just said its address."""
    address = out.readline().rpartition("//")[2].strip()
    connection = http.client.HTTPConnection(address)
    body = json.dumps({"prompt": PROMPT, "temperature": 0, "max_tokens": 1, "stream": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection.getresponse().readline().decode()


SIDES = {"LLM": llm, "serve": serve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("options", nargs="*", help="of the engine, after --")
    args = parser.parse_args()
    starts: dict[str, list[Start]] = {side: [] for side in SIDES}
    for start in SIDES.values():  # once unmeasured: compiled modules and kernels, the file cache
        start(args.options)
    for _ in range(args.rounds):
        for side, start in SIDES.items():
            starts[side].append(start(args.options))
            print(f"{side:6} {starts[side][-1].first_token:6.2f} s, CPU {starts[side][-1].cpu:6.2f} s")
    ratios = [serve.first_token / llm.first_token for llm, serve in zip(*starts.values(), strict=True)]
    for side, of_side in starts.items():
        first, cpu = (statistics.median(getattr(start, name) for start in of_side) for name in ("first_token", "cpu"))
        print(f"{side}: first token after {first:.2f} s, CPU {cpu:.2f} s (medians of {args.rounds})")
    print(f"serve takes {statistics.median(ratios):.2f} times as long (median of pairs)")
    if args.json is not None:
        args.json.write_text(json.dumps({side: [asdict(start) for start in found] for side, found in starts.items()}))


if __name__ == "__main__":
    main()
