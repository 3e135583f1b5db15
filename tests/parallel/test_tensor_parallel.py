"""Sums, columns and minima over ranks: here threads, each of which holds one end of a process group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from mini_sglang.parallel.tensor_parallel import SINGLE, TensorParallel, connect_cpus

OnRanks = Callable[[Callable[[TensorParallel], Any]], list[Any]]


@pytest.fixture(params=[2, 3])
def on_ranks(request: pytest.FixtureRequest, tmp_path: Path) -> OnRanks:
    """`on_ranks(work)` → what `work(parallel)` gives on each rank"""
    size = request.param

    def run(work: Callable[[TensorParallel], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            parallel = connect_cpus(FileStore(str(tmp_path / "store"), size), rank, size, "127.0.0.1")
            return work(parallel)

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size)))

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_have_the_same_bits_on_all_ranks(on_ranks: OnRanks, dtype: torch.dtype) -> None:
    def part(rank: int) -> torch.Tensor:
        return torch.randn(5, 7, generator=torch.Generator().manual_seed(rank)).to(dtype)

    sums = on_ranks(lambda parallel: parallel.all_reduce(part(parallel.rank)))
    expected = torch.stack([part(rank).double() for rank in range(len(sums))]).sum(0)
    assert all(total.equal(sums[0]) for total in sums)
    torch.testing.assert_close(sums[0].double(), expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_residual_is_added_once_and_does_not_round_the_parts(on_ranks: OnRanks, deterministic: bool) -> None:
    def part(rank: int) -> torch.Tensor:
        return torch.randn(64, 64, generator=torch.Generator().manual_seed(rank)).bfloat16()

    residual = 100 * part(7)

    def work(parallel: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
        assert parallel._collectives is not None
        parallel._collectives._deterministic = deterministic
        mine = part(parallel.rank)
        together = parallel.all_reduce(mine.clone(), residual.clone())
        return together, parallel.all_reduce(mine + residual if parallel.rank == 0 else mine)

    sums = on_ranks(work)
    expected = torch.stack([residual, *(part(rank) for rank in range(len(sums)))]).double().sum(0)
    errors = [(total.double() - expected).square().mean().sqrt() for total in sums[0]]
    assert errors[0] < 0.85 * errors[1]
    assert all(together.equal(sums[0][0]) for together, _ in sums)


def test_deterministic_sums_have_the_bits_of_each_row_alone(on_ranks: OnRanks) -> None:
    def parts(rank: int) -> torch.Tensor:
        return torch.randn(5, 7, generator=torch.Generator().manual_seed(rank)).bfloat16()

    residual = 100 * parts(7)

    def work(parallel: TensorParallel) -> torch.Tensor:
        assert parallel._collectives is not None
        parallel._collectives._deterministic = True
        mine = parts(parallel.rank)
        together = parallel.all_reduce(mine.clone(), residual)
        rows = zip(mine.split(1), residual.split(1), strict=True)
        assert together.equal(torch.cat([parallel.all_reduce(row.clone(), below) for row, below in rows]))
        return together

    sums = on_ranks(work)
    expected = torch.zeros(5, 7)
    for rank in range(len(sums)):
        expected += parts(rank)
    expected += residual
    assert all(total.equal(expected.bfloat16()) for total in sums)


@pytest.mark.parametrize("width", [1, 4, 5, 8])
def test_columns_are_joined_and_padding_is_cut_off(on_ranks: OnRanks, width: int) -> None:
    whole = torch.arange(3 * width).view(3, width).float()

    def gather(parallel: TensorParallel) -> list[torch.Tensor]:
        columns = -(-width // parallel.size)
        part = torch.zeros(3, columns)
        mine = whole[:, parallel.rank * columns :][:, :columns]
        part[:, : mine.shape[1]] = mine
        out = torch.empty(3, width)
        assert parallel.all_gather(part, width, out) is out
        return [parallel.all_gather(part, width), out]

    for joined in on_ranks(gather):
        assert all(result.equal(whole) for result in joined)


def test_nothing_is_sent_for_no_rows(on_ranks: OnRanks) -> None:
    shapes = on_ranks(
        lambda parallel: (parallel.all_reduce(torch.empty(0, 4)).shape, parallel.all_gather(torch.empty(0, 4), 7).shape)
    )
    assert set(shapes) == {((0, 4), (0, 7))}


def test_the_minimum_of_all_ranks(on_ranks: OnRanks) -> None:
    assert set(on_ranks(lambda parallel: parallel.minimum(10 + parallel.rank))) == {10}


def test_one_rank_is_the_identity() -> None:
    x = torch.ones(2, 3)
    assert SINGLE.all_reduce(x) is x
    assert SINGLE.all_reduce(x.clone(), x).equal(2 * x)
    assert SINGLE.all_gather(x, 3) is x
    assert SINGLE.minimum(7) == 7


def test_several_ranks_need_collectives() -> None:
    with pytest.raises(ValueError, match="2 ranks need collectives"):
        TensorParallel(0, 2)
