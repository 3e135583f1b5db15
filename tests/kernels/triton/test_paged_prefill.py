"""Paged prefill attention equals its twin in float64 over ragged batches with prefixes in the pool."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mini_sglang.kernels.triton.paged_prefill import (
    PrefillTuning,
    paged_prefill,
    paged_prefill_reference,
    prefill_tiles,
    prefill_tuning,
)

MakePagedKV = Callable[..., Any]
SMALL = PrefillTuning(block_queries=16, block_tokens=16, num_warps=4, num_stages=2)
ROWS = [(20, 5), (3, 0), (0, 33), (40, 2), (0, 1)]  # (start, count); a row of count 0 is none of this kernel's
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check(
    make_paged_kv: MakePagedKV,
    device: torch.device,
    rows: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    tuning: PrefillTuning = SMALL,
    window: int | None = None,
    seed: int = 0,
) -> None:
    """One launch over `rows` gives what the twin gives; what no row computes stays NaN."""
    lengths = [start + count for start, count in rows]
    kv = make_paged_kv(lengths, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, seed=seed)
    starts, counts = [start for start, _ in rows], [count for _, count in rows]
    firsts = [1 + sum(counts[:row]) + row for row in range(len(rows))]  # with a token of someone else in between
    total = sum(counts) + len(rows) + 1
    torch.manual_seed(seed)
    q = torch.randn(total, heads + 2, head_dim).to(device, dtype)[:, :heads]
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=device)
    wanted = torch.full(q.shape, float("nan"), dtype=torch.float64, device=device)
    vectors = [torch.tensor(values, dtype=torch.int32, device=device) for values in (starts, counts, firsts)]
    first_positions, num_tokens, q_starts = vectors
    tiles = torch.tensor(prefill_tiles(starts, counts, heads // kv_heads, tuning), device=device)
    operands = (q, kv.keys, kv.values, kv.page_table, first_positions, num_tokens, q_starts)
    paged_prefill(*operands, tiles, out, page_size=page_size, tuning=tuning, window=window)
    paged_prefill_reference(*operands, wanted, page_size=page_size, window=window)
    assert torch.equal(out.isnan(), wanted.isnan())
    difference = (out.double() - wanted).nan_to_num().norm() / wanted.nan_to_num().norm()
    assert difference < TOLERANCE[dtype], f"relative error {difference:.2e}"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [
        (2, 2, 64, 1, torch.float32),
        (4, 2, 64, 16, torch.float16),
        (6, 2, 64, 64, torch.float32),
        (4, 1, 96, 16, torch.float32),
        (5, 1, 96, 1, torch.float16),
        (7, 1, 128, 64, torch.float16),
        (8, 1, 128, 16, torch.float32),
        (6, 1, 256, 16, torch.float32),
    ],
)
def test_equals_float64(
    make_paged_kv: MakePagedKV,
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    check(
        make_paged_kv,
        device,
        ROWS,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    )


@pytest.mark.parametrize("seed", range(4))
def test_equals_float64_at_random_chunks(make_paged_kv: MakePagedKV, device: torch.device, seed: int) -> None:
    rng = random.Random(seed)
    rows = [(rng.choice([0, rng.randint(1, 70)]), rng.randint(1, 40)) for _ in range(rng.randint(1, 4))]
    check(
        make_paged_kv,
        device,
        rows,
        heads=6,
        kv_heads=2,
        head_dim=32,
        page_size=rng.choice([1, 3, 16, 64]),
        dtype=torch.float32,
        seed=seed,
    )


@pytest.mark.parametrize("window", [1, 7, 16, 100])
def test_a_window_hides_what_lies_before_it(make_paged_kv: MakePagedKV, device: torch.device, window: int) -> None:
    check(
        make_paged_kv,
        device,
        ROWS,
        heads=2,
        kv_heads=1,
        head_dim=64,
        page_size=16,
        dtype=torch.float32,
        window=window,
    )


def test_long_tiles_start_first() -> None:
    tiles = prefill_tiles([0, 100], [32, 8], 2, SMALL)
    assert [(tile >> 20, tile & 0xFFFFF) for tile in tiles] == [(1, 0), (0, 24), (0, 16), (0, 8), (0, 0)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (9, 3, 64), (8, 8, 96), (16, 2, 256)]
)
def test_large_batches_equal_float64(
    make_paged_kv: MakePagedKV,
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    check(
        make_paged_kv,
        device,
        [(0, 700), (513, 300), (2000, 2), (64, 128), (0, 129), (1000, 0)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        tuning=prefill_tuning(head_dim, page_size, dtype, device),
    )
    check(
        make_paged_kv,
        device,
        [(0, 700), (513, 300)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        tuning=prefill_tuning(head_dim, page_size, dtype, device),
        window=200,
    )
