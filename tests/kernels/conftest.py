"""What the attention kernels' tests share: random keys and values behind random page tables.

Without a GPU the kernels run in Triton's interpreter, in float32 and float16 (its dot of bfloat16 is wrong).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of rows of given lengths. Cells that belong to no row are NaN, spare page ids are -1."""

    keys: torch.Tensor  # [num_cells, kv_heads, head_dim]
    values: torch.Tensor
    page_table: torch.Tensor  # [rows, max pages] int32


MakePagedKV = Callable[..., PagedKV]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def make_paged_kv(device: torch.device) -> MakePagedKV:
    """`make_paged_kv(lengths, page_size=, kv_heads=, head_dim=, dtype=, seed=0)`"""

    def make(
        lengths: list[int], *, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0
    ) -> PagedKV:
        pages = [-(-length // page_size) for length in lengths]
        num_pages = sum(pages) + 3
        ids = random.Random(seed).sample(range(num_pages), sum(pages))
        table = torch.full((len(lengths), max(*pages, 1)), -1, dtype=torch.int32)
        generator = torch.Generator().manual_seed(seed)
        shape = (num_pages * page_size, kv_heads, head_dim)
        keys, values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
        for row, length in enumerate(lengths):
            for page in range(pages[row]):
                table[row, page] = ids.pop()
            positions = torch.arange(length)
            cells = table[row, positions // page_size].long() * page_size + positions % page_size
            keys[cells] = torch.randn(length, kv_heads, head_dim, generator=generator)
            values[cells] = torch.randn(length, kv_heads, head_dim, generator=generator)
        return PagedKV(keys.to(device, dtype), values.to(device, dtype), table.to(device))

    return make
