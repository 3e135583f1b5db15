"""OpenTelemetry's spans of requests, as a collector gets them.

The names of attributes are facts, written down from the conventions (open-telemetry/semantic-conventions-genai,
docs/gen-ai/client-inference.md, November 2026) and from vLLM's tracing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from mini_sglang.ray_serve import in_process
from mini_sglang.ray_serve.in_process import HttpRequest
from mini_sglang.server.config import ServerConfig
from mini_sglang.server.tracing import MOST_CHOICES
from tests.server.conftest import ScriptedEngine, StartServer
from tests.tiny import RunningServer, run_server, until

MESSAGES = [{"role": "user", "content": "Name a city."}]
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("chat", {"messages": MESSAGES, "max_tokens": 4}),
    "/v1/completions": ("text_completion", {"prompt": "The capital of France is", "max_tokens": 4}),
    "/v1/responses": ("chat", {"input": "Name a city.", "max_output_tokens": 16, "store": False}),
    "/v1/messages": ("chat", {"messages": MESSAGES, "max_tokens": 4}),
    "/generate": ("text_completion", {"prompt": "The capital of France is", "max_tokens": 4}),
}
SMALL = ("--dtype", "float32", "--kv-cache-bytes", str(1 << 26))


def plain(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return [plain(item) for item in value.array_value.values]
    return getattr(value, value.WhichOneof("value") or "")


@dataclass
class Trace:
    """The spans of one trace, all of which a collector has got."""

    request: Span
    children: list[Span]

    @property
    def attributes(self) -> dict[str, Any]:
        return {item.key: plain(item.value) for item in self.request.attributes}

    def tiles(self) -> list[str]:
        """The names of the children in order, which cover the request from its start to its end without a gap."""
        ordered = sorted(self.children, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
        times = [self.request.start_time_unix_nano, *(span.end_time_unix_nano for span in ordered)]
        assert [span.start_time_unix_nano for span in ordered] == times[:-1]
        assert times == sorted(times)
        assert times[-1] == self.request.end_time_unix_nano
        return [span.name for span in ordered]


@dataclass
class Collector:
    """Takes spans over OTLP/HTTP, as a collector of OpenTelemetry's does."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)
    is_open: threading.Event = field(default_factory=threading.Event)  # else nothing is answered

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = {item.key: plain(item.value) for item in of_resource.resource.attributes}
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans

    def trace(self, trace_id: str = "", response_id: str = "") -> Trace:
        """The trace with one of these ids, when it has come. A request's children are sent before it."""

        def traces() -> list[Trace]:
            spans = list(self.spans)
            requests = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
            found = [Trace(it, [span for span in spans if span.parent_span_id == it.span_id]) for it in requests]
            ids = [(it.request.trace_id.hex(), it.attributes["gen_ai.response.id"]) for it in found]
            return [it for it, of_it in zip(found, ids, strict=True) if trace_id == of_it[0] or response_id == of_it[1]]

        until(lambda: bool(traces()))
        [trace] = traces()
        return trace


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    collector = Collector()
    collector.is_open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.is_open.wait()
            collector.take(self.path, body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield collector
        server.shutdown()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(start_server: StartServer, collector: Collector) -> Iterator[RunningServer]:
    """A server whose spans are sent ten times a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        yield start_server("--otlp-traces-endpoint", collector.url, *SMALL)


def traceparent(flags: str = "01") -> tuple[str, str, dict[str, str]]:
    """A new trace and the span in it that calls the server, as ids and as a header."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-{flags}"}


