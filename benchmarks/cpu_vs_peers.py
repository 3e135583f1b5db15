"""This engine against llama.cpp and OpenVINO GenAI on one GGUF file, on a CPU, in turns.

    python -m benchmarks.cpu_vs_peers --peers PYTHON [--llama-server PATH] [--model FILE] [--rounds 5] [--json FILE]

PYTHON is an interpreter that has `llama-cpp-python` and `openvino-genai`; one that is missing is left out, and said so.
Each side is a process of its own that holds the model and waits for its turn, so that a change of the machine's speed
hits all. All are called as libraries but llama.cpp's own server, which is asked over HTTP, all requests at once; all
compute on as many threads as there are cores. Prompts are the same random tokens, ends are ignored, decoding is greedy.
Rates count generated tokens (prompt tokens for `prefill`) over the whole call, and are the medians of all rounds; a
ratio is the median of the rounds' ratios to the best peer of that round.
"""

from __future__ import annotations

import argparse
import http.client
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], None]  # prompts, and how many tokens to add to each

ROOT = Path(__file__).parents[1]
THREADS = len(os.sched_getaffinity(0))
WORKLOADS = {  # name -> requests, prompt tokens, output tokens, counted tokens
    "one stream (32 + 128)": (1, 32, 128, 128),
    "16 at once (32 + 64)": (16, 32, 64, 16 * 64),
    "prefill of 512": (1, 512, 1, 512),
}


def mini_sglang(model: str) -> Generate:
    from mini_sglang import LLM, SamplingParams

    llm = LLM(model)

    def generate(prompts: list[list[int]], output: int) -> None:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), progress=False)

    return generate


def llama_cpp(model: str) -> Generate:
    api: Any = importlib.import_module("llama_cpp")

    api.llama_backend_init()
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 16 * 256, 512, 512, 16
    settings.n_threads, settings.n_threads_batch, settings.kv_unified = THREADS, THREADS, True
    context = api.llama_init_from_model(loaded, settings)
    sampler = api.llama_sampler_init_greedy()
    batch = api.llama_batch_init(512, 0, 1)

    def step(tokens: list[tuple[int, int, int, bool]]) -> None:
        """Compute tokens of (id, position, sequence, whether logits are wanted)."""
        batch.n_tokens = len(tokens)
        for index, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        if api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")

    def generate(prompts: list[list[int]], output: int) -> None:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        tokens, last = [], []
        for sequence, prompt in enumerate(prompts):
            tokens += [(token, at, sequence, at == len(prompt) - 1) for at, token in enumerate(prompt)]
            last.append(len(tokens) - 1)
        step(tokens)
        position = len(prompts[0])
        for _ in range(output - 1):
            drawn = [api.llama_sampler_sample(sampler, context, index) for index in last]
            step([(token, position, sequence, True) for sequence, token in enumerate(drawn)])
            last, position = list(range(len(prompts))), position + 1
        for index in last:
            api.llama_sampler_sample(sampler, context, index)

    return generate


def openvino(model: str) -> Generate:
    import numpy as np

    api: Any = importlib.import_module("openvino_genai")
    tensor: Any = importlib.import_module("openvino").Tensor

    scheduler = api.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    pipeline = api.LLMPipeline(
        model, "CPU", scheduler_config=scheduler, ATTENTION_BACKEND="PA", INFERENCE_NUM_THREADS=THREADS
    )

    def generate(prompts: list[list[int]], output: int) -> None:
        ids = np.array(prompts, np.int64)
        settings = api.GenerationConfig(max_new_tokens=output, min_new_tokens=output, ignore_eos=True, do_sample=False)
        pipeline.generate(api.TokenizedInputs(tensor(ids), tensor(np.ones_like(ids))), settings)

    return generate


