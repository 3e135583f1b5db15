"""What other ways to choose what the prefix cache forgets would find on a trace, and how much is there to be found.

    python benchmarks/eviction_policies.py TRACE [--share 0.05] [--share 0.2]

Blocks alone, without an engine, counted as `mini-sglang bench prefix` counts them. Besides policies that could be built
there are two that know too much: a lifetime for each kind of block, fitted to this very trace, and Belady's optimum.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from mini_sglang.bench.optimal_cache import Beginnings, belady_hits, number_beginnings, unlimited_hits
from mini_sglang.bench.traces import read_trace

Worth = Callable[[int, int, int], float]  # of (misses so far, uses so far, capacity)


def by_age(now: int, uses: int, capacity: int) -> float:
    return now


def by_uses(now: int, uses: int, capacity: int) -> float:
    return uses + now * 1e-9  # of equals, the one used longest ago goes


def by_both(pools: float) -> Worth:
    """Each doubling of its uses makes a block younger by the misses that fill so many pools."""
    return lambda now, uses, capacity: now + pools * capacity * math.log2(uses)


POLICIES: dict[str, tuple[Worth, bool]] = {  # what has the least worth goes; whether uses outlive an eviction
    "least recently used (the engine's)": (by_age, False),
    "least frequently used": (by_uses, False),
    "both, half a pool a doubling": (by_both(0.5), False),
    "both, one pool a doubling": (by_both(1), False),
    "both, half, uses never forgotten": (by_both(0.5), True),
}
LIFETIMES = np.unique(np.geomspace(1, 20_000, 40).astype(int))  # prompts


def policy_hits(prompts: Sequence[Beginnings], capacity: int, worth: Worth, remembers: bool) -> int:
    """Blocks found by a cache that forgets what is worth least, of equals the deepest first."""
    cached: dict[int, tuple[float, int]] = {}
    cheapest: list[tuple[float, int, int]] = []  # heap of (worth, -depth, beginning), stale unless cached
    uses: Counter[int] = Counter()
    hits = misses = 0
    for beginnings in prompts:
        found = sum(cached.pop(beginning, None) is not None for beginning in beginnings)
        hits, misses = hits + found, misses + len(beginnings) - found
        while len(cached) + len(beginnings) > capacity:
            value, depth, beginning = heapq.heappop(cheapest)
            if cached.get(beginning) == (value, depth):
                del cached[beginning]
                if not remembers:
                    del uses[beginning]
        for depth, beginning in enumerate(beginnings):
            uses[beginning] += 1
            cached[beginning] = worth(misses, uses[beginning], capacity), -depth
            heapq.heappush(cheapest, (*cached[beginning], beginning))
    return hits


def hindsight_hits(prompts: Sequence[Beginnings], capacity: int) -> float:
    """Blocks found if each kind of block had the lifetime that is best for this trace.

    A kind is: uses so far, time since the last one, length of the prompt, whether it is its last block. The pool may be
    filled on average instead of at any moment, so no policy that goes by these kinds can be expected to find more.
    """
    waits = _waits_by_kind(prompts)
    gains = []  # (hits per block and prompt in the pool, cost of that step, hits)
    for kind_waits in waits.values():
        wait, end = np.array(kind_waits).T
        points = [(int(np.minimum(np.minimum(wait, t), end).sum()), int((wait <= t).sum())) for t in LIFETIMES]
        hull = [(0, 0)]
        for point in points:
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], point):
                hull.pop()
            hull.append(point)
        gains += [(_slope(a, b), b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(hull)]
    budget, hits = float(capacity * len(prompts)), 0.0
    for _, cost, gained in sorted(gains, reverse=True):
        part = min(1.0, budget / cost) if cost else 1.0
        hits, budget = hits + part * gained, budget - part * cost
    return hits


def _slope(a: tuple[int, int], b: tuple[int, int]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0]) if b[0] > a[0] else math.inf


def _waits_by_kind(prompts: Sequence[Beginnings]) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """For each kind of block, one entry per appearance: prompts until its next, and until the end of the trace."""
    waits: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    last: dict[int, tuple[int, tuple[int, ...]]] = {}
    uses: Counter[int] = Counter()
    for number, beginnings in enumerate(prompts):
        for beginning in beginnings:
            since = 0
            if beginning in last:
                before, kind = last[beginning]
                since = number - before
                waits[kind].append((since, len(prompts) - before))
            uses[beginning] += 1
            length, is_last = len(beginnings).bit_length(), beginning == beginnings[-1]
            last[beginning] = number, (min(uses[beginning], 10), since.bit_length() // 2, length, is_last)
    for before, kind in last.values():
        waits[kind].append((1 << 40, len(prompts) - before))
    return waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--share", type=float, action="append", help="pool size / distinct blocks; may be repeated")
    options = parser.parse_args()
    prompts = number_beginnings(row.hash_ids for row in read_trace(options.trace))
    blocks, distinct = sum(map(len, prompts)), max(map(max, prompts)) + 1
    pools = [round(share * distinct) for share in options.share or (0.2, 0.1, 0.05, 0.02)]
    counts: dict[str, list[float]] = {
        name: [policy_hits(prompts, pool, worth, remembers) for pool in pools]
        for name, (worth, remembers) in POLICIES.items()
    }
    counts["a lifetime per kind, by hindsight"] = [hindsight_hits(prompts, pool) for pool in pools]
    counts["Belady, knows the future"] = [belady_hits(prompts, pool) for pool in pools]
    table = Table("blocks found", *(f"pool {pool / distinct:.3g}" for pool in pools))
    for name, hits in counts.items():
        table.add_row(name, *(f"{found / blocks:.2%}" for found in hits))
    table.caption = f"without a limit {unlimited_hits(prompts) / blocks:.2%} of {blocks:,} blocks are found"
    Console().print(table)


if __name__ == "__main__":
    main()