def ask(server: RunningServer, route: str, headers: dict[str, str], **fields: Any) -> httpx.Response:
    _, body = ROUTES[route]
    return httpx.post(server.url + route, json={**body, **fields}, headers=headers, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_request_is_a_span_of_its_callers_trace_in_three_parts(
    server: RunningServer, collector: Collector, route: str, stream: bool
) -> None:
    trace_id, span_id, headers = traceparent()
    assert ask(server, route, headers, stream=stream).status_code == 200
    trace = collector.trace(trace_id)
    assert trace.request.parent_span_id.hex() == span_id
    assert trace.request.name == f"{ROUTES[route][0]} smollm2-135m"
    assert trace.tiles() == ["queue", "prefill", "decode"]
    assert {span.trace_id.hex() for span in trace.children} == {trace_id}
    assert {span.kind for span in trace.children} == {Span.SPAN_KIND_INTERNAL}
    assert trace.attributes.get("gen_ai.request.stream") == (True if stream else None)
    assert trace.attributes["http.route"] == route


def test_a_span_has_the_attributes_of_the_conventions(server: RunningServer, collector: Collector) -> None:
    trace_id, _, headers = traceparent()
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "frequency_penalty": 0.25}
    answer = ask(server, "/v1/chat/completions", headers, **sampling, ignore_eos=True).json()
    attributes = collector.trace(trace_id).attributes
    for name, least, most in (("e2e", 0.001, 30), ("time_to_first_token", 0.001, 30), ("time_in_queue", 0, 30)):
        assert least <= attributes.pop(f"gen_ai.latency.{name}") <= most
    attributes.pop("gen_ai.usage.cache_read.input_tokens", None)  # depends on what came before
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mini_sglang",
        "gen_ai.request.model": "smollm2-135m",
        "gen_ai.response.model": "smollm2-135m",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.frequency_penalty": 0.25,
        "http.route": "/v1/chat/completions",
        "server.address": "127.0.0.1",
        "server.port": int(server.url.rpartition(":")[2]),
    }
    assert collector.trace(trace_id).request.status.code == Status.STATUS_CODE_UNSET
    assert collector.resource["service.name"] == "mini-sglang"
    assert collector.resource["deployment.environment.name"] == "test"


@pytest.mark.parametrize(("form", "kind"), [({"type": "text"}, "text"), ({"type": "json_object"}, "json")])
def test_the_form_that_an_answer_must_have_is_told(
    server: RunningServer, collector: Collector, form: dict[str, str], kind: str
) -> None:
    trace_id, _, headers = traceparent()
    assert ask(server, "/v1/chat/completions", headers, response_format=form).status_code == 200
    assert collector.trace(trace_id).attributes["gen_ai.output.type"] == kind


def test_cached_tokens_are_told(server: RunningServer, collector: Collector) -> None:
    prompt = "A long prompt, which takes several pages. " * 8
    for _ in range(2):
        trace_id, _, headers = traceparent()
        answer = ask(server, "/v1/completions", headers, prompt=prompt).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert collector.trace(trace_id).attributes["gen_ai.usage.cache_read.input_tokens"] == cached >= 16


def test_spans_and_metrics_tell_the_same_times(server: RunningServer, collector: Collector) -> None:
    def sums() -> list[float]:
        lines = server.get("/metrics").text.splitlines()
        names = ("e2e_request_latency", "time_to_first_token", "request_queue_time")
        return [
            next(float(line.split()[1]) for line in lines if line.startswith(f"mini_sglang:{name}_seconds_sum"))
            for name in names
        ]

    before = sums()
    trace_id, _, headers = traceparent()
    ask(server, "/v1/completions", headers, max_tokens=20, ignore_eos=True)
    attributes = collector.trace(trace_id).attributes
    told = [attributes[f"gen_ai.latency.{name}"] for name in ("e2e", "time_to_first_token", "time_in_queue")]
    assert told == pytest.approx([after - earlier for after, earlier in zip(sums(), before, strict=True)], abs=0.002)


def test_without_a_caller_a_request_begins_a_trace(server: RunningServer, collector: Collector) -> None:
    seen = {span.trace_id for span in collector.spans}
    for headers in ({}, {"traceparent": "00-nonsense-01"}):
        answer = ask(server, "/generate", headers).json()
        request = collector.trace(response_id=answer["id"]).request
        assert request.parent_span_id == b""
        assert request.trace_id not in seen
        seen.add(request.trace_id)


