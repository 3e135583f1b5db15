"""`mini-sglang deploy` in a process of its own, and what tests ask of its replicas."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.tiny import until

COMMAND = (sys.executable, "-m", "mini_sglang", "deploy")
ENGINE = ("--device", "cpu", "--num-threads", "1")


@dataclass(frozen=True)
class Deployment:
    """Replicas behind one address."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def ended(self) -> dict[str, int]:
        """How many requests each replica has ended."""
        ended: Counter[str] = Counter()
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith("mini_sglang:request_success_total{"):
                ended[line.split('"')[1]] += int(float(line.split()[-1]))
        return dict(ended)

    def engine_pids(self) -> dict[str, int]:
        """The engine's process of each replica that requests come to."""
        pids: dict[str, int] = {}
        for _ in range(8):  # an idle deployment answers by turns
            answer = httpx.get(f"{self.url}/server_info", timeout=60)
            pids[answer.headers["x-replica"]] = int(answer.json()["engine"]["pid"])
        return pids

    def ray_pid(self, title: str) -> int:
        """The process of Ray's with that title; of a deployment that has started Ray."""
        titled = [pid for pid in _all_pids() if _title(pid).startswith(f"ray::{title}")]
        [pid] = [pid for pid in titled if self.process.pid in _ancestors(pid)]
        return pid


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def deployed(log: Path, *options: str) -> Iterator[Deployment]:
    """A deployment with a Ray of its own, which ends with the block."""
    port = free_port()
    with log.open("wb") as file:
        process = subprocess.Popen([*COMMAND, "--port", str(port), *ENGINE, *options], stdout=file, stderr=file)
    try:
        wait_for_greeting(process, log)
        yield Deployment(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def wait_for_greeting(process: subprocess.Popen[bytes], log: Path, limit_s: float = 180) -> None:
    """Until it has said that it serves. Raises AssertionError with its log if it ends before."""
    deadline = time.monotonic() + limit_s
    while not any(line.startswith("Serving ") for line in log.read_text(errors="replace").splitlines()):
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.1)


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _title(pid: int) -> str:
    """What it calls itself, a method that it runs included; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _ancestors(pid: int) -> set[int]:
    found = set()
    while pid > 1:
        pid = parent_of(pid)
        found.add(pid)
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def kill(pid: int) -> None:
    """End a process of a deployment of this test's at once."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))
