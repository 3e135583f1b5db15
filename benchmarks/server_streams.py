"""How evenly the server hands tokens to many streams at once, and what that costs: a scripted engine, the real server.

    python benchmarks/server_streams.py [--streams 500] [--tokens 100] [--interval 0.25] [--route chat]

Three processes: this one is the client, the second is the server, the third takes the engine's place behind the same
socket and sends one token to every stream each `interval` seconds, with the time at which it did. All streams arrive at
once. Prints how late the server's event loop ran what was due (every millisecond something is), its longest piece of
work between two turns in CPU time, how long tokens took from the engine to the client and by how much streams differ
in that, and the server's CPU time per token. The former two while streams begin and while all run.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import cProfile
import dataclasses
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from mini_sglang.config import EngineConfig
from mini_sglang.ipc.async_engine import AsyncEngine
from mini_sglang.ipc.engine_process import EngineLoop
from mini_sglang.ipc.messages import EngineInfo, Ready, decode_from_engine, encode
from mini_sglang.outputs import FinishReason, StepOutputs, TokenOutput
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.stats import SchedulerStats
from mini_sglang.server.config import ServerConfig
from mini_sglang.server.http_server import HttpServer
from mini_sglang.text.tokenizer import load_tokenizer
from mini_sglang.weights.hub import resolve_model

Json = dict[str, Any]

WORD = " word"  # what every token says
TICK_S = 0.001
ROUTES: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me a story about the sea."}]}),
    "completions": ("/v1/completions", {"prompt": "Once upon a time"}),
    "generate": ("/generate", {"prompt": "Once upon a time"}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "Tell me a story about the sea."}]}),
    "responses": ("/v1/responses", {"input": "Tell me a story about the sea."}),
}


class ScriptedEngine:
    """Stands where an Engine does in an EngineLoop: one token for every request each `interval` seconds."""

    def __init__(self, interval: float, token_id: int) -> None:
        self._interval = interval
        self._token_id = token_id
        self._remaining: dict[str, int] = {}
        self.sent: list[float] = []  # when each step's tokens were sent
        self.first_steps: dict[str, int] = {}  # by request

    def add_request(self, request_id: str, prompt_ids: list[int], params: SamplingParams, **_: Any) -> None:
        assert params.max_tokens is not None
        self._remaining[request_id] = params.max_tokens
        self.first_steps[request_id] = len(self.sent)

    def abort(self, request_id: str, reason: FinishReason) -> None:
        self._remaining.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self._remaining)

    def step(self) -> StepOutputs:
        time.sleep(self._interval)
        last = [request_id for request_id, remaining in self._remaining.items() if remaining == 1]
        others = [
            TokenOutput(request_id=request_id, token_ids=[self._token_id], finish_reason=FinishReason.LENGTH)
            for request_id in last
        ]
        for request_id in last:
            del self._remaining[request_id]
        for request_id in self._remaining:
            self._remaining[request_id] -= 1
        self.sent.append(time.monotonic())
        return StepOutputs(list(self._remaining), [self._token_id] * len(self._remaining), others)

    def stats(self) -> SchedulerStats:
        fields: dict[str, Any] = dict.fromkeys(SchedulerStats.__struct_fields__, 0)
        return SchedulerStats(**{**fields, "num_pages": 1, "step_sizes": [], "drafts": None})

    def check(self) -> None: ...

    def check_ranks(self) -> None: ...


def run_engine(address: str, interval: float) -> None:
    """The engine's process. At its end it prints when it sent what."""
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    [token_id] = tokenizer.encode(WORD)
    with zmq.Context() as context, context.socket(zmq.PAIR) as channel:
        channel.connect(address)
        engine = ScriptedEngine(interval, token_id)
        info = EngineInfo(
            model="scripted",
            dtype="float32",
            device="cpu",
            vocab_size=tokenizer.vocab_size,
            context_length=4096,
            page_size=16,
            num_pages=1 << 20,
            max_prompt_tokens=4095,
            max_running_requests=4096,
            eos_token_ids=[0],
            pid=os.getpid(),
            config=EngineConfig(model="scripted"),
        )
        channel.send(encode(Ready(info)))
        EngineLoop(engine, channel, os.getppid()).run()  # type: ignore[arg-type]
    print(json.dumps({"sent": engine.sent, "first_steps": engine.first_steps}))


@dataclass
class Watch:
    """Of an event loop: how late it ran what was due at each tick, and the thread's CPU time since the tick before."""

    lags: list[tuple[float, float]] = field(default_factory=list)  # when due, how late
    slices: list[tuple[float, float]] = field(default_factory=list)  # when it ended, CPU seconds
    used: list[tuple[float, float]] = field(default_factory=list)  # CPU seconds of the process so far

    async def run(self) -> None:
        due, cpu = time.monotonic() + TICK_S, time.thread_time()
        while True:
            await asyncio.sleep(due - time.monotonic())
            now, cpu_now = time.monotonic(), time.thread_time()
            self.slices.append((now, cpu_now - cpu))
            self.used.append((now, time.process_time()))
            while due <= now:  # all that were due meanwhile, each with its own wait
                self.lags.append((due, now - due))
                due += TICK_S
            cpu = cpu_now


