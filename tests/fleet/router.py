"""A router in a process of its own, in front of real servers: SGLang's, or one of those that have grown out of it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tests.tiny import RunningServer, until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def routed(log: Path, workers: Sequence[RunningServer], *options: str, package: str = "sglang_router") -> Iterator[str]:
    """The router's address, once it knows the workers' model."""
    port = free_port()
    command = (
        *(sys.executable, "-m", f"{package}.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(free_port()), "--worker-urls", *(w.url for w in workers)),
        *("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"),
    )
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *options], stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _serves(url), limit_s=60)
        yield url
    finally:
        process.terminate()
        process.wait()


def _serves(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/v1/models").json().get("data"))
    except (httpx.HTTPError, ValueError):
        return False
