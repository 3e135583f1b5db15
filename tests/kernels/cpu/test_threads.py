"""Every share of the work is done once, on as many threads as PyTorch has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import carray, cfunc

from mini_sglang.kernels.cpu.compiled import _pointer, next_share
from mini_sglang.kernels.cpu.kernels import SharedWork

SHARES = 10_000


@cfunc("void(voidptr)")  # type: ignore[untyped-decorator]
def count_up(data: Any) -> None:
    """Add 1 to the number of each share."""
    numbers = carray(data, (2,), np.int64)
    counts = carray(_pointer(numbers[1]), (SHARES,), np.int64)
    share = next_share(data)
    while share < SHARES:
        counts[share] += 1
        share = next_share(data)


@pytest.mark.parametrize("threads", [1, 4])
def test_every_share_is_taken_once(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        counts, work = torch.zeros(SHARES, dtype=torch.int64), SharedWork(count_up)
        for _ in range(20):
            work.run(counts.data_ptr())
        assert counts.tolist() == [20] * SHARES
    finally:
        torch.set_num_threads(before)
