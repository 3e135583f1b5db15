"""Latency of one stream, or of a few: time to the first token, time between tokens, tokens per second.

The whole is timed, prompts included, as a user waits for it. The engine is driven directly, without text.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

from mini_sglang.bench.offline import Workload, run_numbers
from mini_sglang.engine import Engine


@dataclass(frozen=True)
class Streams:
    """One run of streams that start together."""

    tokens_per_second: float  # of all streams together, prompts included
    seconds: float
    first_token_ms: float  # the median stream's
    token_ms_median: float  # between tokens, over all streams
    token_ms_p99: float


def measure_latency(engine: Engine, workload: Workload, *, runs: int = 2) -> list[Streams]:
    """A warm-up, then `runs` runs with other ids."""
    vocab_size = engine.model_config.vocab_size
    _, *streams = [stream(engine, workload.shifted(index, vocab_size)) for index in run_numbers(runs)]
    return streams


def stream(engine: Engine, workload: Workload) -> Streams:
    """Run the workload and record when each token came. Raises RuntimeError if a request fails or ends early."""
    start = time.perf_counter()
    arrivals: dict[str, list[float]] = {request_id: [] for request_id in workload.add_to(engine)}
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            arrivals[output.request_id] += [now] * len(output.token_ids)
    seconds = time.perf_counter() - start
    if [len(times) for times in arrivals.values()] != workload.output_lengths:
        raise RuntimeError("a request ended before it had all the tokens that were asked for")
    between = sorted(b - a for times in arrivals.values() for a, b in itertools.pairwise(times)) or [0.0]
    return Streams(
        tokens_per_second=workload.num_output_tokens / seconds,
        seconds=seconds,
        first_token_ms=statistics.median(times[0] for times in arrivals.values()) * 1e3,
        token_ms_median=statistics.median(between) * 1e3,
        token_ms_p99=between[int(0.99 * (len(between) - 1))] * 1e3,
    )
