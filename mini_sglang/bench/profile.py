"""Where the device's time goes in a window of steps: attention, products, sums over ranks, other kernels, or nothing.

Reads torch.profiler's trace of what ran on a GPU; what is asked of it (`summarise`) is arithmetic over spans of time.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_KINDS = {  # by the names that kernels have here and in cuBLAS, cuDNN, FlashAttention, FlashInfer, NCCL and torch
    "all_reduce": re.compile(r"nccl|all_?reduce|all_?gather|symm_mem", re.IGNORECASE),
    "attention": re.compile(r"attention|attend|flash|fmha|_(decode|prefill|plan|plan_tiles)_kernel", re.IGNORECASE),
    "products": re.compile(r"gemm|gemv|matmul|linear|cutlass|nvjet|xmma|cublas|splitk", re.IGNORECASE),
}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # trace categories
_HOST_GAP_US = 5.0  # kernels of one graph follow within about 1 µs; a longer gap is a wait for the host
_NUM_TOP = 10


@dataclass(frozen=True)
class Span:
    """A kernel or copy on the device. Microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Profile:
    """One window, from the first span's start to the last one's end. Milliseconds; all but `top` sum up to it."""

    window: str
    steps: int
    attention_ms: float
    products_ms: float
    all_reduce_ms: float  # sums and exchanges over ranks, the wait for the other ranks included
    other_ms: float
    short_gaps_ms: float  # between kernels that follow each other
    host_gaps_ms: float  # in which the device had nothing to do
    top: list[tuple[str, float]]  # kernels that took most, and their milliseconds

    @property
    def elapsed_ms(self) -> float:
        return self.busy_ms + self.short_gaps_ms + self.host_gaps_ms

    @property
    def busy_ms(self) -> float:
        return self.attention_ms + self.products_ms + self.all_reduce_ms + self.other_ms

    @property
    def all_reduce_share(self) -> float:
        """Of the window, sums and exchanges over ranks."""
        return self.all_reduce_ms / self.elapsed_ms

    @property
    def idle_share(self) -> float:
        """Of the window, gaps of both kinds."""
        return 1 - self.busy_ms / self.elapsed_ms


class StepProfiler:
    """Profiles `steps` steps from each of the steps that `windows` names on; call it before every step.

    Entering a window waits for the device, so its first step does not overlap with the one before.
    """

    def __init__(self, windows: Mapping[str, int], steps: int) -> None:
        self.profiles: list[Profile] = []
        self._steps = steps
        self._starts = {first: name for name, first in windows.items()}
        self._running: profile | None = None
        self._window, self._end = "", 0
        self._start()  # the first start takes seconds and should be in no window
        self._stop()

    def __call__(self, step: int) -> None:
        if self._running is not None and step == self._end:
            self.finish()
        if self._running is None and step in self._starts:
            self._window, self._end = self._starts[step], step + self._steps
            self._start()

    def finish(self) -> None:
        """Close the window that is open, if one is: the run may end inside it."""
        if self._running is not None:
            self.profiles.append(summarise(self._stop(), self._window, self._steps))

    def _start(self) -> None:
        torch.cuda.synchronize()
        self._running = profile(activities=[ProfilerActivity.CUDA])
        self._running.start()

    def _stop(self) -> list[Span]:
        if self._running is None:
            raise RuntimeError("the profiler is not running")
        torch.cuda.synchronize()
        self._running.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._running.export_chrome_trace(str(path))
            self._running = None
            return spans_of(json.loads(path.read_text()))


def spans_of(trace: Mapping[str, list[dict[str, object]]]) -> list[Span]:
    """What ran on the device, from a trace in Chrome's format."""
    return [
        Span(str(event["name"]), float(event["ts"]), float(event["ts"]) + float(event["dur"]))  # type: ignore[arg-type]
        for event in trace["traceEvents"]
        if event.get("cat") in _ON_DEVICE
    ]


def summarise(spans: Iterable[Span], window: str, steps: int) -> Profile:
    """Each moment belongs to the kernel that began first; what begins inside another (overlapped launches) counts
    from its end. Raises ValueError if there are no spans.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    if not ordered:
        raise ValueError(f"window {window!r}: nothing ran on the device")
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    short_gaps = host_gaps = 0.0
    done = ordered[0].start
    for span in ordered:
        gap = max(0.0, span.start - done)
        if gap < _HOST_GAP_US:
            short_gaps += gap
        else:
            host_gaps += gap
        alone = max(0.0, span.end - max(span.start, done))
        kinds[_kind(span.name)] += alone  # type: ignore[assignment]
        names[span.name] += alone  # type: ignore[assignment]
        done = max(done, span.end)
    return Profile(
        window=window,
        steps=steps,
        attention_ms=kinds["attention"] / 1e3,
        products_ms=kinds["products"] / 1e3,
        all_reduce_ms=kinds["all_reduce"] / 1e3,
        other_ms=kinds["other"] / 1e3,
        short_gaps_ms=short_gaps / 1e3,
        host_gaps_ms=host_gaps / 1e3,
        top=[(name, time / 1e3) for name, time in names.most_common(_NUM_TOP)],
    )


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "other")
