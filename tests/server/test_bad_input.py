"""Whatever a client gets wrong is a 4xx in OpenAI's error shape that names the field; the server goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from mini_sglang.errors import FieldError
from mini_sglang.ipc.async_engine import EngineDeadError
from tests.server.conftest import ScriptedEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
MESSAGES = [{"role": "user", "content": "Hi"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "Hi"},
    GENERATE: {"prompt": "Hi"},
}
JSON = {"content-type": "application/json"}

Json = dict[str, Any]


def refused(response: Any, status: int = 400) -> Json:
    """The error of an answer that must be one, in the one shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: Json = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture(autouse=True)
def canary(client: TestClient, engine: ScriptedEngine) -> Iterator[None]:
    """After every test the server still answers, and nothing runs."""
    yield
    engine.error = engine.fail_after = None
    assert client.post(GENERATE, json={"prompt": "Hi"}).json()["text"] == "Hello there, dear friend."
    assert engine.running == {}


SAMPLING: list[tuple[str, Any]] = [
    ("min_tokens", 2**64),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", 5.0),
    ("max_tokens", True),
    ("max_tokens", "5"),
    ("temperature", -0.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", 1e300),
    ("temperature", 10**200),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", False),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", "x"),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stop", [""]),
    ("stop", ""),
    ("stop", 5),
    ("stop", ["a"] * 17),
    ("stop", [["a"]]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**9]),
    ("stop_token_ids", ["1"]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"99999999": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("ignore_eos", "yes"),
    ("stream", 1),
    ("priority", 2**40),
    ("cache_salt", 5),
]


@pytest.mark.parametrize("route", BASE)
@pytest.mark.parametrize(("field", "value"), SAMPLING)
def test_a_sampling_field_out_of_range_or_of_the_wrong_type(
    client: TestClient, route: str, field: str, value: Any
) -> None:
    error = refused(client.post(route, json={**BASE[route], field: value}))
    assert error["param"] == field
    assert field in error["message"]


OPENAI: list[tuple[str, str, Any]] = [
    *((route, "n", value) for route in (CHAT, COMPLETIONS) for value in (0, 129, 5_000_000, True, 1.0)),
    *((route, "stream_options", {"include_usage": True}) for route in (CHAT, COMPLETIONS)),
    (CHAT, "max_completion_tokens", 0),
    (CHAT, "top_logprobs", 21),
    (CHAT, "top_logprobs", 1_000_000_000),
    (CHAT, "logprobs", 1),
    (COMPLETIONS, "logprobs", 1_000_000_000),
    (COMPLETIONS, "best_of", 5_000_000),
    (COMPLETIONS, "suffix", "x"),
    (CHAT, "tools", [{"type": "function", "function": {}}]),
    (CHAT, "tools", [{"type": "function", "function": {"name": "no spaces"}}]),
    (CHAT, "tools", [{"type": "function", "function": {"name": "f", "parameters": "none"}}]),
    (CHAT, "tools", [{"type": "web_search"}]),
    (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}] * 129),
    (CHAT, "tools", [{"type": "function", "function": {"name": f"f{index}"}} for index in range(129)]),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", "sometimes"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
    (CHAT, "parallel_tool_calls", 1),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "reasoning_effort", "wild"),
    (CHAT, "modalities", ["audio"]),
    (CHAT, "audio", {"voice": "x", "format": "wav"}),
    (CHAT, "store", True),
    (CHAT, "chat_template_kwargs", {"messages": []}),
    (CHAT, "chat_template_kwargs", {"tokenize": False}),
    (CHAT, "invented", None),
    (COMPLETIONS, "messages", MESSAGES),
    (GENERATE, "n", 2),
    (GENERATE, "rep_penalty", 0),
    (GENERATE, "request_id", ""),
]


@pytest.mark.parametrize(("route", "field", "value"), OPENAI)
def test_a_field_that_is_not_supported_is_refused_by_name(
    client: TestClient, route: str, field: str, value: Any
) -> None:
    error = refused(client.post(route, json={**BASE[route], "logprobs": None, field: value}))
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("route", "body", "path"),
    [
        (CHAT, {"messages": MESSAGES, "tool_choice": "sometimes"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "structured_outputs": {"json": 5}}, "structured_outputs.json"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"a[0]": "x"}}, "logit_bias.a[0]"),
        (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages.1.content"),
        ("/v1/responses", {"input": [{"role": "user", "content": 5}]}, "input.0.content"),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
         "messages.0.content.0.text"),
    ],
)  # fmt: skip
def test_the_path_to_what_is_wrong_is_that_in_the_body(client: TestClient, route: str, body: Json, path: str) -> None:
    assert client.post(route, json=body).json()["error"]["message"].startswith(f"{path}: ")


