"""Log-probabilities do not depend on streaming: those of a stream's events, joined, are those of the plain answer.

Tokens whose text is held back (the start of a stop string, part of a character, what may be a call) have theirs too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.server.conftest import ScriptedEngine

Json = dict[str, Any]

TEXTS = [
    "Grüße aus Köln 🦙🦙 und 東京.",
    "<think>Hm.</think>Let me see.",
    "<think>Never closed",
    'First <tool_call>{"name": "f", "arguments": {"a": "ü"}}</tool_call> and then more.',
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "unknown"}</tool_call>, she wrote.',
    "Hello there, dear fri",
    "1 < 2 <",
    "",
]
STOPS: list[list[str]] = [[], [", dear friend"], ["東京", "🦙🦙🦙"], ["see", "<tool"]]
HI = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
BODIES: dict[str, Json] = {  # by route, or by the kind of body where a route takes two
    "/v1/chat/completions": {
        "messages": HI,
        "logprobs": True,
        "top_logprobs": 1,
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/completions": {"prompt": "Hi", "logprobs": 1, "echo": True, "max_tokens": 300},
    "/v1/responses": {"input": "Hi", "top_logprobs": 1, "tools": [{"type": "function", **FUNCTION}]},
    "/generate": {"prompt": "Hi", "logprobs": 1, "max_tokens": 300},
    "/generate of SGLang": {
        "text": "Hi",
        "return_logprob": True,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
        "logprob_start_len": 0,
    },
}


@pytest.fixture
def client(make_app: Callable[..., FastAPI]) -> TestClient:
    return TestClient(make_app(tool_call_parser="hermes", reasoning_parser="think"))


def script(engine: ScriptedEngine, seed: int) -> list[str]:
    """Make the engine answer with tokens at random: of texts, and any. Returns stop strings."""
    draw = random.Random(seed)
    tokens: list[int] = []
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.3:
            tokens += draw.choices(range(1000, engine.tokenizer.vocab_size), k=draw.randint(1, 5))
        else:
            tokens += engine.tokenizer.encode(draw.choice(TEXTS))
    if draw.random() < 0.2:
        tokens.append(next(i for i in range(300) if engine.tokenizer.token_bytes(i) == b"\xc3"))  # half a character
    engine.tokens = [token for token in tokens if token != engine.eos] + [engine.eos]
    return draw.choice(STOPS)


def data(response: Any) -> Iterator[Json]:
    assert response.status_code == 200, response.text
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def columns(parts: list[Json]) -> Json:
    """Lists of the same name, joined."""
    return {name: [entry for part in parts for entry in part.get(name) or ()] for part in parts for name in part}


def of_choice(choice: Json) -> Any:
    return choice["logprobs"] or {}


def of_response(response: Json) -> list[Json]:
    contents = [item["content"] for item in response["output"] if item["type"] == "message"]
    return [entry for content in contents for part in content for entry in part["logprobs"]]


def of_sglang(answer: Json) -> Json:
    return {name: rows for name, rows in answer["meta_info"].items() if name.endswith("logprobs")}


def compared(kind: str, whole: Json, events: list[Json]) -> tuple[Any, Any]:
    """The log-probabilities of a plain answer, and those of a stream's events."""
    match kind:
        case "/v1/responses":
            deltas = [event for event in events if event["type"] == "response.output_text.delta"]
            assert of_response(events[-1]["response"]) == of_response(whole)
            return of_response(whole), [entry for event in deltas for entry in event["logprobs"]]
        case "/generate":
            return whole["logprobs"], [entry for event in events for entry in event["logprobs"]]
        case "/generate of SGLang":
            return of_sglang(whole), columns([of_sglang(event) for event in events])
        case _:
            choices = [event["choices"][0] for event in events]
            return columns([of_choice(whole["choices"][0])]), columns([of_choice(choice) for choice in choices])


@pytest.mark.parametrize("kind", BODIES)
def test_a_stream_has_the_log_probabilities_of_the_plain_answer(
    client: TestClient, engine: ScriptedEngine, kind: str
) -> None:
    route = kind.partition(" ")[0]
    for seed in range(60):
        fields: Json = {"stop": script(engine, seed)}
        if "SGLang" in kind:
            fields = {"sampling_params": fields}
        plain = client.post(route, json={**BODIES[kind], **fields})
        streamed = client.post(route, json={**BODIES[kind], **fields, "stream": True})
        whole, joined = compared(kind, plain.json(), list(data(streamed)))
        assert joined == whole, seed


def test_every_token_of_a_text_has_one(client: TestClient, engine: ScriptedEngine) -> None:
    engine.tokens = [*engine.tokenizer.encode("Köln 🦙, dear friend"), engine.eos]
    body = {**BODIES["/v1/responses"], "stop": [", dear friend"]}
    whole = client.post("/v1/responses", json=body).json()
    assert len(of_response(whole)) == whole["usage"]["output_tokens"]


def test_reasoning_and_calls_have_none_in_a_response(client: TestClient, engine: ScriptedEngine) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    engine.tokens = [*engine.tokenizer.encode(f"<think>Hm.</think>Yes.{call}"), engine.eos]
    whole = client.post("/v1/responses", json=BODIES["/v1/responses"]).json()
    assert "".join(entry["token"] for entry in of_response(whole)) == "Yes.<"  # of a token that holds both
