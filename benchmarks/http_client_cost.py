"""What a streamed answer costs the client in CPU: the load generator's own HTTP client beside aiohttp and httpx.

Each side reads the same number of answers from a scripted server, some at a time, and does nothing with them but note
when each piece came. Needs aiohttp and httpx; prints the medians of alternating rounds.

    python benchmarks/http_client_cost.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mini_sglang.bench.http_client import HttpClient

BODY = b'{"prompt": [1, 2, 3, 4], "max_tokens": 10, "stream": true}'
Post = Callable[[], Awaitable[list[float]]]  # the times of the pieces


async def _own(url: str, stack: AsyncExitStack) -> Post:
    client = HttpClient(url)
    stack.callback(client.close)

    async def post() -> list[float]:
        return [when for when, _ in (await client.post("/v1/completions", BODY)).chunks]

    return post


async def _aiohttp(url: str, stack: AsyncExitStack) -> Post:
    import aiohttp

    session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

    async def post() -> list[float]:
        async with session.post(f"{url}/v1/completions", data=BODY) as response:
            return [time.perf_counter() async for _ in response.content.iter_any()]

    return post


async def _httpx(url: str, stack: AsyncExitStack) -> Post:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = await stack.enter_async_context(httpx.AsyncClient(limits=limits, timeout=60))

    async def post() -> list[float]:
        async with client.stream("POST", f"{url}/v1/completions", content=BODY) as response:
            return [time.perf_counter() async for _ in response.aiter_bytes()]

    return post


SIDES = {"own (asyncio, httptools)": _own, "aiohttp": _aiohttp, "httpx": _httpx}


async def cost(make: Callable[[str, AsyncExitStack], Awaitable[Post]], url: str, count: int, at_once: int) -> float:
    """µs of CPU per answer."""
    async with AsyncExitStack() as stack:
        post = await make(url, stack)
        await asyncio.gather(*(post() for _ in range(at_once)))  # opens the connections
        numbers = iter(range(count))

        async def work() -> None:
            for _ in numbers:
                await post()

        start = time.process_time()
        await asyncio.gather(*(work() for _ in range(at_once)))
        return (time.process_time() - start) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000, help="of each side in each round")
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    server = [sys.executable, str(Path(__file__).with_name("scripted_server.py"))]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[-1]
            costs = [
                {name: asyncio.run(cost(make, url, args.requests, args.at_once)) for name, make in SIDES.items()}
                for _ in range(args.rounds)
            ]
        finally:
            process.kill()
    table = Table("client", "µs of CPU an answer of 10 tokens", "times the first")
    for name in SIDES:
        ratio = statistics.median(of_round[name] / of_round[next(iter(SIDES))] for of_round in costs)
        table.add_row(name, f"{statistics.median(of_round[name] for of_round in costs):.0f}", f"{ratio:.2f}")
    Console().print(table)
    if args.json:
        Path(args.json).write_text(json.dumps({name: [by[name] for by in costs] for name in SIDES}, indent=1) + "\n")


if __name__ == "__main__":
    main()
