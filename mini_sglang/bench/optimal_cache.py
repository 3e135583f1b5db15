"""How many prompt blocks any prefix cache can find: without a limit, and at best in a pool of a given size.

Knows integers: a prompt is the list of its beginnings, one per block, each a number. Two prompts share a number if they
are equal up to the end of that block, so a prompt that finds a beginning in the cache finds all shorter ones too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

Beginnings = Sequence[int]

NEVER = 1 << 60  # the next use of what is not used again


def number_beginnings(prompts: Iterable[Sequence[int]]) -> list[list[int]]:
    """Number the beginnings of prompts that are given by the ids of their blocks, from 0 in order of appearance."""
    numbers: dict[tuple[int, int], int] = {}
    numbered = []
    for blocks in prompts:
        beginning, beginnings = -1, []
        for block in blocks:
            beginning = numbers.setdefault((beginning, block), len(numbers))
            beginnings.append(beginning)
        numbered.append(beginnings)
    return numbered


def unlimited_hits(prompts: Iterable[Beginnings]) -> int:
    """Blocks that a cache which forgets nothing finds: all but the first appearance of each."""
    seen: set[int] = set()
    hits = 0
    for beginnings in prompts:
        hits += sum(beginning in seen for beginning in beginnings)
        seen.update(beginnings)
    return hits


def belady_hits(prompts: Sequence[Beginnings], capacity: int) -> int:
    """Blocks that the best cache of `capacity` blocks finds if it knows all prompts to come.

    Prompts run one after another, and all blocks of one must be in the cache while it runs. What has to go is what is
    used again last (Belady, 1966): a longer beginning never before a shorter one, so the deepest of one prompt first.
    Raises ValueError if a prompt has more blocks than `capacity`.
    """
    cached: dict[int, int] = {}  # beginning -> number of the prompt that uses it next
    farthest: list[tuple[int, int, int]] = []  # heap of (-next use, -depth, beginning), stale unless `cached` agrees
    hits = 0
    for beginnings, next_uses in zip(prompts, _next_uses(prompts), strict=True):
        if len(beginnings) > capacity:
            raise ValueError(f"a prompt of {len(beginnings)} blocks does not fit in a cache of {capacity}")
        found = sum(cached.pop(beginning, None) is not None for beginning in beginnings)  # popped: safe from eviction
        hits += found
        while len(cached) + len(beginnings) > capacity:
            next_use, _, beginning = heapq.heappop(farthest)
            if cached.get(beginning) == -next_use:
                del cached[beginning]
        for depth, (beginning, next_use) in enumerate(zip(beginnings, next_uses, strict=True)):
            cached[beginning] = next_use
            heapq.heappush(farthest, (-next_use, -depth, beginning))
    return hits


def _next_uses(prompts: Sequence[Beginnings]) -> list[list[int]]:
    """For each block of each prompt: the number of the next prompt that has it."""
    upcoming: dict[int, int] = {}
    next_uses = []
    for number in reversed(range(len(prompts))):
        next_uses.append([upcoming.get(beginning, NEVER) for beginning in prompts[number]])
        upcoming.update(dict.fromkeys(prompts[number], number))
    return next_uses[::-1]
