"""`echo` on /v1/completions: the prompt and its log-probabilities first, as evaluation programs read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.server.conftest import ScriptedEngine
from tests.tiny import Checkpoints

Json = dict[str, Any]


def complete(client: TestClient, **fields: Any) -> Json:
    response = client.post("/v1/completions", json={"prompt": "One two 🦩 four", **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def chunks(client: TestClient, **fields: Any) -> list[Json]:
    response = client.post("/v1/completions", json={"prompt": "One two 🦩 four", "stream": True, **fields})
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def check_pointers(choice: Json) -> None:
    logprobs = choice["logprobs"]
    assert len({len(entries) for entries in logprobs.values()}) == 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"].startswith(token, offset)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_answer_begins_with_the_prompt_and_its_log_probabilities(client: TestClient, count: int) -> None:
    answer = complete(client, echo=True, logprobs=2, max_tokens=count)
    [choice] = answer["choices"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == count
    assert usage["total_tokens"] == usage["prompt_tokens"] + count
    assert len(choice["logprobs"]["tokens"]) == usage["prompt_tokens"] + count
    assert choice["text"].startswith("One two 🦩 four")
    assert choice["finish_reason"] == "length"
    check_pointers(choice)


def test_a_stream_says_the_same(client: TestClient) -> None:
    [choice] = complete(client, echo=True, logprobs=2, max_tokens=3)["choices"]
    choices = [chunk["choices"][0] for chunk in chunks(client, echo=True, logprobs=2, max_tokens=3)]
    assert "".join(part["text"] for part in choices) == choice["text"]
    for name, entries in choice["logprobs"].items():
        assert [entry for part in choices for entry in part["logprobs"][name]] == entries


def test_every_choice_has_its_own_prompt(client: TestClient, engine: ScriptedEngine) -> None:
    answer = complete(client, prompt=["a", engine.tokenizer.encode("b c")], n=2, echo=True, max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == ["aHello there"] * 2 + ["b cHello there"] * 2
    assert answer["choices"][0]["logprobs"] is None


def test_without_echo_nothing_is_asked_of_the_prompt(client: TestClient, engine: ScriptedEngine) -> None:
    complete(client, logprobs=2)
    assert engine.calls[0].params.prompt_logprobs is None
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 0}).status_code == 400


def test_a_null_limit_reaches_up_to_the_context(client: TestClient, engine: ScriptedEngine) -> None:
    complete(client, max_tokens=None)
    complete(client)
    assert [call.params.max_tokens for call in engine.calls] == [512 - len(engine.calls[0].prompt_ids), 16]


def test_usage_so_far_in_every_chunk(client: TestClient) -> None:
    parts = chunks(client, max_tokens=3, stream_options={"continuous_usage_stats": True, "include_usage": True})
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 2, 3, 3]
    assert "cached_tokens" in parts[0]["usage"]["prompt_tokens_details"]
    for name in ("id", "created", "system_fingerprint"):
        assert len({part[name] for part in parts}) == 1


def test_min_tokens_reach_the_engine_and_are_checked(client: TestClient, engine: ScriptedEngine) -> None:
    complete(client, min_tokens=5, max_tokens=9)
    assert engine.calls[0].params.min_tokens == 5
    refused = client.post("/v1/completions", json={"prompt": "x", "min_tokens": 5, "max_tokens": 4})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "min_tokens"


def test_a_real_engine_answers_as_transformers_cached_or_not(
    start_server: Callable[..., Any], checkpoints: Checkpoints
) -> None:
    checkpoint = checkpoints.write("qwen3")
    server = start_server("--model", str(checkpoint.path), "--dtype", "float32")
    body = {"prompt": "The capital of France is Paris.", "echo": True, "logprobs": 1, "temperature": 0}
    for count in (0, 1, 1):  # the second time the prompt is in the prefix cache
        answer = server.post("/v1/completions", **body, max_tokens=count).json()
        [choice] = answer["choices"]
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == answer["usage"]["prompt_tokens"] + count
        assert choice["text"].startswith(body["prompt"])
        check_pointers(choice)
        ids = server.post("/tokenize", prompt=body["prompt"]).json()["tokens"]
        with torch.inference_mode():
            expected = checkpoint.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = [float(expected[index, token]) for index, token in enumerate(ids[1:])]
        assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-3)
        best = [max(top.values()) for top in logprobs["top_logprobs"][1 : len(ids)]]
        assert best == pytest.approx(expected[: len(ids) - 1].amax(-1).tolist(), abs=1e-3)


def test_an_abort_before_the_prompt_was_computed_leaves_its_tokens_without_probabilities(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine
) -> None:
    engine.pause_after = 0

    async def scenario() -> None:
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "Hello there", "echo": True, "logprobs": 1}
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            while not engine.running:
                await asyncio.sleep(0.001)
            aborted = await client.post("/abort", json={"request_id": engine.request_ids[0]})
            assert aborted.json() == {"aborted": 1}
            [choice] = (await running).json()["choices"]
            assert (choice["finish_reason"], choice["text"]) == ("abort", "Hello there")
            assert set(choice["logprobs"]["token_logprobs"]) == {None}

    asyncio.run(scenario())
