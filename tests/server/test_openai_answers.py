"""Shapes of OpenAI's answers, plain and streamed, from a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from mini_sglang.text.tokenizer import Tokenizer
from tests.server.conftest import ScriptedEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEXT = "Hello there, dear friend."

Json = dict[str, Any]


def chat(client: TestClient, **fields: Any) -> Any:
    return client.post(CHAT, json={"messages": [{"role": "user", "content": "Hi"}], **fields})


def complete(client: TestClient, **fields: Any) -> Any:
    return client.post(COMPLETIONS, json={"prompt": "Hi", **fields})


def events(response: Any) -> list[Json]:
    """The events of a stream, [DONE] checked and left out."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def joined_text(chunks: list[Json], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": None}])
def test_without_stream_a_chat_is_one_json_object(client: TestClient, fields: Json) -> None:
    response = chat(client, max_tokens=16, **fields)
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


def test_a_stream_says_what_the_plain_answer_says(client: TestClient) -> None:
    plain = chat(client).json()
    chunks = events(chat(client, stream=True))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert joined_text(chunks) == plain["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for name in ("id", "created", "model", "system_fingerprint"):
        assert len({chunk[name] for chunk in chunks}) == 1


@pytest.mark.parametrize(("options", "count"), [({"include_usage": True}, 1), ({}, 0), (None, 0)])
def test_usage_is_one_extra_chunk_and_only_if_asked_for(client: TestClient, options: Json | None, count: int) -> None:
    fields = {} if options is None else {"stream_options": options}
    chunks = events(chat(client, stream=True, max_tokens=3, **fields))
    assert sum(chunk.get("usage") is not None for chunk in chunks) == count
    if count:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == chat(client, max_tokens=3).json()["usage"]


def test_choices_of_several_prompts_are_numbered_by_prompt(client: TestClient, engine: ScriptedEngine) -> None:
    answer = complete(client, prompt=["1, 2", "a, b", [5, 6, 7]], n=2, max_tokens=2).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    prompts = [call.prompt_ids for call in sorted(engine.calls, key=lambda call: int(call.request_id.split("-")[-1]))]
    assert prompts[0] == prompts[1] == engine.tokenizer.encode("1, 2")
    assert prompts[2] == prompts[3] == engine.tokenizer.encode("a, b")
    assert prompts[4] == prompts[5] == [5, 6, 7]
    assert answer["usage"]["prompt_tokens"] == sum(len(prompts[i]) for i in (0, 2, 4))
    assert answer["usage"]["completion_tokens"] == 12


def test_streamed_choices_can_be_told_apart(client: TestClient, engine: ScriptedEngine) -> None:
    chunks = events(complete(client, prompt=["x", [1, 2]], n=3, stream=True, stream_options={"include_usage": True}))
    assert [joined_text(chunks, index) for index in range(6)] == [TEXT] * 6
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == list(range(6))
    assert chunks[-1]["usage"]["completion_tokens"] == 6 * len(engine.tokens)


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [1, 2, 3], [[1, 2, 3]]])
def test_every_form_of_a_prompt_is_taken(client: TestClient, prompt: Any) -> None:
    assert len(complete(client, prompt=prompt, max_tokens=1).json()["choices"]) == 1


def test_each_choice_draws_with_its_own_seed(client: TestClient, engine: ScriptedEngine) -> None:
    complete(client, prompt=["a", "b"], n=3, seed=2**63 - 2)
    seeds = {int(call.request_id.split("-")[-1]): call.params.seed for call in engine.calls}
    assert [seeds[i] for i in range(6)] == [2**63 - 2, 2**63 - 1, -(2**63)] * 2


def test_fields_reach_the_sampling_parameters(client: TestClient, engine: ScriptedEngine) -> None:
    fields = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "stop": ["x", "y"],
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "allowed_token_ids": [1, 2],
    }
    others = {"max_completion_tokens": 5, "logit_bias": {"7": 2}, "priority": 3, "cache_salt": "s"}
    assert chat(client, **fields, **others).status_code == 200
    [call] = engine.calls
    assert {name: getattr(call.params, name) for name in fields} == fields
    assert (call.params.max_tokens, call.params.logit_bias) == (5, {7: 2.0})
    assert (call.priority, call.cache_salt) == (3, "s")


def test_limits_left_out_have_the_documented_defaults(client: TestClient, engine: ScriptedEngine) -> None:
    chat(client)
    complete(client)
    client.post("/generate", json={"prompt": "Hi"})
    chat_call, completion_call, generate_call = engine.calls
    assert chat_call.params.max_tokens == engine.info.context_length - len(chat_call.prompt_ids)
    assert completion_call.params.max_tokens == 16
    assert generate_call.params.max_tokens == 64
    assert {call.params.temperature for call in engine.calls} == {1.0}


def test_a_huge_limit_is_cut_to_the_context(client: TestClient, engine: ScriptedEngine) -> None:
    assert complete(client, prompt=[1] * 100, max_tokens=10**30).status_code == 200
    assert engine.calls[0].params.max_tokens == engine.info.context_length - 100


def test_a_stop_string_ends_the_answer(client: TestClient) -> None:
    for stop in (" dear", ["nothing", " dear"]):
        [choice] = complete(client, stop=stop).json()["choices"]
        assert choice["text"] == "Hello there,"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " dear")
        assert joined_text(events(complete(client, stop=stop, stream=True))) == "Hello there,"