def test_a_callers_state_is_kept(server: RunningServer, collector: Collector) -> None:
    trace_id, _, headers = traceparent()
    both = [*headers.items(), ("tracestate", "vendor=one"), ("tracestate", "other=two")]
    httpx.post(server.url + "/generate", json=ROUTES["/generate"][1], headers=both, timeout=60)
    assert collector.trace(trace_id).request.trace_state == "vendor=one,other=two"


def test_what_the_caller_does_not_sample_is_not_sent(server: RunningServer, collector: Collector) -> None:
    unsampled, _, headers = traceparent("00")
    assert ask(server, "/generate", headers).status_code == 200
    sampled, _, headers = traceparent("01")
    ask(server, "/generate", headers)
    collector.trace(sampled)
    assert unsampled not in {span.trace_id.hex() for span in collector.spans}


def test_each_choice_has_its_parts(server: RunningServer, collector: Collector) -> None:
    trace_id, _, headers = traceparent()
    answer = ask(server, "/v1/completions", headers, prompt=["One", "Two and three"], n=2).json()
    trace = collector.trace(trace_id)
    assert trace.attributes["gen_ai.request.choice.count"] == 2
    assert trace.attributes["gen_ai.response.finish_reasons"] == [c["finish_reason"] for c in answer["choices"]]
    assert trace.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert trace.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    of_choice: dict[int, list[Span]] = {choice: [] for choice in range(4)}
    for span in trace.children:
        of_choice[{item.key: plain(item.value) for item in span.attributes}["mini_sglang.choice"]].append(span)
    for spans in of_choice.values():
        assert [span.name for span in spans] == ["queue", "prefill", "decode"]
        assert spans[0].start_time_unix_nano == trace.request.start_time_unix_nano
        for earlier, later in itertools.pairwise(spans):
            assert earlier.end_time_unix_nano == later.start_time_unix_nano
    last = max(span.end_time_unix_nano for span in trace.children)
    assert last == trace.request.end_time_unix_nano


def test_many_choices_do_not_fill_the_collector(server: RunningServer, collector: Collector) -> None:
    trace_id, _, headers = traceparent()
    assert ask(server, "/v1/completions", headers, n=20, max_tokens=1).status_code == 200
    trace = collector.trace(trace_id)
    assert len(trace.children) == 3 * MOST_CHOICES
    assert len(trace.attributes["gen_ai.response.finish_reasons"]) == 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_no_error(server: RunningServer, collector: Collector, stream: bool) -> None:
    trace_id, _, headers = traceparent()
    body = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    began = time.time_ns()
    with (
        nullcontext() if stream else pytest.raises(httpx.ReadTimeout),
        httpx.stream("POST", server.url + "/generate", json=body, headers=headers, timeout=2) as response,
    ):
        chunks = response.iter_raw()
        for _ in range(4):
            next(chunks)
    left = time.time_ns()
    trace = collector.trace(trace_id)
    assert trace.tiles() == ["queue", "prefill", "decode"]
    assert began <= trace.request.start_time_unix_nano <= trace.request.end_time_unix_nano <= left + 5 * 10**9
    assert trace.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert trace.attributes["gen_ai.usage.output_tokens"] >= 2
    assert "error.type" not in trace.attributes
    assert trace.request.status.code == Status.STATUS_CODE_UNSET