def test_a_field_that_is_missing_is_named_with_its_path(client: TestClient) -> None:
    for message, path in (({"content": "Hi"}, "messages.1.role"), ({"role": "tool"}, "messages.1")):
        error = refused(client.post(CHAT, json={"messages": [*MESSAGES, message]}))
        assert error["message"].startswith(f"{path} ")
    assert refused(client.post("/v1/responses", json={"input": [{"role": "user"}]}))["message"] == (
        "input.0.content is required"
    )


def test_the_allowed_maximum_is_named(client: TestClient) -> None:
    assert "128" in refused(client.post(CHAT, json={**BASE[CHAT], "n": 129}))["message"]
    body = {**BASE[CHAT], "logprobs": True, "top_logprobs": 21}
    assert "20" in refused(client.post(CHAT, json=body))["message"]
    body = {"prompt": ["a"] * 1025}
    assert "1024" in refused(client.post(COMPLETIONS, json=body))["message"]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        [[1], []],
        ["a", ""],
        [-1],
        [10**9],
        [2**70],
        [1.5],
        [True],
        [None],
        ["a", 1],
        [1, "a"],
        5,
        None,
    ],
)
def test_a_prompt_that_is_none(client: TestClient, prompt: Any) -> None:
    assert refused(client.post(COMPLETIONS, json={"prompt": prompt}))["param"] == "prompt"
    assert refused(client.post(GENERATE, json={"prompt": prompt}))["param"] == "prompt"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "Hi",
        ["Hi"],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "wizard", "content": "Hi"}],
        [{"role": "tool", "content": None, "tool_call_id": "1"}],
        [{"role": "user", "content": "Hi", "tool_calls": [{"id": "x", "function": {"name": "f"}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": 5}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": ["Hi"]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}],
        [{"role": "user", "content": "Hi", "invented": 1}],
    ],
)
def test_messages_that_are_none(client: TestClient, messages: Any) -> None:
    error = refused(client.post(CHAT, json={"messages": messages}))
    assert error["param"] == "messages"


def test_messages_that_are_too_long(client: TestClient, engine: ScriptedEngine) -> None:
    error = refused(client.post(CHAT, json={"messages": [{"role": "user", "content": "word " * 1000}]}))
    assert error["param"] == "messages"
    assert str(engine.info.context_length) in error["message"]


def test_an_empty_message_is_a_message(client: TestClient) -> None:
    assert client.post(CHAT, json={"messages": [{"role": "user", "content": ""}]}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 64])
def test_lengths_around_the_context(client: TestClient, engine: ScriptedEngine, max_tokens: int, stream: bool) -> None:
    limit = engine.info.max_prompt_tokens
    for length in (limit - 1, limit):
        body = {"prompt": [5] * length, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
        assert client.post(COMPLETIONS, json=body).status_code == 200
        assert engine.calls[-1].params.max_tokens == min(max_tokens, engine.info.context_length - length)
    for length in (limit + 1, engine.info.context_length - 1):
        body = {"prompt": [5] * length, "max_tokens": max_tokens, "stream": stream}
        message = refused(client.post(COMPLETIONS, json=body))["message"]
        assert str(length) in message
        assert str(engine.info.num_pages * engine.info.page_size) in message
    for length in (engine.info.context_length, engine.info.context_length + 1):
        body = {"prompt": [5] * length, "max_tokens": max_tokens, "stream": stream}
        message = refused(client.post(COMPLETIONS, json=body))["message"]
        assert str(length) in message
        assert str(engine.info.context_length) in message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'{"messages": []} x',
        b'{"messages": \xff}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": [], "temperature": 1e999}',
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE, "/tokenize", "/detokenize", "/abort"])
def test_a_body_that_is_no_json_object(client: TestClient, route: str, body: bytes) -> None:
    refused(client.post(route, content=body, headers=JSON))


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have(client: TestClient, literal: str) -> None:
    for field in ("temperature", "top_p", "max_tokens"):
        body = json.dumps({"messages": MESSAGES, field: 0}).replace(": 0", f": {literal}")
        error = refused(client.post(CHAT, content=body, headers=JSON))
        assert error["param"] == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [{"role": "user", "content": "ab\ud83dcd"}]}, "messages"),
        ({"messages": MESSAGES, "stop": ["\udc00"]}, "stop"),
        ({"messages": MESSAGES, "user": "\udfff"}, "user"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"a": {"b": ["\ud800"]}}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "model": "\ud800"}, "model"),
    ],
)
def test_half_of_a_surrogate_pair(client: TestClient, body: Json, field: str) -> None:
    assert refused(client.post(CHAT, content=json.dumps(body), headers=JSON))["param"] == field


