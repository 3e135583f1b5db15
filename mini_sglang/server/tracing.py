"""OpenTelemetry's spans of requests, by its conventions for generative AI: one for each request, with children for the
times in which it was queued, prefilled and decoded.

Spans are written when a request has ended, from the times of its outputs, and a thread sends them: a collector that is
slow or gone loses spans and delays nobody. Prompts and answers are not recorded. Its packages are optional (the extra
`otel`), so only a server with a collector imports this. Knows no API's own format.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from fastapi import Request
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers

import mini_sglang
from mini_sglang.outputs import FinishReason, RequestOutput
from mini_sglang.server.chat import ConversationBody
from mini_sglang.server.context import context_of
from mini_sglang.server.errors import MAX_MESSAGE_LENGTH, ApiError
from mini_sglang.server.generation import Job

logger = logging.getLogger(__name__)

PROVIDER = "mini_sglang"
MOST_CHOICES = 16  # with children of their own: a thousand choices would push other requests' spans out of the queue
CLOSE_S = 2.0
_ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)
_OUTPUT_TYPES = {"text": "text", "json_object": "json", "json_schema": "json"}  # by the type of a response format
_SERVICE = {"service.name": "mini-sglang", "service.version": mini_sglang.__version__}


class Tracing:
    """Sends the spans of one server's requests to a collector, over OTLP/HTTP.

    OpenTelemetry's own environment variables say the rest: who the service is, which traces are sampled, and with which
    headers and certificates they are sent.
    """

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create({**_SERVICE, **OTELResourceDetector().detect().attributes})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(endpoint)))
        logging.getLogger("opentelemetry.sdk").setLevel(logging.ERROR)  # no warning for each span that finds no room
        self._tracer = self._provider.get_tracer("mini_sglang", mini_sglang.__version__)
        self._propagator = TraceContextTextMapPropagator()

    async def watch(
        self, request: Request, job: Job, outputs: AsyncGenerator[tuple[int, RequestOutput], None]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield a job's outputs and, once they have ended in whatever way, write the request's spans.

        What is refused with a 4xx has none: nothing was computed for it.
        """
        start = time.perf_counter()
        latest: dict[int, RequestOutput] = {}
        error: Exception | None = None
        try:
            async with contextlib.aclosing(outputs):
                async for choice, output in outputs:
                    latest[choice] = output
                    yield choice, output
        except Exception as failure:
            error = failure
            raise
        finally:
            if not isinstance(error, ApiError) or error.status >= 500:
                self._write(request, job, start, latest, error)

    def _write(
        self, request: Request, job: Job, start: float, latest: Mapping[int, RequestOutput], error: Exception | None
    ) -> None:
        now, wall = time.perf_counter(), time.time_ns()
        since_1970 = wall - round(now * 1e9)
        ends = [_end(latest[choice], now) if choice in latest else now for choice in range(job.num_choices)]
        attributes = {**_asked(request, job), **_answered(job, latest, error), **_latencies(start, latest, max(ends))}
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}",
            self._propagator.extract(request.headers, getter=_HeaderGetter()),
            SpanKind.SERVER,
            attributes,
            start_time=since_1970 + round(start * 1e9),
        )
        if span.is_recording():  # else the caller has decided otherwise, or the sampler
            if error is not None:
                span.set_status(StatusCode.ERROR, str(error)[:MAX_MESSAGE_LENGTH])
            inside = set_span_in_context(span)
            for choice in sorted(latest)[:MOST_CHOICES]:
                label = {"mini_sglang.choice": choice} if job.num_choices > 1 else None
                for name, begin, end in _phases(start, latest[choice], ends[choice]):
                    child = self._tracer.start_span(
                        name, inside, attributes=label, start_time=since_1970 + round(begin * 1e9)
                    )
                    child.end(since_1970 + round(end * 1e9))
        span.end(since_1970 + round(max(ends) * 1e9))

    async def close(self) -> None:
        """Send what is left, and give up what cannot be sent in CLOSE_S."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_S)


def _asked(request: Request, job: Job) -> dict[str, AttributeValue]:
    """What the request asked for. Of the choices' parameters, which differ in the seed, the first's."""
    params = job.params[0]
    model: str = getattr(job.body, "model", None) or context_of(request).model_name  # /generate's body has none
    asked: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": "chat" if isinstance(job.body, ConversationBody) else "text_completion",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": job.id,
        "gen_ai.request.choice.count": job.n if job.n != 1 else None,
        "gen_ai.output.type": _OUTPUT_TYPES.get((params.response_format or {}).get("type", "")),
        "gen_ai.request.stream": True if job.body.stream else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "http.route": getattr(request.scope.get("route"), "path", None),
    }
    asked["server.address"], asked["server.port"] = request.scope.get("server") or (None, None)
    return {name: value for name, value in asked.items() if value is not None}


def _answered(job: Job, latest: Mapping[int, RequestOutput], error: Exception | None) -> dict[str, AttributeValue]:
    """What came of a job: finish reasons, tokens as the answer counts them, and the error if the server has failed."""
    unfinished = FinishReason.ABORT if error is None else FinishReason.ERROR
    reasons = [latest[choice].finish_reason if choice in latest else None for choice in range(job.num_choices)]
    answered: dict[str, AttributeValue] = {
        "gen_ai.response.finish_reasons": [(reason or unfinished).value for reason in reasons],
        "gen_ai.usage.input_tokens": sum(map(len, job.prompts)),
        "gen_ai.usage.output_tokens": sum(output.usage.completion_tokens for output in latest.values()),
    }
    firsts = (output for choice, output in latest.items() if choice % job.n == 0)  # choices share their prompt
    if cached := sum(output.usage.cached_tokens for output in firsts):
        answered["gen_ai.usage.cache_read.input_tokens"] = cached
    if error is not None:
        code = error.code or str(error.status) if isinstance(error, ApiError) else type(error).__name__
        answered["error.type"] = code
    return answered


def _latencies(start: float, latest: Mapping[int, RequestOutput], end: float) -> dict[str, AttributeValue]:
    """Seconds under vLLM's names, to search requests by; those of the choice that had the first token."""
    begun = [output for output in latest.values() if output.generated.token_times]
    if not begun:
        return {"gen_ai.latency.e2e": end - start}
    first = min(begun, key=lambda output: output.generated.token_times[0])
    return {
        "gen_ai.latency.e2e": end - start,
        "gen_ai.latency.time_in_queue": first.queued_s or 0.0,
        "gen_ai.latency.time_to_first_token": first.generated.token_times[0] - start,
    }


