"""Prometheus metrics of one server, in a registry of its own.

Counters and histograms are fed by the requests as they run; gauges are asked of the engine at each scrape, so that an
idle engine never shows old values. Knows engine outputs, no HTTP.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mini_sglang.request import FinishReason, RequestOutput
from mini_sglang.scheduling.scheduler import SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class ServerMetrics:
    """All metrics of one server. `watch` wraps a request's outputs, `render` answers a scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"mini_sglang_{name}", text, registry=self.registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"mini_sglang_{name}", text, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"mini_sglang_{name}", text, buckets=buckets, registry=self.registry)

        self._up = gauge("engine_up", "1 if the engine answered this scrape, else 0 and the gauges are NaN")
        self._gauges: dict[Gauge, Callable[[SchedulerStats], float]] = {
            gauge("running_requests", "Requests that hold a slot of the engine"): lambda s: s.num_running,
            gauge("waiting_requests", "Requests that wait for a slot or for pages"): lambda s: s.num_waiting,
            gauge("kv_pages", "Pages of the KV pool"): lambda s: s.num_pages,
            gauge("kv_free_pages", "Pages that hold nothing"): lambda s: s.num_free_pages,
            gauge("kv_cached_pages", "Pages that only the prefix cache holds, to be evicted when needed"): (
                lambda s: s.num_cached_pages
            ),
            gauge("kv_used_pages", "Pages that requests hold"): lambda s: s.num_used_pages,
            gauge("kv_usage_ratio", "Share of the pool that requests hold, 0 to 1"): (
                lambda s: s.num_used_pages / s.num_pages
            ),
            gauge("preemptions", "Times that a request gave its pages back, since the start"): (
                lambda s: s.num_preemptions
            ),
        }

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that were admitted")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens that came from the prefix cache")
        self._generated_tokens = counter("generated_tokens", "Tokens generated")
        self._finished = Counter(
            "mini_sglang_requests_finished",
            "Requests that ended, by reason; abort: the client left or asked for it",
            ["reason"],
            registry=self.registry,
        )
        for reason in FinishReason:
            self._finished.labels(reason.value)  # shown as 0 from the start
        self._ttft = histogram("time_to_first_token_seconds", "From a request's arrival to its first token", _SECONDS)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of a request", _TOKEN_SECONDS)
        self._e2e = histogram("e2e_latency_seconds", "From a request's arrival to its end", _SECONDS)

    async def watch(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        """Pass a request's outputs on and count them. A request that is left before its end counts as aborted."""
        start = latest = time.perf_counter()
        reason = FinishReason.ABORT
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    latest = self._count_tokens(output, start, latest)
                    reason = output.finish_reason or reason
                    yield output
        except Exception:
            reason = FinishReason.ERROR
            raise
        finally:
            self._finished.labels(reason.value).inc()
            self._e2e.observe(time.perf_counter() - start)

    def _count_tokens(self, output: RequestOutput, start: float, latest: float) -> float:
        """Count what an output added. `start` and `latest` are when the request and its latest token came."""
        new = output.num_new_tokens
        if not new:
            return latest
        now = time.perf_counter()
        self._generated_tokens.inc(new)
        if output.usage.completion_tokens > new:
            self._itl.observe((now - latest) / new)
        else:
            self._ttft.observe(now - start)
            self._prompt_tokens.inc(output.usage.prompt_tokens)
            self._cached_tokens.inc(output.usage.cached_tokens)
        return now

    def render(self, stats: SchedulerStats | None) -> bytes:
        """The text format of Prometheus. `stats` is None if the engine did not answer."""
        self._up.set(0 if stats is None else 1)
        for gauge, read in self._gauges.items():
            gauge.set(float("nan") if stats is None else read(stats))
        return generate_latest(self.registry)
