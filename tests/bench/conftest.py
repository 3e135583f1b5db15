"""A scripted server in a process of its own, and a client of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripted_server() -> Iterator[Callable[..., str]]:
    """`scripted_server(ttft_ms=80, itl_ms=20, **more options)` → the address of a fresh one."""
    processes = []

    def start(**options: float) -> str:
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = (sys.executable, str(ROOT / "benchmarks" / "scripted_server.py"), *words)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process.stdout.readline().split()[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
