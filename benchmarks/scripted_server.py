"""A server that answers /v1/completions with known latencies, to test load generators against.

Times to first token are log-normal, gaps between tokens a gamma distribution, both drawn from a seed. With `--slots N`
it answers N requests at a time, and the next wait their turn. It notes when it
had read each request and when it wrote each token; GET /record returns that as JSON, [[read, token, token, ...], ...],
in seconds. A prompt that begins with "fail" gets a 500, with "cut" two tokens and a closed connection, with "error" an
error in the stream.

    python benchmarks/scripted_server.py --port 8360
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import time
from typing import Any

import httptools
import numpy as np

TOKEN = b'data: {"choices":[{"index":0,"text":" token","finish_reason":null}]}\n\n'
ERROR = b'data: {"error":{"message":"the step failed","type":"server_error"}}\n\n'


class Script:
    """The latencies to come, and a record of those that were."""

    def __init__(self, seed: int, ttft_ms: float, itl_ms: float, slots: int | None = None) -> None:
        self._rng = np.random.default_rng(seed)
        self._ttft_s, self._itl_s = ttft_ms / 1e3, itl_ms / 1e3
        self._free_at = None if slots is None else [0.0] * slots  # a heap: when each slot has ended what it has
        self.record: list[list[float]] = []

    def token_delays(self, count: int) -> list[float]:
        """Seconds from the request to each of its tokens."""
        first = self._rng.lognormal(np.log(self._ttft_s), 0.4)
        gaps = self._rng.gamma(4.0, self._itl_s / 4.0, count - 1)
        delays = np.cumsum([first, *gaps])
        return [float(delay) for delay in delays + self._turn(float(delays[-1]))]

    def _turn(self, seconds: float) -> float:
        """Take a slot for that long, and return how long it takes until one is free."""
        if self._free_at is None:
            return 0.0
        now = time.perf_counter()
        start = max(now, self._free_at[0])
        heapq.heapreplace(self._free_at, start + seconds)
        return start - now


class Connection(asyncio.Protocol):
    def __init__(self, script: Script) -> None:
        self._script = script
        self._body = b""
        self._target = b""
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # a stream's

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = self._target = b""

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._target == b"/record":
            self._answer("200 OK", json.dumps(self._script.record).encode())
        elif self._target == b"/v1/models":
            self._answer("200 OK", b'{"data": [{"id": "scripted"}]}')
        elif self._target.startswith(b"/v1/completions"):
            self._complete(json.loads(self._body))
        else:
            self._answer("404 Not Found", b'{"error": {"message": "no such route"}}')

    def _complete(self, body: dict[str, Any]) -> None:
        prompt, count = body["prompt"], body["max_tokens"]
        command = prompt.partition(" ")[0] if isinstance(prompt, str) else ""
        if command == "fail":
            self._answer("500 Internal Server Error", b'{"error": {"message": "told to fail"}}')
            return
        times = [time.perf_counter()]
        self._script.record.append(times)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        usage["prompt_tokens_details"] = {"cached_tokens": len(prompt) // 2}
        end = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
        loop = asyncio.get_running_loop()
        delays = self._script.token_delays(count)
        for index, delay in enumerate(delays):
            if command == "cut" and index == 2:
                loop.call_later(delay, self._transport.close)
                return
            tail = end if index == count - 1 else b""
            loop.call_at(
                loop.time() + delay, self._write, times, index == 0, TOKEN if command != "error" else ERROR, tail
            )

    def _write(self, times: list[float], is_first: bool, event: bytes, tail: bytes) -> None:
        times.append(time.perf_counter())
        data = b"%x\r\n%b\r\n" % (len(event), event)
        if is_first:
            data = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + data
        if tail:
            data += b"%x\r\n%b\r\n0\r\n\r\n" % (len(tail), tail)
        self._transport.write(data)

    def _answer(self, status: str, body: bytes) -> None:
        self._transport.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


async def serve(port: int, script: Script) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(script), "127.0.0.1", port, backlog=4096)
    print(f"Serving http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=80.0, help="median time to the first token")
    parser.add_argument("--itl-ms", type=float, default=20.0, help="mean time between tokens")
    parser.add_argument("--slots", type=int, help="requests answered at a time (default: all)")
    args = parser.parse_args()
    asyncio.run(serve(args.port, Script(args.seed, args.ttft_ms, args.itl_ms, args.slots)))


if __name__ == "__main__":
    main()