def _end(output: RequestOutput, now: float) -> float:
    """When a choice ended: with its last token, or `now` if it was left, aborted or has failed."""
    times = output.generated.token_times
    return times[-1] if times and output.finish_reason in _ANSWERED else now


def _phases(start: float, output: RequestOutput, end: float) -> Iterator[tuple[str, float, float]]:
    """What a choice went through, from when to when on time.perf_counter's clock; before its first token that is not
    known.
    """
    if times := output.generated.token_times:
        first_step = min(start + (output.queued_s or 0.0), times[0])
        yield "queue", start, first_step
        yield "prefill", first_step, times[0]
        yield "decode", times[0], end


class _HeaderGetter(Getter[Headers]):
    """Lets the propagator read a request's headers, of which there may be several with one name."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        return carrier.getlist(key) or None

    def keys(self, carrier: Headers) -> list[str]:
        return carrier.keys()


class _Exporter(SpanExporter):
    """Sends spans, and says in one line when they begin to get lost. The library would log every attempt."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        self._otlp: SpanExporter = OTLPSpanExporter(endpoint=self._endpoint)
        self._complaints = _Complaints()
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(self._complaints)
        self._is_losing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._complaints.first = ""
        result = self._otlp.export(spans)
        if is_lost := result is not SpanExportResult.SUCCESS:
            if not self._is_losing:
                why = self._complaints.first[:MAX_MESSAGE_LENGTH]
                logger.warning("traces do not reach %s and are lost, while requests go on: %s", self._endpoint, why)
        elif self._is_losing:
            logger.info("traces reach %s again", self._endpoint)
        self._is_losing = is_lost
        return result

    def shutdown(self) -> None:
        self._otlp.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._otlp.force_flush(timeout_millis)


class _Complaints(logging.Filter):
    """Keeps what a logger is told out of the log, but remembers the first of it, which has the reason."""

    first = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.first = self.first or record.getMessage()
        return False