def llama_cpp_server(program: str, model: str) -> Generate:
    from benchmarks import llama_server
    from mini_sglang.child_process import die_with_parent

    port = llama_server.free_port()
    sizes = ("--parallel", "16", "--ctx-size", str(16 * 1024), "--threads", str(THREADS), "--no-cache-prompt")
    command = llama_server.command(program, model, port, *sizes)
    llama_server.wait(subprocess.Popen(command, text=True, preexec_fn=die_with_parent), port)
    clients = ThreadPoolExecutor(16)

    def ask(prompt: list[int], output: int) -> None:
        connection = http.client.HTTPConnection(llama_server.HOST, port)
        body = {"prompt": prompt, "n_predict": output, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/completion", json.dumps(body), {"content-type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        if answer.get("tokens_predicted") != output:
            raise RuntimeError(f"llama.cpp's server was asked for {output} tokens, and answered {answer}")

    def generate(prompts: list[list[int]], output: int) -> None:
        list(clients.map(ask, prompts, [output] * len(prompts)))

    return generate


SIDES = {"mini_sglang": mini_sglang, "llama.cpp": llama_cpp, "openvino": openvino}
PACKAGES = {"llama.cpp": "llama-cpp-python", "openvino": "openvino-genai"}
SERVER = "llama.cpp server"


def serve(load: Callable[[str], Generate], model: str) -> None:
    """Be a side: say that the model is there, and then for each line with a workload how many seconds it took."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print
    generate = load(model)
    print("ready", file=replies)
    for line in sys.stdin:
        prompts, output = json.loads(line)
        begin = time.perf_counter()
        generate(prompts, output)
        print(time.perf_counter() - begin, file=replies)


class Side:
    """A process that computes when it is asked to."""

    def __init__(self, name: str, python: str, model: str, *options: str) -> None:
        command = [python, "-m", "benchmarks.cpu_vs_peers", "--side", name, "--model", model, *options]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self._reply("ready")

    def seconds(self, prompts: list[list[int]], output: int) -> float:
        assert self._process.stdin is not None
        print(json.dumps((prompts, output)), file=self._process.stdin, flush=True)
        return float(self._reply())

    def close(self) -> int:
        """End it -> the most memory it had, or a server that it has started, in bytes"""
        peaks = [_status(process, "VmHWM") for process in _with_children(self._process.pid)]
        self._process.kill()
        self._process.wait()
        return peaks[-1] << 10

    def _reply(self, expected: str = "") -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line.startswith(expected) or not line:
            raise RuntimeError(f"a side said {line!r} and no number")
        return line


def _with_children(pid: int) -> list[int]:
    children = (Path(f"/proc/{pid}/task/{thread.name}/children") for thread in Path(f"/proc/{pid}/task").iterdir())
    return [pid, *(int(child) for path in children for child in path.read_text().split())]


def _status(pid: int, key: str) -> int:
    """A number of a process's status, such as a size in KiB."""
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{key}:")[2].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable, help="the interpreter that has the peers")
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server; left out without it")
    parser.add_argument("--model", metavar="FILE", help="a GGUF file; default: the built-in model's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--side", choices=[*SIDES, SERVER], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        serve(partial(llama_cpp_server, args.llama_server) if args.side == SERVER else SIDES[args.side], args.model)
        return
    figures = measure(args.model or built_in(), args.peers, args.llama_server, args.rounds)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")


def built_in() -> str:
    from mini_sglang.weights.hub import resolve_model

    return str(resolve_model("smollm2-135m").path)


def measure(model: str, peers: str, llama_server: str | None, rounds: int) -> dict[str, Any]:
    sides = {"mini_sglang": Side("mini_sglang", sys.executable, model)}
    for name, package in PACKAGES.items():
        try:
            sides[name] = Side(name, peers, model)
        except RuntimeError:
            print(f"{name}: left out, since {package} does not load the model in {peers}")
    if llama_server is not None:
        sides[SERVER] = Side(SERVER, sys.executable, model, "--llama-server", str(Path(llama_server).resolve()))
    rates: dict[str, dict[str, list[float]]] = {name: {side: [] for side in sides} for name in WORKLOADS}
    draw = random.Random(0)
    for number in range(rounds + 1):
        for name, (requests, prompt, output, counted) in WORKLOADS.items():
            for side, process in sides.items():
                prompts = [[draw.randrange(100, 40_000) for _ in range(prompt)] for _ in range(requests)]
                seconds = process.seconds(prompts, output)
                if number:  # the first round warms up
                    rates[name][side].append(counted / seconds)
    workloads = {name: summary(of_sides) for name, of_sides in rates.items()}
    for name, row in workloads.items():
        print(name, {key: round(value, 2) for key, value in row.items() if isinstance(value, float)})
    memory = {name: side.close() for name, side in sides.items()}
    return {"model": Path(model).name, "threads": THREADS, "workloads": workloads, "peak_memory_bytes": memory}


def summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Tokens per second of each side, all of them and the median, and how much faster this engine is than the best."""
    row: dict[str, Any] = {side: statistics.median(values) for side, values in rates.items()}
    peers = [values for side, values in rates.items() if side != "mini_sglang"]
    if peers:
        best = [max(values) for values in zip(*peers, strict=True)]
        row["ratio"] = statistics.median(own / peer for own, peer in zip(rates["mini_sglang"], best, strict=True))
    return {**row, "rounds": rates}


if __name__ == "__main__":
    main()
