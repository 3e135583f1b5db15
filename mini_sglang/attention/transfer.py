"""Copies numbers from the host to a device without waiting for it.

A copy from ordinary memory blocks the host until the device has done all that was queued before; one from pinned memory
is queued like everything else. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def send(numbers: Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`numbers`, nested or not, as a tensor on `device`; integers are int64 unless `dtype` is given."""
    return staged(numbers, device, dtype).to(device, non_blocking=True)


def staged(numbers: Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`numbers` as a tensor on the host that `device` can copy by itself: pinned, unless the device is a CPU."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type != "cpu")
