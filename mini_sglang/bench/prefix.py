"""The prefix cache on a recorded trace: how much it finds beside the optimum, and what that costs the host.

The trace's prompts run through a real scheduler and KV manager, one after another in the order of their arrival, each
with one answer token. There is no model and no clock in it, so that what the cache finds depends on its policy alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import track

from mini_sglang.bench.optimal_cache import belady_hits, number_beginnings, unlimited_hits
from mini_sglang.bench.traces import TraceRow, block_tokens
from mini_sglang.config import ResolvedConfig
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import StepResult
from mini_sglang.scheduling.kv_cache import KVCacheManager
from mini_sglang.scheduling.scheduler import Scheduler

VOCAB = range(1 << 31)  # so large that blocks of different ids do not begin with the same token
TOKENS_PER_BLOCK = 4  # that stand for those of a block where only the number of blocks counts
SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
CACHED_TOKENS = 1_000_000


@dataclass(frozen=True)
class Hits:
    """Prompt blocks found in a pool of `pool_blocks`: by our cache, and by the best one that knows the future."""

    pool_blocks: int
    found: int
    belady: int


@dataclass(frozen=True)
class HostCost:
    """CPU time in the KV manager while prompts ran through a pool of `cached_tokens`, in pages of `page_size` tokens.

    Of the prompts that came once the pool was full; of all of them if it never was.
    """

    cached_tokens: int
    page_size: int
    prompt_tokens: int
    match_s: float  # looking prompts up and taking pages for them, without eviction
    insert_s: float  # publishing their pages, and giving them back
    evicted_pages: int
    evict_s: float

    @property
    def match_us(self) -> float:
        """Per 100 prompt tokens, cached or not."""
        return self.match_s / self.prompt_tokens * 1e8

    @property
    def insert_us(self) -> float:
        """Per 100 prompt tokens, cached or not."""
        return self.insert_s / self.prompt_tokens * 1e8

    @property
    def evict_us(self) -> float | None:
        """Per page; None if nothing was evicted."""
        return self.evict_s / self.evicted_pages * 1e6 if self.evicted_pages else None


@dataclass(frozen=True)
class PrefixReport:
    """Of `blocks` prompt blocks of `block_size` tokens `distinct` differ; a cache without limit finds `unlimited`."""

    requests: int
    block_size: int
    blocks: int
    distinct: int
    unlimited: int
    hits: list[Hits]
    cost: HostCost


def measure_prefix(
    rows: Sequence[TraceRow], *, shares: Sequence[float] = SHARES, cached_tokens: int = CACHED_TOKENS, page_size: int
) -> PrefixReport:
    """Hit rates in pools of `shares` of the trace's distinct blocks, and host cost with `cached_tokens` in the cache.

    For the hit rates a page is a block, so that the cache and the optimum share pools in the same unit; for the cost a
    page has `page_size` tokens. Raises ValueError if a pool cannot hold the longest prompt.
    """
    prompts = number_beginnings(row.hash_ids for row in rows)
    distinct = max(max(beginnings) for beginnings in prompts) + 1
    pools = [round(share * distinct) for share in shares]
    _check_pools(rows, shares, pools, distinct, cached_tokens)
    found = count_hits(rows, pools)
    return PrefixReport(
        requests=len(rows),
        block_size=rows[0].block_size,
        blocks=sum(map(len, prompts)),
        distinct=distinct,
        unlimited=unlimited_hits(prompts),
        hits=[Hits(pool, hits, belady_hits(prompts, pool)) for pool, hits in zip(pools, found, strict=True)],
        cost=measure_cost(rows, cached_tokens, page_size),
    )


def _check_pools(
    rows: Sequence[TraceRow], shares: Sequence[float], pools: Sequence[int], distinct: int, cached_tokens: int
) -> None:
    most_blocks = max(len(row.hash_ids) for row in rows)
    for share, pool in zip(shares, pools, strict=True):
        if pool < most_blocks:
            raise ValueError(
                f"share {share:g} of {distinct} distinct blocks is a pool of {pool}, but the longest prompt has "
                f"{most_blocks}"
            )
    most_tokens = max(row.input_length for row in rows)
    if cached_tokens < most_tokens:
        raise ValueError(f"cached_tokens must be at least {most_tokens}, the longest prompt, got {cached_tokens}")


# -- hit rates --------------------------------------------------------------------------------------------------------


def count_hits(rows: Sequence[TraceRow], pools: Sequence[int]) -> list[int]:
    """How many blocks of the prompts the cache finds, for each size of `pools`, in blocks.

    A page is a block, each a whole one, as the authors of traces count. The last token of a prompt is always computed;
    its block counts as found if all before it was.
    """
    longest = max(len(row.hash_ids) for row in rows)
    schedulers = [_scheduler(pool, TOKENS_PER_BLOCK, longest * TOKENS_PER_BLOCK) for pool in pools]
    hits = [0] * len(pools)
    for number, row in enumerate(_progress(rows, "hit rates")):
        prompt = block_tokens(row.hash_ids, TOKENS_PER_BLOCK, VOCAB).tolist()
        for index, scheduler in enumerate(schedulers):
            hits[index] += (_run(scheduler, number, prompt) + 1) // TOKENS_PER_BLOCK
    return hits


def _scheduler(num_pages: int, page_size: int, longest: int) -> Scheduler:
    """For prompts of up to `longest` tokens, one at a time and each in one step."""
    return Scheduler(
        ResolvedConfig(
            num_pages=num_pages,
            page_size=page_size,
            context_length=longest + 1,
            max_running_requests=1,
            max_prefill_tokens=longest,
        )
    )


def _progress(rows: Sequence[TraceRow], what: str) -> Iterable[TraceRow]:
    return track(rows, what, console=Console(stderr=True), transient=True)


def _run(scheduler: Scheduler, number: int, prompt: list[int]) -> int:
    """Run one prompt to its first answer token. Returns how many of its tokens were cached."""
    request = Request(str(number), prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    scheduler.add(request)
    while (batch := scheduler.schedule()) is not None:
        samples = sum(row.samples for row in batch.rows)
        scheduler.update(batch, StepResult([0] * samples, [None] * samples))
    return request.num_cached_tokens


# -- host cost --------------------------------------------------------------------------------------------------------


def measure_cost(rows: Sequence[TraceRow], cached_tokens: int, page_size: int) -> HostCost:
    """CPU time in the KV manager while all prompts run through a pool of `cached_tokens`."""
    scheduler = _scheduler(cached_tokens // page_size, page_size, max(row.input_length for row in rows))
    stopwatch, prompt_tokens, was_full = _Stopwatch(scheduler.kv), 0, False
    for number, row in enumerate(_progress(rows, "host cost")):
        if stopwatch.evicted_pages and not was_full:
            was_full, prompt_tokens = True, 0
            stopwatch.reset()
        _run(scheduler, number, row.prompt(VOCAB))
        prompt_tokens += row.input_length
    seconds = stopwatch.seconds
    return HostCost(
        cached_tokens=cached_tokens,
        page_size=page_size,
        prompt_tokens=prompt_tokens,
        match_s=seconds["match"] + seconds["admit"] - seconds["evict"],  # `admit` evicts
        insert_s=seconds["commit"] + seconds["release"],
        evicted_pages=stopwatch.evicted_pages,
        evict_s=seconds["evict"],
    )


class _Stopwatch:
    """Adds up the CPU time that calls of a KV manager's methods take, and the pages that it evicts."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.reset()
        for method in self.seconds:
            setattr(kv, method, self._timed(method, getattr(kv, method)))

    def reset(self) -> None:
        self.seconds = dict.fromkeys(("match", "admit", "commit", "release", "evict"), 0.0)
        self.evicted_pages = 0

    def _timed(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = call(*args, **kwargs)
            self.seconds[method] += time.thread_time() - start
            if method == "evict":
                self.evicted_pages += result
            return result

        return timed
