"""Sums by writing into the other ranks' inboxes: processes that share memory, each running the kernel as a rank."""

from __future__ import annotations

import pytest
import torch
from torch import multiprocessing

from mini_sglang.kernels.triton.one_shot_all_reduce import one_shot_all_reduce

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="shares a CPU's memory: the interpreter's test")

SIZES = (8, 1536, 1032, 8)  # the kernel's block is 512 words
CAPACITY = 1536
SPAWN = multiprocessing.get_context("spawn")


def terms(ranks: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """What each rank adds to each of a row of sums"""
    draw = torch.Generator().manual_seed(0)
    return [[torch.randn(2, size // 2, generator=draw).to(dtype) for size in SIZES] for _ in range(ranks)]


def residuals(dtype: torch.dtype) -> list[torch.Tensor | None]:
    """What is added to every second of these sums: large beside the terms"""
    draw = torch.Generator().manual_seed(1)
    large = [(100 * torch.randn(2, size // 2, generator=draw)).to(dtype) for size in SIZES]
    return [residual if index % 2 else None for index, residual in enumerate(large)]


def run_rank(rank: int, inboxes: list[torch.Tensor], results: list[list[torch.Tensor]], dtype: torch.dtype) -> None:
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    count = torch.zeros(2, dtype=torch.int32)
    mine = terms(len(inboxes), dtype)[rank]
    for x, residual, result in zip(mine, residuals(dtype), results[rank], strict=True):
        one_shot_all_reduce(x, inboxes[rank], addresses, count, rank, residual)
        result.copy_(x)
    assert count.tolist() == [len(SIZES), 0]


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_every_rank_has_the_sum_in_the_order_of_the_ranks_and_then_the_residual(ranks: int, dtype: torch.dtype) -> None:
    inboxes = [torch.zeros(2, ranks, CAPACITY, dtype=torch.int64).share_memory_() for _ in range(ranks)]
    results = [[torch.zeros_like(x).share_memory_() for x in of_rank] for of_rank in terms(ranks, dtype)]
    processes = [SPAWN.Process(target=run_rank, args=(rank, inboxes, results, dtype)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for column, residual in enumerate(residuals(dtype)):
        expected = torch.zeros(2, SIZES[column] // 2)
        for of_rank in terms(ranks, dtype):
            expected += of_rank[column].float()
        if residual is not None:
            expected += residual.float()
        for of_rank in results:
            # the interpreter cuts a bfloat16 off where a GPU rounds it
            torch.testing.assert_close(
                of_rank[column], expected.to(dtype), rtol=2**-7 * (dtype != torch.float32), atol=0
            )
        assert all(torch.equal(of_rank[column], results[0][column]) for of_rank in results)


def test_a_sum_larger_than_the_inbox_is_refused() -> None:
    inbox = torch.zeros(2, 2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="exceeds the inbox's 32"):
        one_shot_all_reduce(
            torch.zeros(16), inbox, torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), 0
        )
