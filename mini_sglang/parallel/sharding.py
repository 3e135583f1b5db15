"""What each rank holds of a dimension that tensor parallelism cuts up: numbers, and copies of the parts that they name.

Nothing has to divide: what is missing at the end is padded with zeros, which add nothing to any result. It knows no
layer and no process group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    """One rank's part of `full` elements: from `start` to `stop`, then zeros up to `size`, which all ranks share."""

    full: int
    start: int
    stop: int
    size: int

    def times(self, width: int) -> Shard:
        """The same part in units of which `width` make one of these: rows instead of heads, say."""
        return Shard(self.full * width, self.start * width, self.stop * width, self.size * width)


@dataclass(frozen=True)
class HeadShards:
    """One rank's heads of attention.

    As many query heads attend to each KV head as in the whole model, or a divisor of that number.
    """

    queries: Shard
    kv: Shard


def whole(full: int) -> Shard:
    """All of a dimension, on every rank."""
    return Shard(full, 0, full, full)


def shard_evenly(full: int, rank: int, ranks: int, multiple: int = 1) -> Shard:
    """Equal parts, rounded up to `multiple` so that they suit kernels; the last ranks hold less, or zeros alone."""
    if ranks == 1:
        return whole(full)
    size = -(-full // (ranks * multiple)) * multiple
    start = min(rank * size, full)
    return Shard(full, start, min(start + size, full), size)


def shard_heads(num_heads: int, num_kv_heads: int, rank: int, ranks: int) -> HeadShards:
    """Split any number of heads over any number of ranks.

    The unit is one KV head with some of its query heads, a divisor of their number. Units are dealt out in order, the
    same number to each rank. The larger a unit, the fewer ranks hold the same KV head; the smaller, the more evenly the
    ranks are loaded. The unit is chosen that leaves a rank the fewest KV heads, then the fewest query heads.
    """
    group = num_heads // num_kv_heads

    def per_rank(unit: int) -> tuple[int, int]:
        units = -(-num_heads // (unit * ranks))
        return units, units * unit

    unit = min((size for size in range(group, 0, -1) if group % size == 0), key=per_rank)
    units, queries = per_rank(unit)
    start = min(rank * queries, num_heads)
    stop = min(start + queries, num_heads)
    # a rank with several units has whole groups (see the tests), so its KV heads are consecutive, each once
    first = start // group
    return HeadShards(
        queries=Shard(num_heads, start, stop, queries),
        kv=Shard(num_kv_heads, first, first + -(-(stop - start) // unit), units),
    )


def copy_shard(target: torch.Tensor, source: torch.Tensor, *shards: Shard) -> None:
    """Fill `target` [each shard's size] with its part of `source` [each shard's full], converted, and with zeros.

    If `source` is a view of a mapped file, only this part of it is read.
    """
    lengths = [shard.stop - shard.start for shard in shards]
    if lengths != list(target.shape):
        target.zero_()
    part = source[tuple(slice(shard.start, shard.stop) for shard in shards)]
    target[tuple(slice(0, length) for length in lengths)].copy_(part)