@pytest.mark.parametrize("tail", ["friend.QQQ", "there, dearQQQ", ".QQQ"])
def test_text_held_back_for_a_stop_string_is_not_lost(client: TestClient, tail: str) -> None:
    assert complete(client, stop=[tail]).json()["choices"][0]["text"] == TEXT
    assert joined_text(events(complete(client, stop=[tail], stream=True))) == TEXT


@pytest.mark.parametrize("limit", range(1, 13))
def test_a_limit_in_the_middle_of_a_character_ends_the_stream_properly(
    client: TestClient, engine: ScriptedEngine, limit: int
) -> None:
    engine.tokens = [*engine.tokenizer.encode("🦩🦚🦜"), engine.eos]
    plain = complete(client, max_tokens=limit, ignore_eos=True).json()
    chunks = events(complete(client, max_tokens=limit, ignore_eos=True, stream=True))
    assert joined_text(chunks) == plain["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert plain["usage"]["completion_tokens"] == limit
    longer = complete(client, max_tokens=limit + 1, ignore_eos=True).json()["choices"][0]["text"]
    assert longer.startswith(plain["choices"][0]["text"].rstrip("\ufffd"))


def test_chat_logprobs_have_one_entry_per_token(client: TestClient, engine: ScriptedEngine) -> None:
    [choice] = chat(client, logprobs=True, top_logprobs=2).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == TEXT
    assert [entry["logprob"] for entry in entries] == [-0.5] * len(engine.tokens)
    assert [other["logprob"] for other in entries[0]["top_logprobs"]] == [-1.0, -9999.0]
    streamed = events(chat(client, logprobs=True, top_logprobs=2, stream=True))
    deltas = [choice["logprobs"] for chunk in streamed for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry for delta in deltas for entry in delta["content"]] == entries
    assert chat(client).json()["choices"][0]["logprobs"] is None
    assert chat(client, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_completion_logprobs_point_into_the_text(client: TestClient, engine: ScriptedEngine) -> None:
    engine.tokens = [*engine.tokenizer.encode("Nice 🦩 day"), engine.eos]
    [choice] = complete(client, logprobs=2, max_tokens=30).json()["choices"]
    logprobs = choice["logprobs"]
    assert {len(logprobs[name]) for name in logprobs} == {len(engine.tokens)}
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])
    chunks = events(complete(client, logprobs=2, max_tokens=30, stream=True))
    offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == logprobs["text_offset"]


def test_text_parts_make_the_same_prompt_as_the_whole_string(client: TestClient, engine: ScriptedEngine) -> None:
    parts = [{"type": "text", "text": "Name the capital"}, {"type": "text", "text": " of Peru."}]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}]
    chat(client, messages=[{"role": "system", "content": system}, {"role": "user", "content": parts}])
    text = "Name the capital of Peru."
    chat(client, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}])
    assert engine.calls[0].prompt_ids == engine.calls[1].prompt_ids


def test_the_prompt_of_a_chat_is_the_templates(
    client: TestClient, engine: ScriptedEngine, builtin_tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat(client, messages=[*messages, {"role": "user", "content": "c <|im_end|> d"}])
    chat(client, messages=messages, continue_final_message=True)
    chat(client, messages=messages, add_generation_prompt=False)
    chat(client, messages=[{"role": "developer", "content": "x"}, messages[0]])
    template = builtin_tokenizer.apply_chat_template
    assert [call.prompt_ids for call in engine.calls] == [
        template([*messages, {"role": "user", "content": "c <|im_end|> d"}]),
        template(messages, continue_final_message=True),
        template(messages, add_generation_prompt=False),
        template([{"role": "system", "content": "x"}, messages[0]]),
    ]


def test_an_earlier_answer_can_be_sent_back_as_it_came(client: TestClient) -> None:
    message = chat(client).json()["choices"][0]["message"]
    earlier = {**message, "tool_calls": None, "function_call": None, "audio": None, "annotations": []}
    user = {"role": "user", "content": "And now?"}
    assert chat(client, messages=[user, earlier, user]).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None, "response_format": None},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"user": "someone", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "n": None, "stop": None},
        {"stop": [], "logit_bias": {}, "seed": None, "logprobs": None, "temperature": None},
    ],
)
def test_fields_that_ask_for_nothing_pass(client: TestClient, fields: Json) -> None:
    response = chat(client, **fields)
    assert response.status_code == 200, response.text


def test_models_are_listed_and_found(client: TestClient) -> None:
    [card] = client.get("/v1/models").json()["data"]
    assert card["id"] == "scripted"
    assert client.get("/v1/models/scripted").json() == card
    assert client.get("/v1/models/other").status_code == 404
    assert chat(client, model="scripted").status_code == 200


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_every_chunk_tells_the_usage_so_far_of_its_choice(client: TestClient, route: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in route else {"prompt": "Hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"n": 2, "max_tokens": 6, "ignore_eos": True, "stream": True, "stream_options": options}
    lines = client.post(route, json={**body, **fields}).text.split("\n\n")
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    for index in range(2):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[-1] == 6
        assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}
    assert last["usage"]["completion_tokens"] == 12
