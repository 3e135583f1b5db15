"""The time of one kernel, as reports and JSON have it. Without Triton, so that a report can be made anywhere."""

from __future__ import annotations

from dataclasses import dataclass

GROUPS = ("decode", "prefill", "linear", "experts", "small")  # of kernels; `small` lies between the products


@dataclass(frozen=True)
class KernelTime:
    """How long one call took, beside the least it could have."""

    group: str
    kernel: str
    shape: str
    microseconds: float
    bytes: int
    flops: int
    of_ceiling: float  # the time that bytes or FLOPs need at the ceiling, whichever is longer, over the time taken
    of_cudnn: float | None = None  # prefill attention: cuDNN's time over this one
