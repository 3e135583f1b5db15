"""The memory of this machine, and what of it a new program may take. In bytes."""

from __future__ import annotations

import os
import re
from pathlib import Path


def total_memory() -> int:
    """Of this machine; a container may be allowed less."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """What new programs can take of this machine's memory, and of what this container is allowed.

    Where the system does not say, it is all memory.
    """
    available = [total_memory()]
    if meminfo.exists() and (line := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        available.append(int(line[1]) << 10)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if (group / limit).exists() and (number := (group / limit).read_text().strip()) != "max":
            available.append(max(0, int(number) - int((group / used).read_text())))
    return min(available)
