"""What each rank holds of a dimension that tensor parallelism cuts up. Numbers, and copies of the parts they name.

Nothing has to divide: what is missing at the end is filled up with zeros, which add nothing to any result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    """Of `full` elements those from `start` to `stop`, then zeros up to `size`, which is the same on all ranks."""

    full: int
    start: int
    stop: int
    size: int

    def times(self, width: int) -> Shard:
        """The same where each element is `width` of another kind: heads as rows, say."""
        return Shard(self.full * width, self.start * width, self.stop * width, self.size * width)


@dataclass(frozen=True)
class HeadShards:
    """One rank's heads of attention: as many queries attend to each key and value head as in the whole model, or a
    divisor of it."""

    queries: Shard
    kv: Shard


def whole(full: int) -> Shard:
    """All of it, on every rank."""
    return Shard(full, 0, full, full)


def shard_evenly(full: int, rank: int, ranks: int, multiple: int = 1) -> Shard:
    """Equal parts, rounded up to `multiple` so that they suit kernels; the last ranks hold less, or zeros alone."""
    if ranks == 1:
        return whole(full)
    size = -(-full // (ranks * multiple)) * multiple
    start = min(rank * size, full)
    return Shard(full, start, min(start + size, full), size)


def shard_heads(num_heads: int, num_kv_heads: int, rank: int, ranks: int) -> HeadShards:
    """Any number of heads over any number of ranks.

    A unit is one KV head with some of its queries, a divisor of their number. Units are dealt out in order, the same
    number to each rank. The larger a unit, the fewer ranks hold the same KV head; the smaller, the more evenly they are
    loaded: the unit is chosen that leaves a rank the fewest KV heads, then the fewest queries.
    """
    group = num_heads // num_kv_heads

    def per_rank(unit: int) -> tuple[int, int]:
        units = -(-num_heads // (unit * ranks))
        return units, units * unit

    unit = min((size for size in range(group, 0, -1) if group % size == 0), key=per_rank)
    units, queries = per_rank(unit)
    start = min(rank * queries, num_heads)
    stop = min(start + queries, num_heads)
    # a rank with several units has whole groups, see tests: its KV heads follow each other, each once
    first = start // group
    return HeadShards(
        queries=Shard(num_heads, start, stop, queries),
        kv=Shard(num_kv_heads, first, first + -(-(stop - start) // unit), units),
    )


def copy_shard(target: torch.Tensor, source: torch.Tensor, *shards: Shard) -> None:
    """Fill `target` [each shard's size] with its parts of `source` [each shard's full], converted, and with zeros.

    Of a source that is a view of a mapped file only these parts are read.
    """
    lengths = [shard.stop - shard.start for shard in shards]
    if lengths != list(target.shape):
        target.zero_()
    part = source[tuple(slice(shard.start, shard.stop) for shard in shards)]
    target[tuple(slice(0, length) for length in lengths)].copy_(part)
