"""Soak: hours of mixed traffic at a server of its own, at rest every few minutes to see that nothing is lost or grows.

    python -m tests.stress.soak --hours 2 --model Qwen/Qwen3-0.6B -- --device cuda --deterministic

What follows `--` are options of `mini-sglang serve`; the model `tiny` is a random one that runs in milliseconds. A line
a minute says how it goes. At the end comes a JSON summary, and the exit status is 1 if anything was violated: a wrong
or missing answer, a canary with other tokens, a gauge that is not at rest, a process that grows, an engine whose
accounts do not balance (it stops by itself), an error in the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from mini_sglang.config import DEFAULT_MODEL
from tests import tiny
from tests.stress import processes, traffic
from tests.stress.traffic import Client

# Small limits, so that queues fill, pages run out, and requests are preempted.
MAX_RUNNING, MAX_WAITING, CONTEXT_LENGTH = 16, 16, 2048
SERVER = (
    *("--port", "0", "--no-access-log", "--context-length", str(CONTEXT_LENGTH), "--num-pages", "160"),
    *("--max-running-requests", str(MAX_RUNNING), "--max-waiting-requests", str(MAX_WAITING)),
)
WARM_UP = 1000  # requests after which a process has its full size; in a long run a third of them: rare kinds come late
SETTLE_S = 20.0
CHECKED_AFTER_S = 1.5  # the engine looks at its accounts after half a second without work
START_WITHIN_S = 600.0  # to load a large model
STOP_WITHIN_S = 30.0
MOST_KEPT = 50  # violations in words; the others are counted
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


class Soak:
    """One run: traffic in rounds, each with a look at the server at rest behind it."""

    def __init__(self, url: str, pid: int, log: Path) -> None:
        self._url = url
        self._pid = pid
        self._log = log
        self._chance = random.Random(0)
        self._client = Client(self._connections(), longest=0, queue=MAX_RUNNING + MAX_WAITING)
        self._start = time.monotonic()
        self._series: dict[str, list[tuple[int, processes.Held]]] = defaultdict(list)  # with requests sent until then
        self.violations: list[str] = []
        self.num_violations = 0
        self._counts: dict[str, float] = {}  # the server's own, when it was last at rest

    def _connections(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=traffic.ANSWER_WITHIN_S, limits=CONNECTIONS)

    async def run(self, seconds: float, round_s: float, concurrency: int) -> None:
        """Traffic for `seconds`, at rest after each `round_s`."""
        await traffic.find_longest(self._client, CONTEXT_LENGTH)
        await traffic.choose_canaries(self._client)
        await self._rest()
        self._say(self._line())
        end = time.monotonic() + seconds
        reporter = asyncio.create_task(self._report())
        while time.monotonic() < end and self._is_alive():
            round_end = min(time.monotonic() + round_s, end)
            await asyncio.gather(*(self._send_until(round_end) for _ in range(concurrency)), self._flood_in_round())
            await self._rest()
        reporter.cancel()
        self._say(self._line())
        self._judge()
        await self._client.http.aclose()

    def _is_alive(self) -> bool:
        return Path(f"/proc/{self._pid}/fd").exists()

    async def _send_until(self, end: float) -> None:
        """One of the clients: requests one after another."""
        kinds, weights = zip(*traffic.KINDS.items(), strict=True)
        while time.monotonic() < end and self._is_alive():
            [kind] = self._chance.choices(kinds, weights)
            await self._one(kind)

    async def _flood_in_round(self) -> None:
        await asyncio.sleep(1)  # until the others are busy
        await self._one(traffic.flood)

    async def _one(self, kind: traffic.Kind) -> None:
        try:
            await kind(self._client, random.Random(self._chance.random()))
        except traffic.Violation as violation:
            self._violated(f"{kind.__name__}: {violation}")
        except Exception as error:  # whatever it is, it is no answer
            self._violated(f"{kind.__name__}: {type(error).__name__}: {error}")

    def _violated(self, what: str) -> None:
        self.num_violations += 1
        if len(self.violations) < MOST_KEPT:
            self.violations.append(f"{time.monotonic() - self._start:.0f} s: {what}")
            self._say(f"VIOLATION {self.violations[-1]}")

    # -- at rest ------------------------------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """With no request under way: gauges, canaries, accounts, counts, and what the processes hold."""
        await self._client.http.aclose()  # a connection kept alive would count as a descriptor
        self._client.http = self._connections()
        try:
            for problem in await self._settled():
                self._violated(f"at rest, {problem}")
            for prompt, expected in self._client.canaries.items():
                await traffic.check_canary(self._client, prompt, expected)
            await asyncio.sleep(CHECKED_AFTER_S)
            (await self._client.http.get("/health")).raise_for_status()
            self._counts = await self._metrics()
            for problem in self._miscounted(self._counts):
                self._violated(f"at rest, {problem}")
        except (traffic.Violation, httpx.HTTPError) as error:
            self._violated(f"at rest, {type(error).__name__}: {error}")
        await self._client.http.aclose()
        await asyncio.sleep(0.2)  # until the server has closed its ends
        self._client.http = self._connections()
        self._measure()

    async def _settled(self) -> list[str]:
        """What is still held some time after the last client has left."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            now = await self._metrics()
            held = ("num_requests_running", "num_requests_waiting", "kv_used_pages", "kv_cache_usage_perc")
            problems = [f"{name} is {now[name]:g}" for name in held if now[name] != 0]
            if now["kv_free_pages"] + now["kv_cached_pages"] != now["kv_pages"]:
                problems.append(f"free {now['kv_free_pages']:g} + cached {now['kv_cached_pages']:g} pages are not all")
            if not problems or time.monotonic() > deadline:
                return problems
            await asyncio.sleep(0.2)

    def _miscounted(self, metrics: dict[str, float]) -> list[str]:
        """What the server counts otherwise than its clients: a choice that was answered has ended, once."""
        ended = {reason: metrics[f'request_success_total{{finished_reason="{reason}"}}'] for reason in _REASONS}
        answered, left = self._client.choices["answered"], self._client.choices["left"]
        complete = ended["stop"] + ended["length"]
        problems = []
        if not answered <= complete <= answered + left:
            problems.append(f"{answered} choices were answered and {left} left, but {complete:g} counted as complete")
        if ended["abort"] > left:
            problems.append(f"{left} choices were left, but {ended['abort']:g} counted as aborted")
        if ended["error"]:
            problems.append(f"{ended['error']:g} requests counted as failed")
        if ended["refused"] != self._client.ended["bad grammar", "400"]:
            problems.append(f"{ended['refused']:g} requests counted as refused, not each bad grammar")
        return problems

    async def _metrics(self) -> dict[str, float]:
        """By name, and by labels beyond the model's name."""
        response = (await self._client.http.get("/metrics")).raise_for_status()
        text = re.sub(r',?model_name="[^"]*"', "", response.text).replace("{}", "")
        pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("mini_sglang:"): float(value) for name, _, value in pairs}

    def _measure(self) -> None:
        seen: Counter[str] = Counter()
        for pid in processes.tree(self._pid):
            with contextlib.suppress(OSError):  # it has just ended
                name = processes.name(pid)
                seen[name] += 1
                who = name if seen[name] == 1 else f"{name} {seen[name]}"
                self._series[who].append((self._client.begun.total(), processes.held(pid)))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """What only the whole run shows: growth, requests without an outcome, errors in the log."""
        begun, ended = self._client.begun.total(), self._client.ended.total()
        warm = max(WARM_UP, begun // 3)
        for who, series in self._series.items():
            for problem in processes.growth(who, [held for sent, held in series if sent >= warm]):
                self._violated(problem)
        if begun != ended:
            self._violated(f"{begun} requests were sent, {ended} have an outcome")

    def judge_end(self, status: int, left_behind: Sequence[int]) -> None:
        """The server has stopped when it was told to, with status 0 and all of its processes; its log has no error."""
        if status or left_behind:
            self._violated(f"the server ended with status {status} and left processes {left_behind} behind")
        for line in self._log.read_text().splitlines():
            if re.search(r"\b(ERROR|CRITICAL|Traceback)\b", line):
                self._violated(f"the log says: {line[:300]}")

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(60)
            self._say(self._line())

    def _line(self) -> str:
        counts: Counter[str] = Counter()
        for (_, outcome), count in self._client.ended.items():
            counts[outcome] += count
        outcomes = " ".join(f"{outcome}:{count}" for outcome, count in sorted(counts.items()))
        memory = " ".join(f"{who} {series[-1][1].resident_mb:.0f}" for who, series in self._series.items())
        minutes = (time.monotonic() - self._start) / 60
        return (
            f"{minutes:6.1f} min  {self._client.begun.total()} requests ({outcomes})  "
            f"MB at rest: {memory}  violations {self.num_violations}"
        )

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def summary(self) -> dict[str, Any]:
        kinds: dict[str, dict[str, int]] = defaultdict(dict)
        for (kind, outcome), count in sorted(self._client.ended.items()):
            kinds[kind][outcome] = count
        return {
            "seconds": round(time.monotonic() - self._start, 1),
            "requests": self._client.begun.total(),
            "by_kind": kinds,
            "choices": self._client.choices,
            "canaries": self._client.canaries,
            "server": {name: count for name, count in self._counts.items() if "bucket" not in name},
            "processes": {
                who: [{"requests": sent, **asdict(held)} for sent, held in series]
                for who, series in self._series.items()
            },
            "num_violations": self.num_violations,
            "violations": self.violations,
        }


_REASONS = ("stop", "length", "abort", "error", "refused")


async def soak(folder: Path, server: Sequence[str], *, seconds: float, round_s: float, concurrency: int) -> Soak:
    """Start a server with these options, soak it and stop it. Its log is left in `folder`."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "mini_sglang", "serve", *SERVER, *server]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        run = Soak(await address(process, log), process.pid, log)
        await run.run(seconds, round_s, concurrency)
        pids = list(processes.tree(process.pid))
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.to_thread(process.wait), STOP_WITHIN_S)
        run.judge_end(process.returncode, [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()])
        return run
    finally:
        process.kill()
        process.wait()


async def address(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address that a server prints when its model is loaded. Raises RuntimeError if it does not."""
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        if greeting := re.search(r"^Serving .* at (http://\S+)$", log.read_text(), re.MULTILINE):
            return greeting[1]
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")


def tiny_model(folder: Path) -> Path:
    """Write a random model that answers in milliseconds."""
    checkpoints = tiny.Checkpoints(folder, tiny.make_tokenizer())
    return checkpoints.write("qwen3", max_position_embeddings=2048).path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for mini-sglang serve; tiny: random and small")
    parser.add_argument("--round-s", type=float, default=120.0, help="seconds of traffic between two rests")
    parser.add_argument("--concurrency", type=int, default=8, help="clients at once, besides a flood in each round")
    parser.add_argument("--out", type=Path, help="folder for the log and the summary (default: a new one in /tmp)")
    parser.add_argument("server", nargs="*", help="options of mini-sglang serve, after --")
    options = parser.parse_args(arguments)
    folder = options.out or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = str(tiny_model(folder)) if options.model == "tiny" else options.model
    run = asyncio.run(
        soak(
            folder,
            ["--model", model, *options.server],
            seconds=options.hours * 3600,
            round_s=options.round_s,
            concurrency=options.concurrency,
        )
    )
    summary = json.dumps(run.summary(), indent=1)
    (folder / "summary.json").write_text(summary)
    print(summary)
    print(f"the server's log is in {folder}", file=sys.stderr)
    return 1 if run.num_violations else 0


if __name__ == "__main__":
    sys.exit(main())
