"""What one client sends may cost only so much: it is refused before time or memory goes into it, in a short answer."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from mini_sglang.sampling_params import MAX_STOP_LENGTH, SamplingParams
from mini_sglang.server.config import ServerConfig
from mini_sglang.server.openai.bodies import ChatBody
from mini_sglang.server.request_body import check_body, decode_object
from mini_sglang.text.tokenizer import Tokenizer
from tests.server.conftest import ScriptedEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
MESSAGES = [{"role": "user", "content": "Hi"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "Hi"},
    GENERATE: {"prompt": "Hi"},
    "/detokenize": {},
}
HUGE = "y" * 300_000


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert len(response.content) < 2000
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.fixture
def untouched(engine: ScriptedEngine, builtin_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the engine is there, tokenising fails the test."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(builtin_tokenizer, "encode", fail)
    monkeypatch.setattr(builtin_tokenizer, "apply_chat_template", fail)


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        (COMPLETIONS, "stop", ["ab" * (MAX_STOP_LENGTH // 2) + "c"]),
        (COMPLETIONS, "stop", "a" * (MAX_STOP_LENGTH + 1)),
        (CHAT, "stop", ["a"] * 100_000),
        (CHAT, "stop_token_ids", ["x"] * 100_000),
        (CHAT, "stop_token_ids", [1] * 1025),
        (GENERATE, "allowed_token_ids", ["x"] * 100_000),
        (GENERATE, "allowed_token_ids", [1] * 1_000_001),
        (GENERATE, "logit_bias", {str(index): "x" for index in range(5000)}),
        (CHAT, "metadata", {str(index): "x" for index in range(17)}),
        (CHAT, "messages", [0] * 100_001),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "text", "text": ""}] * 100_001}]),
        (CHAT, "chat_template_kwargs", {"x": [0] * 40_000}),
        (CHAT, "chat_template_kwargs", {"self": 1}),
        (CHAT, "cache_salt", "x" * 257),
        ("/detokenize", "tokens", [1] * 1_000_001),
        (GENERATE, "prompt", [1] * 1_000_001),
    ],
)
def test_what_is_too_large_is_refused_by_name(client: TestClient, route: str, field: str, value: Any) -> None:
    error = error_of(client.post(route, json={**BASE[route], field: value}))
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["a" * MAX_STOP_LENGTH] * 16),
        ("cache_salt", "x" * 256),
        ("metadata", {str(index): "x" for index in range(16)}),
        ("chat_template_kwargs", {"x": "y" * 60_000}),
    ],
)
def test_what_is_just_small_enough_is_taken(client: TestClient, field: str, value: Any) -> None:
    assert client.post(CHAT, json={**BASE[CHAT], field: value}).status_code == 200


@pytest.mark.parametrize("value", [2**63, 2**64, 10**30])
def test_a_top_k_beyond_the_vocabulary_is_all_of_it(client: TestClient, engine: ScriptedEngine, value: int) -> None:
    assert client.post(COMPLETIONS, json={"prompt": "Hi", "top_k": value}).status_code == 200
    assert engine.calls[0].params.top_k == engine.info.vocab_size


@pytest.mark.parametrize("value", [str(2**63), str(-(2**64)), "1" + "0" * 300, "-1" + "0" * 4000, "1" * 5000])
@pytest.mark.parametrize("field", ["max_tokens", "top_k", "seed", "priority", "n", "logprobs", "temperature", "top_p"])
def test_no_number_is_a_fault_of_the_server(client: TestClient, field: str, value: str) -> None:
    body = f'{{"prompt": "Hi", "{field}": {value}}}'
    response = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text
    assert len(response.content) < 2000


def test_numbers_out_of_range_are_errors_without_a_server_too() -> None:
    huge = 10**5000
    for params in (
        SamplingParams(temperature=huge),
        SamplingParams(seed=huge),
        SamplingParams(top_k=-huge),
        SamplingParams(stop_token_ids=[-huge]),
    ):
        with pytest.raises(ValueError, match="an integer of 16610 bits"):
            params.validate()


@pytest.mark.usefixtures("untouched")
def test_a_text_that_is_certainly_too_long_is_not_tokenised(client: TestClient, engine: ScriptedEngine) -> None:
    length = 1_000_000
    for route, body in [
        (GENERATE, {"prompt": "1" * length}),
        (COMPLETIONS, {"prompt": ["a", "1" * length]}),
        ("/tokenize", {"prompt": "1" * length}),
        (CHAT, {"messages": [{"role": "user", "content": "1" * (length // 4)}] * 4}),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * engine.info.context_length}),
    ]:
        error = error_of(client.post(route, json=body))
        assert error["param"] in ("prompt", "messages")
        assert "at least" in error["message"]
        assert str(engine.info.context_length) in error["message"]


def test_the_least_number_of_tokens_is_never_more_than_there_are(builtin_tokenizer: Tokenizer) -> None:
    for text in ("", "a", " " * 5000, "word " * 100, "\n" * 1000, "🦩" * 50, "<|im_start|>" * 100, "=" * 4000):
        assert builtin_tokenizer.fewest_tokens(len(text.encode())) <= len(builtin_tokenizer.encode(text))
    assert builtin_tokenizer.fewest_tokens(10**7) > 10_000


@pytest.mark.usefixtures("untouched")
def test_too_many_choices_are_counted_before_they_are_tokenised(client: TestClient) -> None:
    for body in ({"prompt": ["x" * 90] * 1025}, {"prompt": ["x"] * 9, "n": 128}):
        error = error_of(client.post(COMPLETIONS, json=body))
        assert error["param"] == "prompt"
        assert "1024" in error["message"]


def test_errors_repeat_little_of_what_was_sent(client: TestClient) -> None:
    for body in (
        {**BASE[CHAT], HUGE: 1},
        {**BASE[CHAT], "stop": [HUGE]},
        {**BASE[CHAT], "temperature": HUGE},
        {**BASE[CHAT], "logit_bias": {HUGE: 1}},
        {**BASE[CHAT], "response_format": {HUGE: HUGE}},
        {"messages": [{"role": HUGE, "content": "Hi"}]},
        {"messages": [{"role": "user", "content": "Hi", HUGE: 1}]},
        {"messages": [{"role": "user", "content": [{"type": HUGE}]}]},
    ):
        error_of(client.post(CHAT, json=body))
    error_of(client.post(CHAT, json={**BASE[CHAT], "model": HUGE}), 404)
    error_of(client.get(f"/{HUGE[:60_000]}"), 404)
    error_of(client.post(COMPLETIONS, json={"prompt": [1, HUGE]}))
    error_of(client.post(CHAT, content=f'{{"{HUGE}": NaN}}', headers={"content-type": "application/json"}))
    error_of(client.post(CHAT, content="{}", headers={"content-type": HUGE}), 415)


def test_the_reason_of_a_refusal_is_searched_for_only_so_long() -> None:
    for count, named in ((1000, True), (1_000_000, False)):
        data = json.dumps({"messages": [0] * count + [math.nan]}).encode()
        with pytest.raises(Exception, match="messages" if named else "not valid JSON"):
            check_body(decode_object(data), ChatBody)


def test_the_ids_of_choices_take_none_from_clients(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> None:
    engine.pause_after = 1

    async def scenario() -> None:
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            def ask(rid: str, n: int) -> asyncio.Task[httpx.Response]:
                body = {"text": "Hi", "rid": rid, "sampling_params": {"n": n}}
                return asyncio.create_task(client.post("/generate", json=body))

            tasks = [ask("q", 2), ask("q-0", 1)]
            while len(engine.running) < 3:
                await asyncio.sleep(0.001)
            assert (await ask("q", 1)).status_code == 400  # truly in use
            for rid, count in (("q", 2), ("q-0", 1)):
                assert (await client.post("/abort", json={"request_id": rid})).json() == {"aborted": count}
            several, one = [(await task).json() for task in tasks]
            assert one["meta_info"]["id"] == "q-0"
            assert len({answer["meta_info"]["id"] for answer in (*several, one)}) == 3

    asyncio.run(scenario())


def test_abort_ends_the_one_request_with_that_id(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> None:
    engine.pause_after = 2

    async def scenario() -> None:
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            names = ("job", "job-2", "job-20")
            running = {
                name: asyncio.create_task(client.post(GENERATE, json={"prompt": "x", "request_id": name}))
                for name in names
            }
            chat = asyncio.create_task(client.post(CHAT, json=BASE[CHAT]))
            while len(engine.running) < 4:
                await asyncio.sleep(0.001)
            taken = await client.post(GENERATE, json={"prompt": "x", "request_id": "job-2"})
            assert error_of(taken)["param"] == "request_id"
            for prefix in ("chatcmpl", "jo", "job-"):
                assert (await client.post("/abort", json={"request_id": prefix})).json() == {"aborted": 0}
            for name in names:
                assert (await client.post("/abort", json={"request_id": name})).json() == {"aborted": 1}
                assert (await running.pop(name)).json()["finish_reason"] == "abort"
                assert len(engine.running) == len(running) + 1
            engine.abort(engine.request_ids[0])
            await chat

    asyncio.run(scenario())


def test_a_client_that_leaves_while_it_sends_is_no_fault(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    messages = iter([{"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}])
    sent = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": GENERATE,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    with caplog.at_level(logging.INFO):
        asyncio.run(make_app()(scope, receive, send))  # does not raise
    assert sent[0]["status"] == 499
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert engine.calls == []


def test_an_unforeseen_fault_is_left_to_the_http_server_to_log(
    client: TestClient, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.error = KeyError("detail")
    error_of(client.post(GENERATE, json=BASE[GENERATE]), 500)
    assert [record for record in caplog.records if record.exc_info] == []


def test_the_api_key_guards_the_description_too(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(api_key=("secret",)))
    error_of(client.get("/openapi.json"), 401)
    assert client.get("/openapi.json", headers={"authorization": "Bearer secret"}).status_code == 200
    assert client.get("/redoc").status_code == 404


def test_health_can_be_asked_without_an_answer(client: TestClient) -> None:
    assert client.head("/health").status_code == 200


@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf, -math.inf])
def test_a_shutdown_timeout_is_a_finite_time(value: float) -> None:
    with pytest.raises(ValueError, match="shutdown_timeout_s"):
        ServerConfig(shutdown_timeout_s=value)
