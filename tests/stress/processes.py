"""What the processes of a server hold: memory, descriptors and threads, read from Linux's /proc; and whether it grows.

Knows no HTTP and no request.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_GROWTH = 0.05  # of resident memory
MORE_HANDLES = 8  # descriptors or threads that may come late: pools grow to their size with use


@dataclass(frozen=True)
class Held:
    """What one process holds at one moment."""

    resident_mb: float
    descriptors: int
    threads: int


def tree(pid: int) -> Iterator[int]:
    """A process and all that it has started, parents first."""
    yield pid
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread or a process that has just ended
            children += map(int, task.read_text().split())
    for child in children:
        yield from tree(child)


def held(pid: int) -> Held:
    """What a process holds now. Raises OSError if it has ended."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident_kb = int(fields.get("VmRSS", "0 kB").split()[0])  # a zombie has none
    return Held(resident_kb / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))


def cpu_seconds(pid: int) -> float:
    """Processor time that a process and all that it has started have used."""
    ticks = 0
    for each in tree(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def name(pid: int) -> str:
    """What a process runs: `engine_process` for `python -m mini_sglang.ipc.engine_process …`."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    module = words[words.index("-m") + 1] if "-m" in words else " ".join(words)[:40]
    return module.rpartition(".")[2]


def growth(who: str, series: Sequence[Held]) -> list[str]:
    """What has grown since the first of a process's figures, all taken at rest and after warm-up."""
    if not series:
        return []
    first, last = series[0], series[-1]
    problems = []
    if last.resident_mb > first.resident_mb * (1 + MOST_GROWTH):
        problems.append(f"{who}: memory grew from {first.resident_mb:.0f} to {last.resident_mb:.0f} MB")
    for what, before, after in (
        ("descriptors", first.descriptors, last.descriptors),
        ("threads", first.threads, last.threads),
    ):
        if after > before + MORE_HANDLES:
            problems.append(f"{who}: {what} grew from {before} to {after}")
    return problems
