"""Prometheus metrics of one server, in a registry of its own, by vLLM's names.

Tokens and requests are counted as requests run, at the times when the engine's tokens came in, however slowly a client
reads. The engine's own figures are fetched from it at each scrape, so that an idle engine never shows old values. Knows
engine outputs, no HTTP.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mini_sglang.errors import FieldError
from mini_sglang.outputs import FinishReason, RequestOutput
from mini_sglang.scheduling.scheduler import SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "mini_sglang:"

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)
_REFUSED = "refused"  # a request whose own value is at fault, such as a grammar: no error of the server's


class ServerMetrics:
    """All metrics of one server. `watch` wraps a request's outputs, `render` answers a scrape."""

    def __init__(self, model_name: str) -> None:
        registry = self.registry = CollectorRegistry()
        labels = {"model_name": model_name}

        def counter(name: str, text: str) -> Counter:
            return Counter(f"{PREFIX}{name}", text, list(labels), registry=registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{PREFIX}{name}", text, list(labels), registry=registry, buckets=buckets).labels(**labels)

        up = "1 if the engine answered this scrape; else its own figures are missing"
        self._up = Gauge(f"{PREFIX}engine_up", up, list(labels), registry=registry).labels(**labels)
        self._engine = _EngineCollector(labels)
        registry.register(self._engine)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that had a first token")
        self._cached_tokens = counter("prompt_tokens_cached", "Of these, tokens that came from the prefix cache")
        self._generated_tokens = counter("generation_tokens", "Tokens generated, as answers count them")
        ended = Counter(
            f"{PREFIX}request_success",
            "Requests that ended, by reason; abort: the client left or asked for it; refused: the request was at fault",
            ["finished_reason", *labels],
            registry=registry,
        )
        reasons = [*(reason.value for reason in FinishReason), _REFUSED]
        self._ended = {reason: ended.labels(reason, model_name) for reason in reasons}  # 0 from the start
        self._ttft = histogram("time_to_first_token_seconds", "From a request's arrival to its first token", _SECONDS)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of a request", _TOKEN_SECONDS)
        self._token_time = histogram(
            "request_time_per_output_token_seconds", "Mean time between the tokens of a request", _TOKEN_SECONDS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From a request's arrival to its end", _SECONDS)
        self._queue = histogram(
            "request_queue_time_seconds", "From the engine's queue to a request's first step", _SECONDS
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "From a request's first step to its first token", _SECONDS
        )
        self._decode = histogram("request_decode_time_seconds", "From a request's first token to its last", _SECONDS)
        self._prompt_lengths = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._answer_lengths = histogram("request_generation_tokens", "Tokens generated for a request", _TOKENS)

    async def watch(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs and count them. A request whose consumer leaves early counts as aborted."""
        request = _Progress(start=time.perf_counter())
        reason: str = FinishReason.ABORT
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    self._count(request, output)
                    reason = output.finish_reason or reason
                    yield output
        except Exception as error:
            reason = _REFUSED if isinstance(error.__cause__ or error, FieldError) else FinishReason.ERROR
            raise
        finally:
            self._count_end(request, reason)

    def _count(self, request: _Progress, output: RequestOutput) -> None:
        times = output.new_token_times
        self._generated_tokens.inc(len(times))
        if not request.is_counted and (times or output.finish_reason in _ANSWERED):
            request.is_counted = True
            self._prompt_tokens.inc(output.usage.prompt_tokens)
            self._cached_tokens.inc(output.usage.cached_tokens)
            self._prompt_lengths.observe(output.usage.prompt_tokens)
        for now in times:
            if request.tokens:
                self._itl.observe(now - request.latest)
            else:
                self._count_first(request, now, output.queued_s or 0.0)
            request.tokens += 1
            request.latest = now

    def _count_first(self, request: _Progress, now: float, queued_s: float) -> None:
        request.first = now
        self._ttft.observe(now - request.start)
        self._queue.observe(queued_s)
        self._prefill.observe(max(now - request.start - queued_s, 0.0))

    def _count_end(self, request: _Progress, reason: str) -> None:
        self._ended[reason].inc()
        self._e2e.observe(
            (request.latest if reason in _ANSWERED and request.tokens else time.perf_counter()) - request.start
        )
        self._answer_lengths.observe(request.tokens)
        if request.tokens:
            self._decode.observe(request.latest - request.first)
        if request.tokens > 1:
            self._token_time.observe((request.latest - request.first) / (request.tokens - 1))

    def render(self, stats: SchedulerStats | None) -> bytes:
        """The text format of Prometheus. `stats` is None if the engine did not answer."""
        self._up.set(0 if stats is None else 1)
        self._engine.stats = stats
        return generate_latest(self.registry)


@dataclass(slots=True)
class _Progress:
    """The counts of a running request. Times are of time.perf_counter."""

    start: float
    first: float = 0.0  # when its first token came
    latest: float = 0.0
    tokens: int = 0
    is_counted: bool = False  # whether its prompt is


class _EngineCollector(Collector):
    """The engine's own figures, as of `stats`; none if that is None."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self.stats: SchedulerStats | None = None

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        if stats is None:
            return
        for name, value, text in (
            ("num_requests_running", stats.num_running, "Requests that hold a slot of the engine"),
            ("num_requests_waiting", stats.num_waiting, "Requests that wait for a slot or for pages"),
            ("kv_cache_usage_perc", stats.num_used_pages / stats.num_pages, "Share of the pool in use; 1 is all of it"),
            ("kv_pages", stats.num_pages, "Pages of the KV pool"),
            ("kv_free_pages", stats.num_free_pages, "Pages that hold nothing"),
            ("kv_cached_pages", stats.num_cached_pages, "Pages that only the prefix cache holds, evicted when needed"),
            ("kv_used_pages", stats.num_used_pages, "Pages that requests hold"),
        ):
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        for name, value, text in (
            ("prefix_cache_queries", stats.num_prompt_tokens, "Prompt tokens looked up in the prefix cache"),
            ("prefix_cache_hits", stats.num_cached_tokens, "Of these, tokens that were there"),
            ("num_preemptions", stats.num_preemptions, "Times that a request gave its pages back, to go on later"),
            ("engine_steps", stats.num_steps, "Steps of the engine"),
        ):
            counter = CounterMetricFamily(f"{PREFIX}{name}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
