"""From outcomes of requests to figures: percentiles, throughput, goodput, errors, and how exact the generator was.

Knows no servers and no tables.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mini_sglang.bench.acceptance import Acceptance
from mini_sglang.bench.load_generator import Load
from mini_sglang.bench.slo import is_good


@dataclass(frozen=True)
class Distribution:
    """Of a set of values; percentiles between two values are interpolated."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray[Any, Any]) -> Distribution | None:
        """None if there are no values."""
        if len(values) == 0:
            return None
        array = np.asarray(values, float)
        p50, p90, p95, p99 = np.percentile(array, (50, 90, 95, 99))
        return cls(float(array.mean()), float(p50), float(p90), float(p95), float(p99), float(array.max()))


@dataclass(frozen=True)
class Figures:
    """One run, or the medians of several. Latencies in ms; a request that failed counts as an error and nowhere else.

    Throughput is over the time from the first request to the last token.
    """

    rate: float | None  # requests/s asked for
    num_requests: float
    num_completed: float
    errors: dict[str, float]  # how many, by kind
    seconds: float
    requests_per_second: float  # completed
    input_tokens_per_second: float
    output_tokens_per_second: float
    goodput: float | None  # requests/s that kept every limit of the SLO; None: no SLO
    good_share: float | None  # of all requests, failed ones included, that kept them
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    queue_ms: Distribution | None  # from the server's metrics; None: it has none
    drafts: Acceptance | None  # from the server's metrics; None: nothing was drafted, or it does not say
    input_tokens: Distribution | None
    output_tokens: Distribution | None
    cached_tokens: Distribution | None  # per request; None: the server does not say
    cached_share: float | None  # of all prompt tokens
    late_ms: Distribution | None  # how much later than due the generator sent
    cpu_us_per_request: float  # of the generator
    cpu_share: float  # of one core
    details: dict[str, str] = field(default_factory=dict)  # by kind of error: what the server said, once


def figures_of(
    load: Load,
    *,
    rate: float | None,
    slos: Mapping[str, float],
    queue_ms: Distribution | None = None,
    drafts: Acceptance | None = None,
) -> Figures:
    """The figures of one run; `slos` are limits in ms by metric, as `slo` defines them."""
    done = [outcome for outcome in load.outcomes if outcome.error is None]
    failed = [outcome for outcome in load.outcomes if outcome.error is not None]
    seconds = max((outcome.started + outcome.e2e for outcome in done), default=load.seconds)
    inputs = [outcome.input_tokens for outcome in done if outcome.input_tokens is not None]
    cached = [outcome.cached_tokens for outcome in done if outcome.cached_tokens is not None]
    num_good = sum(is_good(outcome, slos) for outcome in done)
    gaps = np.concatenate([outcome.gaps for outcome in done]) if done else np.empty(0)
    return Figures(
        rate=rate,
        num_requests=len(load.outcomes),
        num_completed=len(done),
        errors=dict(Counter(outcome.error or "" for outcome in failed)),
        seconds=seconds,
        requests_per_second=len(done) / seconds,
        input_tokens_per_second=sum(inputs) / seconds,
        output_tokens_per_second=sum(outcome.output_tokens for outcome in done) / seconds,
        goodput=num_good / seconds if slos else None,
        good_share=num_good / max(len(load.outcomes), 1) if slos else None,
        ttft_ms=_ms(outcome.ttft for outcome in done),
        itl_ms=Distribution.of(gaps * 1e3),
        tpot_ms=_ms(outcome.tpot for outcome in done if outcome.tpot is not None),
        e2e_ms=_ms(outcome.e2e for outcome in done),
        queue_ms=queue_ms,
        drafts=drafts,
        input_tokens=Distribution.of(inputs),
        output_tokens=Distribution.of([outcome.output_tokens for outcome in done]),
        cached_tokens=Distribution.of(cached),
        cached_share=sum(cached) / max(sum(inputs), 1) if cached else None,
        late_ms=_ms(outcome.started - outcome.due for outcome in load.outcomes),
        cpu_us_per_request=load.cpu_seconds / max(len(load.outcomes), 1) * 1e6,
        cpu_share=load.cpu_seconds / load.seconds,
        details={outcome.error or "": outcome.detail for outcome in reversed(failed)},
    )


def _ms(seconds: Iterable[float]) -> Distribution | None:
    return Distribution.of([value * 1e3 for value in seconds])


def medians(runs: Sequence[Figures]) -> Figures:
    """Each figure's median over the runs, percentiles included; of errors, kinds of all runs, and drafts of all."""
    if len(runs) == 1:
        return runs[0]
    kinds = {kind for run in runs for kind in run.errors}
    values: dict[str, Any] = {}
    for name in Figures.__dataclass_fields__:
        column = [getattr(run, name) for run in runs]
        present = [value for value in column if value is not None]
        if not present:
            values[name] = None
        elif isinstance(present[0], Distribution):
            values[name] = Distribution(*map(statistics.median, zip(*map(dataclasses.astuple, present), strict=True)))
        elif isinstance(present[0], Acceptance):
            values[name] = Acceptance.together(present)
        elif not isinstance(present[0], dict):
            values[name] = statistics.median(present)
    values["errors"] = {kind: statistics.median(run.errors.get(kind, 0) for run in runs) for kind in sorted(kinds)}
    values["details"] = {kind: detail for run in runs for kind, detail in run.details.items()}
    return Figures(**values)
