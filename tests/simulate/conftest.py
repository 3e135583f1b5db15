"""A replica whose times are round numbers."""

from __future__ import annotations

import pytest

from mini_sglang.simulate.cost import DeviceTimes, HostTimes, ReplicaCost

SETTINGS = {
    "page_size": 16,
    "num_pages": 512,
    "cache": "radix",
    "context_length": 4096,
    "max_running_requests": 32,
    "max_prefill_tokens": 256,
    "max_step_ms": 0,
    "schedule": "fcfs",
    "run_ahead": 0,
}


@pytest.fixture
def cost() -> ReplicaCost:
    """A step takes 10 ms and 100 µs for each token of a prompt; the host 1 ms."""
    return ReplicaCost(dict(SETTINGS), DeviceTimes(10_000, 0, 0, 100, 0), HostTimes(1000))
