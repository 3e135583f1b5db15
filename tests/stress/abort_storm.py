"""Abort storm: many streams against a running server, each left at a random moment; afterwards nothing may be missing.

    python tests/stress/abort_storm.py --url http://127.0.0.1:8000 --streams 2000 --concurrency 16

Clients leave before the first token, in the middle, in the very step in which the request ends, or not at all. Prompts
share beginnings, so that pages are shared when they are given back. Needs a server that nobody else uses. Exit status
1, with what is wrong, unless afterwards: nothing runs or waits, every page is free or cached, every request is counted,
and greedy answers are what they were before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import sys
import time
from typing import Any

import httpx

CANARIES = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time", "def fibonacci(n):"]
SHARED = "You are a helpful assistant who answers briefly. "
SETTLE_S = 10.0


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    limits = httpx.Limits(max_connections=options.concurrency, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=options.url, timeout=120, limits=limits) as client:
        before = await counted(client)
        expected = [await canary(client, prompt) for prompt in CANARIES]
        start = time.perf_counter()
        gate = asyncio.Semaphore(options.concurrency)
        streams = [stream(client, gate, random.Random(chance.random())) for _ in range(options.streams)]
        num_answered = sum(await asyncio.gather(*streams))
        took = time.perf_counter() - start
        problems = await settle(client)
        answers = await asyncio.gather(*(canary(client, prompt) for prompt in CANARIES * 8))
        if answers != expected * 8:
            problems.append("greedy answers changed")
        ended = await counted(client) - before - 9 * len(CANARIES)
        if not num_answered <= ended <= options.streams:  # the others may have left before they had arrived
            problems.append(f"{num_answered} of {options.streams} streams began, {ended:g} were counted as ended")
        problems += await settle(client)
    print(
        f"{options.streams} streams in {took:.1f} s:", "; ".join(problems) or "all pages accounted for, answers right"
    )
    return 1 if problems else 0


async def stream(client: httpx.AsyncClient, gate: asyncio.Semaphore, chance: random.Random) -> bool:
    """One stream, left at a moment of its own; whether it had begun to be answered."""
    limit = chance.randint(1, 20)
    body = {
        "prompt": SHARED * chance.randint(0, 4) + f"Question {chance.randint(0, 50)}:",
        "max_tokens": limit,
        "ignore_eos": True,
        "stream": True,
        "seed": chance.randint(0, 1000),
        "stop": chance.choice([[], [" the"]]),
    }
    how = chance.choice(["before", "middle", "last", "timer", "never"])
    leave_after = {"before": 0, "middle": chance.randint(0, limit), "last": limit - 1}.get(how, limit + 1)
    begun: list[bool] = []
    async with gate:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0, 0.5) if how in ("before", "timer") else None):
                await read(client, body, leave_after, begun)
    return bool(begun)


async def read(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int, begun: list[bool]) -> None:
    """Read events until `leave_after` of them have come; leaving the block closes the connection."""
    async with client.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        begun.append(True)
        seen = 0
        async for line in response.aiter_lines():
            seen += line.startswith("data: {")
            if seen >= leave_after:
                return


async def canary(client: httpx.AsyncClient, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    answer = (await client.post("/generate", json=body)).raise_for_status().json()
    return str(answer["text"])


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """By name, and by labels beyond the model's name."""
    text = re.sub(r',?model_name="[^"]*"', "", (await client.get("/metrics")).text).replace("{}", "")
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("mini_sglang:"): float(value) for name, _, value in pairs}


async def counted(client: httpx.AsyncClient) -> float:
    """Requests that have ended, for whatever reason."""
    return sum(value for name, value in (await metrics(client)).items() if name.startswith("request_success_total"))


async def settle(client: httpx.AsyncClient) -> list[str]:
    """What is still held when the last client has left."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = await metrics(client)
        problems = [
            f"{name} is {now[name]:g}"
            for name in ("num_requests_running", "num_requests_waiting", "kv_used_pages", "kv_cache_usage_perc")
            if now[name] != 0
        ]
        if now["kv_free_pages"] + now["kv_cached_pages"] != now["kv_pages"]:
            problems.append(f"free {now['kv_free_pages']:g} + cached {now['kv_cached_pages']:g} pages are not all")
        if not problems or time.monotonic() > deadline:
            return problems
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