def test_an_aborted_request_is_no_error(server: RunningServer, collector: Collector) -> None:
    trace_id, _, headers = traceparent()
    body = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "request_id": "mine", "stream": True}
    with httpx.stream("POST", server.url + "/generate", json=body, headers=headers, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.post("/abort", request_id="mine").json() == {"aborted": 1}
        list(lines)
    trace = collector.trace(trace_id)
    assert trace.tiles() == ["queue", "prefill", "decode"]
    assert trace.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert trace.attributes["gen_ai.response.id"] == "mine"
    assert trace.request.status.code == Status.STATUS_CODE_UNSET


REFUSED: dict[str, dict[str, Any]] = {
    "no such model": {"model": "other"},
    "a wrong value": {"temperature": -1},
    "a grammar that does not compile": {"regex": "("},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_has_no_span(server: RunningServer, collector: Collector, fields: dict[str, Any]) -> None:
    refused, _, headers = traceparent()
    assert 400 <= ask(server, "/v1/completions", headers, **fields).status_code < 500
    later, _, headers = traceparent()
    ask(server, "/generate", headers)
    collector.trace(later)
    assert refused not in {span.trace_id.hex() for span in collector.spans}


def failed(collector: Collector, app: FastAPI, timeout_s: float = 60, **fields: Any) -> Trace:
    """The trace of a request that an app with a scripted engine has failed to answer."""
    trace_id, _, headers = traceparent()
    headers["x-request-timeout"] = str(timeout_s)
    TestClient(app, raise_server_exceptions=False).post("/generate", json={"prompt": "Hi", **fields}, headers=headers)
    asyncio.run(app.state.context.close())
    trace = collector.trace(trace_id)
    assert trace.request.status.code == Status.STATUS_CODE_ERROR
    return trace


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_after", [0, 3])
def test_a_failure_of_the_server_is_an_error(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine, collector: Collector, fail_after: int, stream: bool
) -> None:
    engine.fail_after = fail_after
    trace = failed(collector, make_app(otlp_traces_endpoint=collector.url), stream=stream)
    assert trace.attributes["error.type"] == "500"
    assert trace.request.status.message == "the step failed"
    assert trace.attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert trace.attributes["gen_ai.usage.output_tokens"] == fail_after
    assert [span.name for span in trace.children] == (["queue", "prefill", "decode"] if fail_after else [])


def test_an_error_has_the_code_that_the_client_gets_or_the_exceptions_name(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine, collector: Collector
) -> None:
    for engine.pause_after, parts in ((0, 0), (2, 3)):
        late = failed(collector, make_app(otlp_traces_endpoint=collector.url), timeout_s=0.1)
        assert late.attributes["error.type"] == "deadline_exceeded"
        assert len(late.children) == parts
    draining = make_app(otlp_traces_endpoint=collector.url)
    draining.state.context.drain()
    assert failed(collector, draining).attributes["error.type"] == "draining"
    engine.error = RuntimeError("unforeseen")
    assert failed(collector, make_app(otlp_traces_endpoint=collector.url)).attributes["error.type"] == "RuntimeError"


def test_a_replica_of_ray_serve_sends_its_spans_too(make_app: Callable[..., FastAPI], collector: Collector) -> None:
    """It has no socket of its own, and closes its app as a server does."""
    trace_id, span_id, trace_headers = traceparent()
    headers = {"content-type": "application/json", **trace_headers}
    app = make_app(otlp_traces_endpoint=collector.url)
    request = HttpRequest(
        method="POST",
        path="/generate",
        query=b"",
        headers=tuple((name.encode(), value.encode()) for name, value in headers.items()),
        client=None,
        body=b'{"prompt": "Hi"}',
    )

    async def scenario() -> None:
        async with aclosing(in_process.answer(app, request)) as batches:
            messages = [message async for batch in batches for message in batch]
        assert messages[0]["status"] == 200, messages
        await app.state.context.close()

    asyncio.run(scenario())
    trace = collector.trace(trace_id)
    assert trace.request.parent_span_id.hex() == span_id
    assert trace.tiles() == ["queue", "prefill", "decode"]
    assert "server.address" not in trace.attributes


def test_the_last_spans_of_a_server_that_stops_are_sent(tmp_path: Path, collector: Collector) -> None:
    trace_id, _, headers = traceparent()
    with run_server(tmp_path / "log", "--otlp-traces-endpoint", collector.url, *SMALL) as server:
        assert ask(server, "/generate", headers).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
    assert collector.trace(trace_id).tiles() == ["queue", "prefill", "decode"]


def test_a_dead_engine_is_told_before_the_server_ends(tmp_path: Path, collector: Collector) -> None:
    trace_id, _, headers = traceparent()
    body = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with (
        run_server(tmp_path / "log", "--otlp-traces-endpoint", collector.url, *SMALL) as server,
        httpx.stream("POST", server.url + "/generate", json=body, headers=headers, timeout=30) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        os.kill(server.engine_pid, signal.SIGKILL)
        assert "engine_dead" in json.dumps(list(lines))
        assert server.process.wait(10) == 1
    trace = collector.trace(trace_id)
    assert trace.attributes["error.type"] == "EngineDeadError"
    assert trace.request.status.code == Status.STATUS_CODE_ERROR
    assert trace.tiles() == ["queue", "prefill", "decode"]


def test_a_collector_that_is_away_costs_a_line_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    log = tmp_path / "log"
    with run_server(log, "--otlp-traces-endpoint", "http://127.0.0.1:9", *SMALL) as server:

        def lines() -> list[str]:
            return [line for line in log.read_text().splitlines() if "request_log" not in line]

        for _ in range(2):  # of batches that fail
            assert ask(server, "/generate", {}).status_code == 200
            time.sleep(2.5)
        [told] = [line for line in lines() if "trace" in line.lower()]
        assert "WARNING mini_sglang.server.tracing: traces do not reach http://127.0.0.1:9/v1/traces" in told
        assert "refused" in told
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert len([line for line in lines() if "trace" in line.lower()]) == 1
        assert lines()[-1].endswith("stopping; once more to stop at once")


def test_a_collector_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    trace_id, _, headers = traceparent()
    with run_server(tmp_path / "log", "--otlp-traces-endpoint", collector.url, *SMALL) as server:
        collector.is_open.clear()
        try:
            assert ask(server, "/generate", headers).status_code == 200
            time.sleep(0.2)
            start = time.monotonic()
            for _ in range(5):
                assert ask(server, "/generate", {}).status_code == 200
            assert time.monotonic() - start < 5
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(8) == 0
        finally:
            collector.is_open.set()
    assert collector.trace(trace_id)


def test_a_collector_that_comes_back_gets_spans_again(
    make_app: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    caplog.set_level(logging.INFO, "mini_sglang")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    app = make_app(otlp_traces_endpoint=f"http://127.0.0.1:{port}")
    client = TestClient(app)
    client.post("/generate", json={"prompt": "Hi"})
    until(lambda: "traces do not reach" in caplog.text)
    with collecting(port) as collector:
        trace_id, _, headers = traceparent()
        client.post("/generate", json={"prompt": "Hi"}, headers=headers)
        assert collector.trace(trace_id)
        until(lambda: f"traces reach http://127.0.0.1:{port}/v1/traces again" in caplog.text)
        asyncio.run(app.state.context.close())


def test_without_the_packages_the_option_is_refused_by_the_extras_name() -> None:
    script = (
        "import sys; sys.modules['opentelemetry.exporter'] = None\n"  # as if it was not installed
        "from mini_sglang.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = (sys.executable, "-c", script, "serve", "--port", "0", "--otlp-traces-endpoint", "http://localhost:4318")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    needed = "otlp_traces_endpoint needs OpenTelemetry's packages: pip install 'mini-sglang[otel]'"
    assert ended.stderr == f"mini-sglang: error: {needed}\n"


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://localhost:4317", "http://", "http://me:secret@host:4318"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint must be like http://localhost:4318") as error:
        ServerConfig(otlp_traces_endpoint=url)
    assert "secret" not in str(error.value).replace("nothing secret", "")


def test_without_a_collector_nothing_of_it_is_imported() -> None:
    script = "import sys, mini_sglang.server.http_server; print(*sys.modules)"
    modules = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, check=True).stdout.split()
    assert "mini_sglang.server.answering" in modules
    assert not [name for name in modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
    assert "mini_sglang.server.tracing" not in modules
