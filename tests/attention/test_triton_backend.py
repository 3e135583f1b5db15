"""The Triton backend computes what the reference backend computes, over any page table and any mix of rows."""

from __future__ import annotations

import random

import pytest
import torch

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.attention.triton_backend import TritonBackend
from mini_sglang.kernels.paged_decode import DecodeTuning

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 64), (8, 1, 32)])
@pytest.mark.parametrize(
    "shapes",
    [
        [(0, 1)],
        [(5, 1), (0, 1), (37, 1)],
        [(0, 7)],
        [(20, 5), (3, 1), (0, 33), (16, 1)],
        [(2, 1), (1, 2)],
    ],
    ids=["first token", "decodes", "prompt", "mixed", "chunk of two"],
)
def test_equals_the_reference(
    page_size: int, heads: int, kv_heads: int, head_dim: int, shapes: list[tuple[int, int]]
) -> None:
    """`shapes` are (start, count) per row; pages are handed out in random order; two steps follow each other."""
    torch.manual_seed(0)
    lengths = [start + count + 1 for start, count in shapes]
    pages_of = [-(-length // page_size) for length in lengths]
    num_pages = sum(pages_of) + 3
    pools = [
        KVPool(
            num_layers=2,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=DEVICE,
        )
        for dtype in (torch.float32, torch.float64)
    ]
    for layer, exact in zip(*(pool.layers for pool in pools), strict=True):
        exact.copy_(layer.normal_())  # the prefix, and what a page held before
    ids = random.Random(1).sample(range(num_pages), sum(pages_of))
    table = torch.zeros(len(shapes), max(pages_of), dtype=torch.int64)
    for row, count in enumerate(pages_of):
        table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])

    def metadata(rows: list[tuple[int, int]]) -> AttentionMetadata:
        cells = []
        for row, (start, count) in enumerate(rows):
            positions = torch.arange(start, start + count)
            cells.append(table[row, positions // page_size] * page_size + positions % page_size)
        return AttentionMetadata(
            starts=[start for start, _ in rows],
            counts=[count for _, count in rows],
            page_table=table.to(DEVICE),
            cells=torch.cat(cells).to(DEVICE),
        )

    backend = TritonBackend(
        pools[0],
        num_heads=heads,
        dtype=torch.float32,
        max_rows=len(shapes),
        split_tokens=16,
        tuning=DecodeTuning(block_tokens=16, max_splits=2),
    )
    reference = ReferenceBackend(pools[1], torch.float64)
    decodes = [(start + count, 1) for start, count in shapes]
    for rows in (shapes, decodes):
        step = metadata(rows)
        tokens = sum(step.counts)
        q = torch.randn(tokens, heads, head_dim, device=DEVICE)
        k, v = torch.randn(2, tokens, kv_heads, head_dim, device=DEVICE).unbind()
        plan, exact_plan = backend.plan(step), reference.plan(step)
        plan.target(1).store(k, v)
        exact_plan.target(1).store(k.double(), v.double())
        out, expected = plan.attend(q, 1), exact_plan.attend(q.double(), 1)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
