"""/generate and the routes for operators, from a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from mini_sglang.text.tokenizer import Tokenizer
from tests.server.conftest import ScriptedEngine

TEXT = "Hello there, dear friend."


def metric(text: str, name: str, **labels: str) -> float:
    """The value of one line of Prometheus' text format; `labels` beyond the model's name."""
    pairs = "".join(f'{key}="{value}",' for key, value in labels.items())
    [line] = [line for line in text.splitlines() if line.startswith(f"mini_sglang:{name}{{{pairs}model_name=")]
    return float(line.rpartition(" ")[2])


def test_generate_answers_with_text_and_tokens(client: TestClient, engine: ScriptedEngine) -> None:
    answer = client.post("/generate", json={"prompt": "Hi", "request_id": "mine"}).json()
    assert answer["id"] == "mine"
    assert answer["text"] == TEXT
    assert answer["token_ids"] == engine.tokens
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", None)
    assert answer["usage"]["completion_tokens"] == len(engine.tokens)
    assert "logprobs" not in answer


def test_a_generate_stream_joins_to_the_plain_answer(client: TestClient, engine: ScriptedEngine) -> None:
    body = {"prompt": "Hi", "max_tokens": 5, "logprobs": 2}
    plain = client.post("/generate", json=body).json()
    response = client.post("/generate", json={**body, "stream": True})
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    assert len(parts) == 5
    assert "".join(part["text"] for part in parts) == plain["text"]
    for name in ("token_ids", "logprobs"):
        assert [entry for part in parts for entry in part[name]] == plain[name]
    assert parts[-1]["finish_reason"] == plain["finish_reason"] == "length"
    assert parts[-1]["usage"] == plain["usage"]


def test_the_short_name_of_the_repetition_penalty(client: TestClient, engine: ScriptedEngine) -> None:
    client.post("/generate", json={"prompt": [1, 2], "rep_penalty": 1.3, "top_k": -1, "seed": 5})
    [call] = engine.calls
    assert (call.params.repetition_penalty, call.params.top_k, call.params.seed) == (1.3, -1, 5)
    assert call.prompt_ids == [1, 2]


@pytest.mark.parametrize("text", ["Hello 🦩", "<|im_start|>user", "x " * 5000])
def test_tokens_there_and_back(client: TestClient, builtin_tokenizer: Tokenizer, text: str) -> None:
    answer = client.post("/tokenize", json={"prompt": text}).json()
    assert answer["tokens"] == builtin_tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["text"] == text


def test_messages_are_tokenised_as_a_chat_is(client: TestClient, engine: ScriptedEngine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    client.post("/v1/chat/completions", json={"messages": messages})
    assert client.post("/tokenize", json={"messages": messages}).json()["tokens"] == engine.calls[0].prompt_ids


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}),
        ("/abort", {}),
    ],
)
def test_bad_bodies_are_refused(client: TestClient, route: str, body: dict[str, Any]) -> None:
    response = client.post(route, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("prompt", "tokens", "request_id")


def test_operators_routes(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.post("/flush_cache").json() == {"flushed_pages": 3}
    info = client.get("/server_info").json()
    assert info["model"] == "scripted"
    assert info["engine"]["num_pages"] == info["stats"]["num_free_pages"]
    assert info["engine"]["config"]["page_size"] == 16
    assert info["server"]["max_waiting_requests"] == 4096
    assert "api_key" not in json.dumps(info)


def test_metrics_count_what_happened(client: TestClient, engine: ScriptedEngine) -> None:
    for limit in (3, 50):
        client.post("/v1/completions", json={"prompt": [1, 2, 3, 4], "max_tokens": limit})
    engine.fail_after = 2
    client.post("/v1/completions", json={"prompt": [1]})
    text = client.get("/metrics").text
    assert metric(text, "engine_up") == 1
    assert metric(text, "kv_pages") == metric(text, "kv_free_pages") == engine.info.num_pages
    assert metric(text, "num_requests_running") == metric(text, "num_requests_waiting") == 0
    assert metric(text, "prompt_tokens_total") == 9
    assert metric(text, "generation_tokens_total") == 3 + len(engine.tokens) + 2
    for reason, count in {"length": 1, "stop": 1, "error": 1, "abort": 0}.items():
        assert metric(text, "request_success_total", finished_reason=reason) == count
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens"):
        assert metric(text, f"{name}_count") == 3
    assert metric(text, "inter_token_latency_seconds_count") == metric(text, "generation_tokens_total") - 3


def test_two_apps_share_nothing(make_app: Callable[..., FastAPI]) -> None:
    first, second = TestClient(make_app()), TestClient(make_app(served_model_name=("other",)))
    first.post("/generate", json={"prompt": "Hi"})
    assert metric(second.get("/metrics").text, "generation_tokens_total") == 0
    assert second.get("/v1/models").json()["data"][0]["id"] == "other"


def test_abort_ends_all_choices_with_what_they_have(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> None:
    engine.pause_after = 3

    async def scenario() -> None:
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": ["a", "b"], "n": 2}
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            while len(engine.running) < 4:
                await asyncio.sleep(0.001)
            choice_id = engine.request_ids[0]
            assert (await client.post("/generate", json={"prompt": "x", "request_id": choice_id})).status_code == 400
            request_id = choice_id.rpartition("-")[0]
            assert (await client.post("/abort", json={"request_id": "unknown"})).json() == {"aborted": 0}
            assert (await client.post("/abort", json={"request_id": request_id})).json() == {"aborted": 4}
            choices = (await running).json()["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["abort"] * 4
            assert [choice["text"] for choice in choices] == ["Hello there,"] * 4

    asyncio.run(scenario())
    assert engine.running == {}


def test_the_api_describes_its_bodies(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for route in ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize", "/abort"):
        body = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for schema in body.get("anyOf", [body]):
            assert schemas[schema["$ref"].rpartition("/")[2]]["properties"]
    assert "#/$defs" not in json.dumps(document)