def test_an_emoji_written_as_an_escaped_pair_is_fine(client: TestClient, engine: ScriptedEngine) -> None:
    assert client.post(COMPLETIONS, content=r'{"prompt": "ab\ud83d\ude00"}', headers=JSON).status_code == 200
    assert engine.calls[0].prompt_ids == engine.tokenizer.encode("ab😀")


def test_a_model_that_is_not_served(client: TestClient) -> None:
    for route in (CHAT, COMPLETIONS):
        error = refused(client.post(route, json={**BASE[route], "model": "gpt-9"}), 404)
        assert error["code"] == "model_not_found"
        assert "gpt-9" in error["message"]


def test_routes_and_methods_that_are_not_there(client: TestClient) -> None:
    assert "/v1/nothing" in refused(client.get("/v1/nothing"), 404)["message"]
    assert "GET" in refused(client.get(CHAT), 405)["message"]


def test_another_content_type(client: TestClient) -> None:
    assert "application/json" in refused(client.post(CHAT, content="{}"), 415)["message"]


def test_a_body_over_the_limit(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(max_body_bytes=1000))

    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 100

    for content in (b'{"prompt": "' + b"x" * 1000 + b'"}', chunks()):  # with its length declared, and chunked
        assert "1000" in refused(client.post(GENERATE, content=content, headers=JSON), 413)["message"]
    assert client.post(GENERATE, json={"prompt": "x" * 900}).status_code == 200


def test_an_api_key_guards_all_but_health_and_metrics(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(api_key=("secret",)))
    for value in (None, "Bearer wrong", "secret", "Bearer é", "Basic secret"):
        headers = {} if value is None else {b"authorization": value.encode()}
        for method, route in (("POST", CHAT), ("GET", "/v1/models"), ("POST", "/flush_cache"), ("GET", "/server_info")):
            refused(client.request(method, route, headers=headers), 401)
    assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
    assert client.get("/health").status_code == 200
    assert client.get("/metrics").status_code == 200


def test_more_requests_than_the_server_takes(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> None:
    client = TestClient(make_app(max_waiting_requests=2))
    limit = engine.info.max_running_requests + 2
    assert client.post(COMPLETIONS, json={"prompt": "a", "n": limit}).status_code == 200
    response = client.post(COMPLETIONS, json={"prompt": "a", "n": limit + 1})
    assert str(limit) in refused(response, 429)["message"]
    assert response.headers["retry-after"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_is_a_400(client: TestClient, engine: ScriptedEngine, stream: bool) -> None:
    engine.error = FieldError("prompt", "has 5 tokens, too many today")
    for n in (1, 3):
        error = refused(client.post(COMPLETIONS, json={"prompt": "a", "n": n, "stream": stream}))
        assert (error["param"], error["message"]) == ("prompt", "prompt has 5 tokens, too many today")


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_a_503(client: TestClient, engine: ScriptedEngine, stream: bool) -> None:
    engine.error = EngineDeadError("the engine process ended with status -9")
    for route in BASE:
        assert "status -9" in refused(client.post(route, json={**BASE[route], "stream": stream}), 503)["message"]
    assert "status -9" in refused(client.get("/health"), 503)["message"]
    assert 'mini_sglang:engine_up{model_name="scripted"} 0.0' in client.get("/metrics").text


def test_a_stuck_engine_is_a_503(client: TestClient, engine: ScriptedEngine) -> None:
    engine.error = TimeoutError("the engine did not answer within 5 s")
    for method, route in (("GET", "/health"), ("GET", "/server_info"), ("POST", "/flush_cache")):
        assert "5 s" in refused(client.request(method, route), 503)["message"]
    assert 'mini_sglang:engine_up{model_name="scripted"} 0.0' in client.get("/metrics").text


def test_an_unforeseen_fault_is_a_500_without_details(client: TestClient, engine: ScriptedEngine) -> None:
    engine.error = KeyError("secret detail")
    for route in BASE:
        assert "secret" not in refused(client.post(route, json=BASE[route]), 500)["message"]


def test_a_failing_step_is_a_500_or_the_last_event(client: TestClient, engine: ScriptedEngine) -> None:
    engine.fail_after = 2
    assert "the step failed" in refused(client.post(COMPLETIONS, json={"prompt": "a"}), 500)["message"]
    response = client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "stream": True})
    assert response.status_code == 200
    last = response.text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the step failed"
    assert "[DONE]" not in response.text