async def run_server(interval: float, profile: str) -> None:
    """The server's process. Serves until its standard input ends, and then prints what it has measured."""
    tokenizer = await asyncio.to_thread(load_tokenizer, resolve_model("smollm2-135m"))
    with tempfile.TemporaryDirectory() as directory, socket.socket() as listener:
        context = zmq.asyncio.Context()
        channel = context.socket(zmq.PAIR)
        channel.bind(f"ipc://{directory}/engine")
        arguments = command("engine", "--address", f"ipc://{directory}/engine", "--interval", interval)
        process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE)
        ready = decode_from_engine(await channel.recv())
        assert isinstance(ready, Ready)
        engine = AsyncEngine(process, context, channel, ready.info, tokenizer)
        listener.bind(("127.0.0.1", 0))
        server = HttpServer(engine, ServerConfig(access_log=False), listener)
        serving = asyncio.create_task(server.serve([listener]))
        await asyncio.sleep(2)  # what is warmed up in the background is not measured
        print("ready", flush=True)
        watch = Watch()
        watching = asyncio.create_task(watch.run())
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        await asyncio.to_thread(sys.stdin.read)
        if profile:
            profiler.disable()
            profiler.dump_stats(profile)
        watching.cancel()
        server.should_exit = True
        await serving
        await engine.close()
        assert process.stdout is not None
        sent = json.loads(await process.stdout.read())
    print(json.dumps({**sent, **dataclasses.asdict(watch)}))


class Stream(asyncio.Protocol):
    """One request of the client: what came, and when."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.connected = time.monotonic()
        self.received: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.connected = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received.append((time.monotonic(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)

    def request_id(self) -> str:
        """The one that the engine knows as well."""
        found = re.search(rb'"(?:request_)?id":"([^"]+)"', b"".join(data for _, data in self.received))
        assert found is not None
        return found[1].decode()

    def arrivals(self) -> list[float]:
        """When each token had come, by the time of the piece of data that completes it."""
        ends = list(itertools.accumulate(len(data) for _, data in self.received))
        words = re.finditer(WORD.encode(), b"".join(data for _, data in self.received))
        return [self.received[bisect.bisect_left(ends, word.end())][0] for word in words]


async def run_streams(url: str, route: str, streams: int, tokens: int) -> list[Stream]:
    """All streams at once, to their ends."""
    host, _, port = url.removeprefix("http://").partition(":")
    path, body = ROUTES[route]
    limit = "max_output_tokens" if route == "responses" else "max_tokens"
    data = json.dumps({**body, limit: tokens, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    request = head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data
    loop = asyncio.get_running_loop()
    opened = await asyncio.gather(
        *(loop.create_connection(lambda: Stream(request), host, int(port)) for _ in range(streams))
    )
    await asyncio.gather(*(stream.ended for _, stream in opened))
    return [stream for _, stream in opened]


def quantiles(values: Sequence[float]) -> str:
    """p50, p99 and the largest, in milliseconds."""
    ordered = sorted(values)
    p50, p99 = (1e3 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    return f"p50 {p50:.1f}, p99 {p99:.1f}, max {1e3 * ordered[-1]:.1f} ms"


def report(measured: Json, streams: Sequence[Stream], tokens: int) -> None:
    """Print what server and client have seen."""
    arrivals = [stream.arrivals()[:tokens] for stream in streams]  # some routes say all once more at the end
    if short := sum(len(times) < tokens for times in arrivals):
        sys.exit(f"{short} streams have not got all of their tokens")
    connected = min(stream.connected for stream in streams)
    begun, ended = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    phases = (("all in all", connected, ended), ("while they begin", connected, begun), ("while all run", begun, ended))
    for phase, since, until in phases:
        lags = [lag for when, lag in measured["lags"] if since <= when < until]
        slices = [cpu for when, cpu in measured["slices"] if since <= when < until]
        used = [cpu for when, cpu in measured["used"] if since <= when < until]
        num_tokens = sum(since <= when < until for times in arrivals for when in times)
        print(f"{phase} ({until - since:.2f} s, {num_tokens} tokens)")
        print(f"  event loop lag          {quantiles(lags)}")
        print(f"  longest piece of work   {1e3 * max(slices):.1f} ms of CPU time")
        print(f"  CPU time per token      {1e3 * (used[-1] - used[0]) / num_tokens:.3f} ms")
    first_steps = {wire_id.partition("#")[0]: step for wire_id, step in measured["first_steps"].items()}
    waits: list[list[float]] = [[] for _ in measured["sent"]]  # of the streams' tokens, by step
    for stream, times in zip(streams, arrivals, strict=True):
        first = first_steps[stream.request_id()]
        for step, when in enumerate(times, start=first):
            waits[step].append(when - measured["sent"][step])
    print("from the engine to the client")
    print(f"  all tokens              {quantiles(list(itertools.chain(*waits)))}")
    print(f"  of a step: the longest less the shortest  {quantiles([max(step) - min(step) for step in waits if step])}")


async def run_client(options: argparse.Namespace) -> None:
    """Start the server, run all streams against it and report."""
    server = await asyncio.create_subprocess_exec(
        *command("server", "--interval", options.interval, "--profile", options.profile),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=1 << 30,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    url = (await server.stdout.readline()).decode().split()[-1]
    await server.stdout.readline()  # it is ready
    streams = await run_streams(url, options.route, options.streams, options.tokens)
    output, _ = await server.communicate(b"")
    report(json.loads(output), streams, options.tokens)


def command(role: str, *arguments: object) -> list[str]:
    """This program in another role."""
    return [sys.executable, __file__, "--role", role, *map(str, arguments)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--interval", type=float, default=0.25, help="seconds between two tokens of a stream")
    parser.add_argument("--route", choices=ROUTES, default="chat")
    parser.add_argument("--profile", default="", help="file for a profile of the server (cProfile)")
    parser.add_argument("--role", choices=("client", "server", "engine"), default="client", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.role:
        case "client":
            asyncio.run(run_client(options))
        case "server":
            uvloop.run(run_server(options.interval, options.profile))
        case "engine":
            run_engine(options.address, options.interval)


if __name__ == "__main__":
    main()
