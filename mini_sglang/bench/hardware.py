"""What this machine is and what it reaches at best: a device copy and one large matrix product, timed.

Knows tensors and clocks, no model and no engine.
"""

from __future__ import annotations

import datetime
import itertools
import platform
import statistics
import timeit
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec

import torch

from mini_sglang import __version__
from mini_sglang.bench.roofline import Ceilings

_WARM_UPS = 3
_REPEATS = 15


def describe(device: torch.device) -> dict[str, str]:
    """Card, versions and date, to stand beside every figure."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "date": datetime.date.today().isoformat(),
        "mini_sglang": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "triton", "transformers") if find_spec(name)},
        **({"cuda": str(torch.version.cuda)} if on_gpu else {}),
    }


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Copy 1 GiB (a CPU: 256 MiB), multiply squares of 8192 (1024) of `dtype`; medians."""
    on_gpu = device.type == "cuda"
    source = torch.randn(2**28 if on_gpu else 2**26, device=device)
    target = torch.empty_like(source)
    copying = seconds_per_call(lambda: target.copy_(source), device)
    size = 8192 if on_gpu else 1024
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    multiplying = seconds_per_call(lambda: a @ b, device)
    return Ceilings(2 * source.nbytes / copying, 2 * size**3 / multiplying)


def seconds_per_call(work: Callable[[], object], device: torch.device) -> float:
    """The median time of `work`: on a GPU between events in its stream, else by the clock."""
    for _ in range(_WARM_UPS):
        work()
    if device.type != "cuda":
        return statistics.median(timeit.repeat(work, number=1, repeat=_REPEATS))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    milliseconds: list[float] = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return statistics.median(milliseconds) / 1e3


def seconds_in_graph(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """The median time of one of `calls`, which run one after another in replays of one CUDA graph.

    Let each call have inputs of its own, larger together than the L2 cache, or the cache is measured.
    """
    for call in calls:  # compiles what is compiled on first use
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return seconds_per_call(graph.replay, device) / len(calls)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a configuration's, such as "bfloat16"."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype
