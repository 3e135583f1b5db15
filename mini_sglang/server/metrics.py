"""Prometheus metrics of one server, under this project's names and under vLLM's, which gateways and dashboards read.

Each figure is kept and written once, by a collector whose name has no prefix; `_Names` shows its text with one.
Tokens and requests are counted as requests run, at the times when the engine's tokens came in, however slowly a client
reads. The engine's own figures are fetched from it at each scrape, so that an idle engine never shows old values. Knows
engine outputs, no HTTP but the words for an answer.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from mini_sglang.errors import FieldError
from mini_sglang.ipc.messages import EngineInfo
from mini_sglang.outputs import FinishReason, RequestOutput
from mini_sglang.scheduling.stats import STEP_SIZES, DraftStats, SchedulerStats

MetricsNames = Literal["both", "mini_sglang", "vllm"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Bounds of buckets. vLLM's are among them: its dashboards ask for a bound of the first token's time by value.
_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.025, 0.04, 0.05, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3),
    *(0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT")
_CHOICES = (1, 2, 5, 10, 20, 50, 100)
_ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)
_REFUSED = "refused"  # a request whose own value is at fault, such as a grammar: no error of the server's
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")  # of prompt tokens; the last is always 0

_NOT_VLLMS = frozenset({"engine_up", "kv_pages", "kv_free_pages", "kv_cached_pages", "kv_used_pages", "engine_steps"})
_VLLMS_ALONE = frozenset({"num_requests_waiting_by_reason", "engine_sleep_state", "lora_requests_info"})
_OLDER_NAMES = {  # vLLM's, which routers and dashboards still ask for
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}


class ServerMetrics:
    """All metrics of one server. `watch` wraps a request's outputs, `render` answers a scrape.

    `names` says under which names they are shown: this project's, vLLM's or both.
    """

    def __init__(self, model_name: str, info: EngineInfo, names: MetricsNames = "both") -> None:
        registry = self._registry = CollectorRegistry()
        labels = {"model_name": model_name}

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, list(labels), registry=registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, list(labels), registry=registry, buckets=buckets).labels(**labels)

        def labelled(name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
            """One counter for each value of a further label, 0 from the start."""
            family = Counter(name, text, [label, *labels], registry=registry)
            return {value: family.labels(value, *labels.values()) for value in values}

        up = "1 if the engine answered this scrape; else its own figures are missing"
        self._up = Gauge("engine_up", up, list(labels), registry=registry).labels(**labels)
        self._engine = _EngineCollector(labels)
        registry.register(self._engine)
        settings = {**_cache_settings(info), **labels}
        about = Gauge("cache_config_info", "Settings of the KV cache; always 1", list(settings), registry=registry)
        about.labels(**settings).set(1)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that had a first token")
        self._cached_tokens = counter("prompt_tokens_cached", "Of these, tokens that came from the prefix cache")
        self._sources = labelled("prompt_tokens_by_source", "The same by where they came from", "source", _SOURCES)
        self._generated_tokens = counter("generation_tokens", "Tokens generated, as answers count them")
        self._ended = labelled(
            "request_success",
            "Requests that ended, by reason; abort: the client left or asked for it; refused: the request was at fault",
            "finished_reason",
            [*(reason.value for reason in FinishReason), _REFUSED],
        )
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
        self._inference = histogram(
            "request_inference_time_seconds", "From a request's first step to its last token", _SECONDS
        )
        self._prompt_lengths = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached", _TOKENS
        )
        self._answer_lengths = histogram("request_generation_tokens", "Tokens generated for a request", _TOKENS)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest choice of a prompt", _TOKENS
        )
        self._limits = histogram("request_params_max_tokens", "Tokens that a request may generate", _TOKENS)
        self._choices = histogram("request_params_n", "Choices for a prompt", _CHOICES)
        self.latest_token = 0.0  # when one came, on time.perf_counter's clock
        self._names = _names_of(names)
        # These have the names that the libraries of Prometheus and FastAPI give them, and no model.
        plain = self._plain = CollectorRegistry()
        ProcessCollector(registry=plain)
        self._answers = Counter(
            "http_requests", "Requests answered, but for probes", ["handler", "method", "status"], registry=plain
        )
        self._answer_times = Histogram(
            "http_request_duration_seconds",
            "From a request's first byte to its answer's last",
            ["handler", "method"],
            registry=plain,
            buckets=(0.1, 0.5, 1),
        )

    async def watch(
        self, outputs: AsyncGenerator[RequestOutput, None], max_tokens: int | None, choices: PromptChoices
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs and count them. A request whose consumer leaves early counts as aborted.

        `choices` is shared by the requests for one prompt.
        """
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
            if max_tokens is not None:
                self._limits.observe(max_tokens)
            if choices.end(request.tokens):
                self._choices.observe(choices.n)
                self._longest.observe(choices.longest)

    def _count(self, request: _Progress, output: RequestOutput) -> None:
        times = output.new_token_times
        self._generated_tokens.inc(len(times))
        if not request.is_counted and (times or output.finish_reason in _ANSWERED):
            request.is_counted = True
            self._count_prompt(output.usage.prompt_tokens, output.usage.cached_tokens)
        for now in times:
            if request.tokens:
                self._itl.observe(now - request.latest)
            else:
                self._count_first(request, now, output.queued_s or 0.0)
            request.tokens += 1
            request.latest = self.latest_token = now

    def _count_prompt(self, tokens: int, cached: int) -> None:
        self._prompt_tokens.inc(tokens)
        self._cached_tokens.inc(cached)
        self._sources["local_compute"].inc(tokens - cached)
        self._sources["local_cache_hit"].inc(cached)
        self._prompt_lengths.observe(tokens)
        self._computed.observe(tokens - cached)

    def _count_first(self, request: _Progress, now: float, queued_s: float) -> None:
        request.first = now
        request.prefill = max(now - request.start - queued_s, 0.0)
        self._ttft.observe(now - request.start)
        self._queue.observe(queued_s)
        self._prefill.observe(request.prefill)

    def _count_end(self, request: _Progress, reason: str) -> None:
        self._ended[reason].inc()
        self._e2e.observe(
            (request.latest if reason in _ANSWERED and request.tokens else time.perf_counter()) - request.start
        )
        self._answer_lengths.observe(request.tokens)
        if request.tokens:
            self._decode.observe(request.latest - request.first)
            self._inference.observe(request.prefill + request.latest - request.first)
        if request.tokens > 1:
            self._token_time.observe((request.latest - request.first) / (request.tokens - 1))

    def count_answer(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answer over HTTP; what a client may invent becomes one word."""
        if method not in _METHODS:
            method = "other"
        self._answers.labels(route, method, f"{status // 100}xx").inc()
        self._answer_times.labels(route, method).observe(seconds)

    def render(self, stats: SchedulerStats | None) -> bytes:
        """The text format of Prometheus. `stats` is None if the engine did not answer."""
        self._up.set(0 if stats is None else 1)
        self._engine.stats = stats
        texts = [generate_latest(self._plain)]
        for metric in self._registry.collect():
            text = generate_latest(_Only(metric))
            for names in self._names:
                texts += names.shown(metric.name, text)
        return b"".join(texts)


@dataclass(slots=True)
class _Progress:
    """The counts of a running request. Times are of time.perf_counter."""

    start: float
    first: float = 0.0  # when its first token came
    latest: float = 0.0
    prefill: float = 0.0  # seconds from its first step to its first token
    tokens: int = 0
    is_counted: bool = False  # whether its prompt is


@dataclass(slots=True)
class PromptChoices:
    """The choices of one prompt, each a request to the engine, until the last of them has ended."""

    n: int
    ended: int = 0
    longest: int = 0  # tokens

    def end(self, tokens: int) -> bool:
        """Note that a choice has ended with so many tokens; returns whether it was the last."""
        self.ended += 1
        self.longest = max(self.longest, tokens)
        return self.ended == self.n


def _cache_settings(info: EngineInfo) -> dict[str, str]:
    """The labels by which vLLM says how large a block of the KV cache is and how many there are, and more."""
    config = info.config
    return {
        "block_size": str(info.page_size),
        "num_gpu_blocks": str(info.num_pages),
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": str(config.cache == "radix"),
        "gpu_memory_utilization": str(config.mem_fraction),
    }


def _names_of(choice: MetricsNames) -> list[_Names]:
    ours = _Names(b"mini_sglang:", hidden=_VLLMS_ALONE)
    vllms = _Names(b"vllm:", hidden=_NOT_VLLMS, labels=b'engine="0",', older=_OLDER_NAMES)
    return {"both": [ours, vllms], "mini_sglang": [ours], "vllm": [vllms]}[choice]


@dataclass(frozen=True)
class _Names:
    """Names of metrics: all but the `hidden` ones, under a prefix and with `labels` before the model's name.

    A metric in `older` is shown a second time, under the name there.
    """

    prefix: bytes
    hidden: frozenset[str]
    labels: bytes = b""
    older: Mapping[str, str] = field(default_factory=dict)

    def shown(self, name: str, text: bytes) -> Iterator[bytes]:
        """The text of one metric, without a prefix, as it is to be shown.

        Endpoint pickers ask twenty times a second, so it is not formatted again. What is replaced is in no label's
        value: quotes and ends of lines are escaped there.
        """
        if name in self.hidden:
            return
        for other_name in filter(None, (name, self.older.get(name))):
            shown = text
            for before in (b"# HELP ", b"# TYPE ", b"\n"):
                shown = shown.replace(before + name.encode(), before + self.prefix + other_name.encode())
            yield shown.replace(b'model_name="', self.labels + b'model_name="')


@dataclass(frozen=True)
class _Only(Collector):
    """Has one metric."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)


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
            yield self._gauge(name, text, [({}, value)])
        for name, value, text in (
            ("prefix_cache_queries", stats.num_prompt_tokens, "Prompt tokens looked up in the prefix cache"),
            ("prefix_cache_hits", stats.num_cached_tokens, "Of these, tokens that were there"),
            ("num_preemptions", stats.num_preemptions, "Times that a request gave its pages back, to go on later"),
            ("engine_steps", stats.num_steps, "Steps of the engine"),
        ):
            yield self._counter(name, text, [({}, value)])
        if stats.step_sizes:
            yield self._step_sizes(stats)
        if stats.drafts is not None:
            yield from self._drafts(stats.drafts)
        yield from self._vllms(stats)

    def _step_sizes(self, stats: SchedulerStats) -> Metric:
        bounds = [*(f"{size:.1f}" for size in STEP_SIZES), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(stats.step_sizes), strict=True))
        sizes = HistogramMetricFamily(
            "iteration_tokens_total", "Tokens of a step of the engine", labels=[*self._labels]
        )
        sizes.add_metric([*self._labels.values()], buckets, stats.num_step_tokens)
        return sizes

    def _drafts(self, drafts: DraftStats) -> Iterator[Metric]:
        by_place = [({"position": str(place)}, number) for place, number in enumerate(drafts.num_accepted_at)]
        for name, values, text in (
            ("num_drafts", [({}, drafts.num_drafts)], "Times that drafted tokens of a request were verified"),
            ("num_draft_tokens", [({}, drafts.num_draft_tokens)], "Drafted tokens that were verified"),
            ("num_accepted_tokens", [({}, drafts.num_accepted_tokens)], "Of these, tokens that were accepted"),
            ("num_accepted_tokens_per_pos", by_place, "Accepted tokens by their place in the draft, from 0 on"),
        ):
            yield self._counter(f"spec_decode_{name}", text, values)

    def _vllms(self, stats: SchedulerStats) -> Iterator[Metric]:
        """What vLLM tells of things that this engine does not do, as an engine that does not do them tells it."""
        waiting = [({"reason": "capacity"}, stats.num_waiting), ({"reason": "deferred"}, 0)]
        yield self._gauge("num_requests_waiting_by_reason", "Requests that wait, and what for", waiting)
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        asleep = [({"sleep_state": state}, value) for state, value in states.items()]
        yield self._gauge("engine_sleep_state", "The engine never sleeps", asleep)
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        yield self._gauge("lora_requests_info", "Adapters in use, at this Unix time: none", [(adapters, time.time())])

    def _counter(self, name: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Metric:
        counter = CounterMetricFamily(name, text)
        for labels, value in samples:
            counter.add_sample(f"{name}_total", {**labels, **self._labels}, value)
        return counter

    def _gauge(self, name: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Metric:
        gauge = GaugeMetricFamily(name, text)
        for labels, value in samples:
            gauge.add_sample(name, {**labels, **self._labels}, value)
        return gauge
