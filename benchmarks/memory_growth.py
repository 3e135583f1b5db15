"""The memory of a server's processes over thousands of requests of mixed lengths.

    python benchmarks/memory_growth.py --requests 7000 --output benchmarks/results/memory.json -- --dtype float32

What follows `--` goes to `mini-sglang serve`. Half of the prompts are new, half begin like one of 20 texts; lengths are
spread evenly over their logarithm. Writes resident and proportional memory (MiB) of every process, now and then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

WORKERS = 4
ANSWER_TOKENS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=7000)
    parser.add_argument("--longest", type=int, default=500, help="tokens of the longest prompt")
    parser.add_argument("--vocabulary", type=int, default=40000, help="prompts are of token ids below it")
    parser.add_argument("--every", type=int, default=100, help="requests between two measurements")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("serve", nargs="*", help="arguments of mini-sglang serve")
    options = parser.parse_args()
    command = [sys.executable, "-m", "mini_sglang", "serve", "--port", "0", "--no-access-log", *options.serve]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" at ")[1].strip()
            asyncio.run(measure(address, server.pid, options))
        finally:
            server.terminate()


async def measure(address: str, pid: int, options: argparse.Namespace) -> None:
    chosen = random.Random(0)
    texts = [new_prompt(chosen, options.longest, options.vocabulary) for _ in range(20)]
    started = time.monotonic()
    series = [{"requests": 0, "seconds": 0, "MiB": memory_of(pid)}]
    done = 0

    async def work(client: httpx.AsyncClient, name: str) -> None:
        nonlocal done
        while done < options.requests:
            length = round(math.exp(chosen.uniform(0, math.log(options.longest))))
            begin = chosen.choice(texts)[: length - 1] if chosen.random() < 0.5 else []
            prompt = begin + new_prompt(chosen, length - len(begin), options.vocabulary)
            body = {"model": name, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
            (await client.post("/v1/completions", json=body)).raise_for_status()
            done += 1
            if done % options.every == 0:
                series.append({"requests": done, "seconds": round(time.monotonic() - started), "MiB": memory_of(pid)})
                print(series[-1], flush=True)
                options.output.write_text(json.dumps({"serve": options.serve, "series": series}, indent=1) + "\n")

    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        print(name, series[0], flush=True)
        await asyncio.gather(*(work(client, name) for _ in range(WORKERS)))


def new_prompt(chosen: random.Random, length: int, vocabulary: int) -> list[int]:
    return [chosen.randrange(3, vocabulary) for _ in range(length)]


def memory_of(pid: int) -> dict[str, Any]:
    """RSS and PSS of the API process and of its children."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    names = {pid: "api"} | dict.fromkeys(children, "engine")
    return {f"{name} {kind}": mib for process, name in names.items() for kind, mib in rollup(process).items()}


def rollup(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return {kind: int(kb) >> 10 for kind, kb in re.findall(r"^(Rss|Pss):\s+(\d+)", text, re.MULTILINE)}


if __name__ == "__main__":
    main()
