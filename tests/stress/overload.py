"""Overload: what a server gets done at once, twice and three times its capacity, and how soon it is itself again.

    python -m tests.stress.overload --model tiny -- --dtype float32 --num-threads 1

Measures the most requests a second that clients get answered who ask one after another, then lets requests come at
multiples of that rate, whose clients either obey Retry-After or give up. Prints a JSON line for each: answers a second,
and answers in a second of the server's processor time, which other programs on the machine disturb less, both by the
server's own count. For the server's options see soak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.stress import processes, soak, traffic

NUM_TOKENS = 16


@dataclass
class Load:
    """One measurement: requests that come over `seconds`, each sent again as told if its client obeys."""

    http: httpx.AsyncClient
    pid: int  # of the server
    seconds: float
    obeys: bool
    counts: Counter[str] = field(default_factory=Counter)
    end: float = 0.0
    before: tuple[float, float, float] = (0, 0, 0)

    async def one(self, chance: random.Random) -> None:
        """A request, until it is answered, given up or too late."""
        body = {"prompt": traffic.words(chance, 20), "max_tokens": NUM_TOKENS, "ignore_eos": True}
        is_first = True
        while True:
            answer = await self.http.post("/generate", json=body)
            which = "first" if is_first else "again"
            self.counts[f"{which} {answer.status_code}"] += 1
            if answer.status_code == 200:
                return
            wait = traffic.retry_after(answer)
            if not self.obeys or time.monotonic() + wait > self.end:
                return
            await asyncio.sleep(wait)
            is_first = False

    async def come(self, rate: float) -> dict[str, object]:
        """Let requests come at random, `rate` a second."""
        chance, tasks = random.Random(0), []
        await self._begin()
        arrival = time.monotonic()
        while arrival < self.end:
            await asyncio.sleep(arrival - time.monotonic())
            tasks.append(asyncio.create_task(self.one(random.Random(chance.random()))))
            arrival += chance.expovariate(rate)
        figures, last = await self._figures(), time.monotonic()
        alone_again = await self._until_itself_again()
        await asyncio.gather(*tasks)
        again = self.counts["again 200"] + self.counts["again 429"]
        return {
            "rate": round(rate, 1),
            "obeys": self.obeys,
            **figures,
            "accepted_when_sent_again": round(self.counts["again 200"] / again, 3) if again else None,
            "recovered_after_s": round(alone_again - last, 2),
            **self.counts,
        }

    async def _until_itself_again(self) -> float:
        """When a request is taken at once, and nothing waits."""
        while True:
            stats = (await self.http.get("/server_info")).json()["stats"]
            if stats["num_waiting"] == 0:
                answer = await self.http.post("/generate", json={"prompt": "Hi", "max_tokens": 1})
                if answer.status_code == 200:
                    return time.monotonic()
            await asyncio.sleep(0.05)

    async def ask_in_turn(self, clients: int) -> dict[str, float]:
        """As many clients ask one after another."""
        await self._begin()
        chance = random.Random(1)

        async def client() -> None:
            while time.monotonic() < self.end:
                await self.one(chance)

        await asyncio.gather(*(client() for _ in range(clients)))
        return await self._figures()

    async def _begin(self) -> None:
        self.before = await self._now()
        self.end = time.monotonic() + self.seconds

    async def _now(self) -> tuple[float, float, float]:
        """The time, the server's processor time, and the answers that it has given."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        ended = [line for line in lines if "request_success_total{" in line]
        return time.monotonic(), processes.cpu_seconds(self.pid), sum(float(line.split()[-1]) for line in ended)

    async def _figures(self) -> dict[str, float]:
        seconds, cpu, answered = (now - before for now, before in zip(await self._now(), self.before, strict=True))
        return {"answered_per_s": round(answered / seconds, 2), "answered_per_cpu_s": round(answered / cpu, 2)}


async def measure(url: str, pid: int, seconds: float) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=traffic.ANSWER_WITHIN_S, limits=soak.CONNECTIONS) as http:
        for peak_seconds in (seconds / 4, seconds):  # the first to warm up
            peak = await Load(http, pid, peak_seconds, True).ask_in_turn(soak.MAX_RUNNING + soak.MAX_WAITING // 2)
        print(json.dumps({"peak": peak}), flush=True)
        for obeys in (False, True):
            for times in (1, 2, 3):
                figures = await Load(http, pid, seconds, obeys).come(times * peak["answered_per_s"])
                print(json.dumps({"times": times, **figures}), flush=True)
        again = await Load(http, pid, seconds, True).ask_in_turn(soak.MAX_RUNNING + soak.MAX_WAITING // 2)
        print(json.dumps({"peak_afterwards": again}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="as for soak")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("server", nargs="*", help="options of mini-sglang serve, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(soak.tiny_model(folder)) if options.model == "tiny" else options.model
        command = [sys.executable, "-m", "mini_sglang", "serve", *soak.SERVER, "--model", model, *options.server]
        with (folder / "log").open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            asyncio.run(_measure(process, folder / "log", options.seconds))
        finally:
            process.terminate()
            process.wait()
    return 0


async def _measure(process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    await measure(await soak.address(process, log), process.pid, seconds)


if __name__ == "__main__":
    sys.exit(main())
