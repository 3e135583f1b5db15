"""A trace of what one process does for a while, in Chrome's format: torch.profiler, with named regions of our own.

It knows no engine and no step.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class Tracer:
    """Traces until `stop`: PyTorch's operations and the named regions, and on a GPU its kernels and copies.

    Raises OSError if `folder` cannot be made.
    """

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = time.strftime(f"mini-sglang-%Y%m%d-%H%M%S-{os.getpid()}.json")
        self.path = str((Path(folder) / name).resolve())
        self._on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    def region(self, name: str) -> AbstractContextManager[object]:
        """A context manager around a block that the trace shows under this name."""
        return record_function(name)

    def stop(self) -> None:
        """Write the trace to `path`; waits for the device, and takes seconds if the trace is long. Raises OSError."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profile.stop()
        Path(self.path).touch()  # raises what is wrong; the exporter's own error would not say
        self._profile.export_chrome_trace(self.path)
