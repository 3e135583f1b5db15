"""The pool moves whole pages, and stores keys and values in its own dtype."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from mini_sglang.attention import kv_pool
from mini_sglang.attention.kv_pool import KVPool

FP8 = torch.float8_e4m3fn


def make_pool(dtype: torch.dtype, *, num_layers: int = 1, num_pages: int = 3, head_dim: int = 1) -> KVPool:
    return KVPool(
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=2,
        num_kv_heads=1,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("bytes_at_once", [1, 64, 1 << 20])  # keys or values of a layer at a time, a few, all
def test_page_copies_read_every_source_before_writing(
    dtype: torch.dtype, bytes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page may be the source of one copy and the destination of another in the same step."""
    monkeypatch.setattr(kv_pool, "_COPY_BYTES", bytes_at_once)
    pool = make_pool(dtype, num_layers=5)
    for index, layer in enumerate(pool.layers):  # values are the keys' negatives
        layer.copy_(torch.tensor([1, -1]).view(2, 1, 1, 1, 1) * (3 * index + torch.arange(3)).view(1, 3, 1, 1, 1))
    pool.copy_pages([(0, 1), (1, 2)])
    for index, layer in enumerate(pool.layers):
        keys, values = layer.flatten(2).tolist()
        assert keys == [[3 * index] * 2, [3 * index] * 2, [3 * index + 1] * 2]
        assert values == [[-key for key in page] for page in keys]


def test_float8_rounds_to_nearest_and_saturates() -> None:
    pool = make_pool(FP8, head_dim=8)
    k = torch.tensor([[[0.1, -1.0, 17.0, 448.0, 449.0, -1e6, float("inf"), 2e-3]]], dtype=torch.bfloat16)
    pool.cells(0, torch.tensor([3])).store(k, -k)
    wanted = [0.1015625, -1.0, 16.0, 448.0, 448.0, -448.0, 448.0, 2**-9]
    assert pool.key_cells[0][3, 0].tolist() == wanted
    assert pool.value_cells[0][3, 0].tolist() == [-number for number in wanted]
    assert pool.gather(0, torch.tensor([1]))[0, 1, 0].tolist() == wanted


def test_a_page_of_float8_takes_half_of_bfloat16() -> None:
    sizes = {"num_layers": 3, "page_size": 16, "num_kv_heads": 2, "head_dim": 64}
    assert KVPool.bytes_per_page(dtype=FP8, **sizes) == 2 * 3 * 16 * 2 * 64
    assert KVPool.bytes_per_page(dtype=torch.bfloat16, **sizes) == 2 * 2 * 3 * 16 * 2 * 64


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_take_memory_when_they_are_first_written() -> None:
    before = resident_bytes()
    pool = make_pool(torch.float32, num_layers=4, num_pages=1 << 13, head_dim=1024)  # half a GiB
    empty = resident_bytes()
    assert empty - before < 64 << 20
    assert pool.layers[3][1, -1].count_nonzero() == 0
    pool.layers[0].fill_(1)
    assert resident_bytes() - empty > 0.9 * pool.layers[0].nbytes


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
