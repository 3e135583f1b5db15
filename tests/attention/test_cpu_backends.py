"""The CPU backends equal attention written out in float64, over any page table."""

from __future__ import annotations

import random

import pytest
import torch

from mini_sglang.attention.base import AttentionBackend, AttentionMetadata
from mini_sglang.attention.cpu_backend import CpuBackend
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.kernels.cpu_kernels import CpuKernels


def make_backend(name: str, pool: KVPool) -> AttentionBackend:
    if name == "reference":
        return ReferenceBackend(pool, torch.float32)
    return CpuBackend(pool, torch.float32, CpuKernels(torch.float32))


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """q [count, heads, d] at positions start and after; k, v [start + count, kv_heads, d] -> like q, in float64"""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        for i in range(q.shape[0]):
            seen = start + i + 1
            scores = keys[:seen] @ q[i, head].double() / q.shape[2] ** 0.5
            out[i, head] = scores.softmax(-1) @ values[:seen]
    return out


@pytest.mark.parametrize("backend", ["reference", "cpu"])
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
def test_equals_float64(
    backend: str, page_size: int, heads: int, kv_heads: int, head_dim: int, shapes: list[tuple[int, int]]
) -> None:
    """`shapes` are (start, count) per row; pages are handed out in random order."""
    torch.manual_seed(0)
    lengths = [start + count for start, count in shapes]
    pages_of = [-(-length // page_size) for length in lengths]
    num_pages = sum(pages_of) + 3
    pool = KVPool(
        num_layers=2,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for layer in pool.layers:
        layer.normal_()  # what a page held before must not matter
    ids = random.Random(1).sample(range(num_pages), sum(pages_of))
    table = torch.zeros(len(shapes), max(pages_of), dtype=torch.int64)
    for row, count in enumerate(pages_of):
        table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
    keys = [torch.randn(length, kv_heads, head_dim) for length in lengths]
    values = [torch.randn(length, kv_heads, head_dim) for length in lengths]

    def cells(row: int, positions: range) -> torch.Tensor:
        index = torch.tensor(positions, dtype=torch.int64)
        return table[row, index // page_size] * page_size + index % page_size

    for row, (start, _) in enumerate(shapes):
        pool.cells(1, cells(row, range(start))).store(keys[row][:start], values[row][:start])
    spans = [range(start, start + count) for start, count in shapes]
    plan = make_backend(backend, pool).plan(
        AttentionMetadata(
            starts=[start for start, _ in shapes],
            counts=[count for _, count in shapes],
            page_table=table,
            cells=torch.cat([cells(row, span) for row, span in enumerate(spans)]),
        )
    )
    q = torch.randn(sum(count for _, count in shapes), heads, head_dim)
    new_k = torch.cat([keys[row][span.start :] for row, span in enumerate(spans)])
    new_v = torch.cat([values[row][span.start :] for row, span in enumerate(spans)])
    plan.target(1).store(new_k, new_v)
    out = plan.attend(q, 1)

    first = 0
    for row, (start, count) in enumerate(shapes):
        expected = naive_attention(q[first : first + count], keys[row], values[row], start)
        torch.testing.assert_close(out[first : first + count].double(), expected, atol=1e-5, rtol=1e-5)
        first += count


def test_page_copies_read_every_source_before_writing() -> None:
    """A page may be the source of one copy and the destination of another in the same step."""
    pool = KVPool(
        num_layers=1,
        num_pages=3,
        page_size=2,
        num_kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool.layers[0][:] = torch.arange(3.0).view(1, 3, 1, 1, 1)
    pool.copy_pages([(0, 1), (1, 2)])
    assert pool.layers[0][0, :, 0, 0, 0].tolist() == [0, 0, 1]
