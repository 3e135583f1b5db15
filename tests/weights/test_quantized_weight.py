"""A rank's part of a quantised matrix is that part of the dense matrix, wherever the cut goes, and zeros beyond it."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.parallel.sharding import Shard, copy_shard, shard_evenly, whole
from mini_sglang.weights.quantized_weight import QuantizedWeight

KINDS = ("float8", "int8", "4 bits")


def weight(kind: str, rows: int, columns: int, group: int, *, seed: int = 0) -> QuantizedWeight:
    """Random values, with minimums where there are 4 bits; one group is of zeros."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    low, high = {"float8": (-448, 448), "int8": (-128, 128), "4 bits": (0, 16)}[kind]
    q = torch.randint(low, high, (rows, columns), generator=generator)
    scale = torch.rand(rows, groups, generator=generator) + 0.1
    minimum = torch.randn(rows, groups, generator=generator) if kind == "4 bits" else None
    for values in (scale, *(() if minimum is None else (minimum,))):
        values[1, -1] = 0
    dtype = {"float8": torch.float8_e4m3fn, "int8": torch.int8, "4 bits": torch.uint8}[kind]
    return QuantizedWeight(q.float().to(dtype) if kind == "float8" else q.to(dtype), scale, minimum, group)


def dense_part(whole_weight: QuantizedWeight, rows: Shard, columns: Shard) -> torch.Tensor:
    target = torch.full((rows.size, columns.size), torch.nan)
    copy_shard(target, whole_weight.dense(), rows, columns)
    return target


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("group", [32, 64, 128, 384])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_along_inputs_is_that_part_of_the_dense_matrix(kind: str, group: int, ranks: int) -> None:
    """384 inputs for 2 and 3 ranks are cut along groups of 32 and 64, and through those of 128 and the whole row."""
    stored = weight(kind, 5, 384, group)
    parts = [stored.shard(whole(5), shard_evenly(384, rank, ranks, 16)) for rank in range(ranks)]
    assert len({part.group_size for part in parts if part is not None}) == 1
    for rank, part in enumerate(parts):
        assert part is not None
        assert part.q.dtype == stored.q.dtype
        assert torch.equal(part.dense(), dense_part(stored, whole(5), shard_evenly(384, rank, ranks, 16)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_has_nothing_has_zeros_even_where_its_part_is_as_large_as_the_whole(kind: str) -> None:
    stored, nothing = weight(kind, 16, 64, 32), shard_evenly(16, 1, 2, 16)
    assert nothing.size == 16
    part = stored.shard(nothing, whole(64))
    assert part is not None
    assert not part.dense().any()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_along_outputs_is_padded_with_zeros(kind: str, ranks: int) -> None:
    stored = weight(kind, 33, 70, 32)
    for rank in range(ranks):
        rows = shard_evenly(33, rank, ranks, 16)
        part = stored.shard(rows, whole(70))
        assert part is not None
        assert part.group_size == 32
        assert torch.equal(part.dense(), dense_part(stored, rows, whole(70)))


@pytest.mark.parametrize("group", [32, 64, 160])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_inputs_that_are_no_multiple_are_padded_with_zeros(ranks: int, group: int) -> None:
    stored = weight("float8", 5, 160, group)
    for rank in range(ranks):
        columns = shard_evenly(160, rank, ranks, 16)
        part = stored.shard(whole(5), columns)
        assert part is not None
        assert torch.equal(part.dense(), dense_part(stored, whole(5), columns))


def test_a_rank_that_is_left_without_inputs_has_zeros() -> None:
    for group in (32, 64):
        for kind in KINDS:
            part = weight(kind, 5, 64, group).shard(whole(5), shard_evenly(64, 2, 3, 64))
            assert part is not None
            assert not part.dense().any()


def test_groups_that_are_cut_become_smaller_but_not_too_small() -> None:
    stored = weight("4 bits", 5, 384, 128)
    assert [
        None if (part := stored.shard(whole(5), Shard(384, 0, size, size))) is None else part.group_size
        for size in (128, 64, 96, 48, 56)
    ] == [128, 64, 32, 16, None]
    assert stored.shard(whole(5), Shard(384, 24, 88, 64)) is None  # begins within a group of 64
    assert weight("4 bits", 5, 64, 8).shard(whole(5), Shard(64, 0, 32, 32)) is not None  # small as it is stored


@pytest.mark.parametrize(("group", "last"), [(160, Shard(160, 112, 160, 56)), (64, Shard(160, 128, 160, 64))])
def test_a_group_with_a_minimum_is_not_padded(group: int, last: Shard) -> None:
    """There are no q for which the minimum is 0."""
    assert weight("4 bits", 5, 160, group).shard(whole(5), last) is None
    stored = weight("int8", 5, 160, group)
    part = stored.shard(whole(5), last)
    assert part is not None
    assert torch.equal(part.dense(), dense_part(stored, whole(5), last))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_fit_each_other_stand_in_one_matrix(kind: str) -> None:
    parts = [weight(kind, rows, 70, 32, seed=rows) for rows in (3, 5, 2)]
    assert all(part.fits(parts[0]) for part in parts)
    assert torch.equal(QuantizedWeight.stacked(parts).dense(), torch.cat([part.dense() for part in parts]))
    assert not weight(kind, 3, 70, 64).fits(parts[0])
    assert not weight("int8" if kind != "int8" else "float8", 3, 70, 32).fits(parts[0])


def test_a_part_without_minimums_may_stand_above_one_that_has_them() -> None:
    with_minimum = weight("4 bits", 3, 64, 32)
    without = QuantizedWeight(with_minimum.q, with_minimum.scale, None, 32)
    stacked = QuantizedWeight.stacked([without, with_minimum])
    assert torch.equal(stacked.dense(), torch.cat([without.dense(), with_minimum.dense()]))
    assert QuantizedWeight.stacked([without, without]).minimum is None
