"""Schemas, tools and forms of answers over HTTP, before a model with random weights: it stumbles over any gap in a
grammar that a trained one would rarely find."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.server.conftest import QUESTION, StartServer, chat, complete, contents
from tests.tiny import Checkpoints, RunningServer

ADDRESS = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("city", "street", "zip")},
    "required": ["city", "street", "zip"],
    "additionalProperties": False,
}
ADDRESS_FORMAT = {"type": "json_schema", "json_schema": {"name": "address", "schema": ADDRESS, "strict": True}}


@pytest.fixture(scope="module")
def server(start_server: StartServer, checkpoints: Checkpoints) -> Any:
    path = str(checkpoints.write(max_position_embeddings=4096).path)
    return start_server("--model", path, "--dtype", "float32", "--num-pages", "1024")


@pytest.mark.parametrize("stream", [False, True])
def test_a_regex_that_cannot_be_followed_to_its_end_is_refused_before_it_begins(
    server: RunningServer, stream: bool
) -> None:
    before = ended(server)
    for regex in ("(a{1000}){1000}", "[0-9]{8}(a{1000}){1000}", "("):
        response = chat(server, stream=stream, max_tokens=50, regex=regex)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.json()["error"]["param"] == "regex"
        assert response.json()["error"]["message"].startswith("regex ")
    after = ended(server)
    assert after.pop("refused") - before.pop("refused") == 3
    assert after == before


def ended(server: RunningServer) -> dict[str, int]:
    """The requests that have ended, by reason."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = re.findall(r'request_success_total\{finished_reason="(\w+)".*\} (\d+)', text)
    return {reason: int(count) for reason, count in found}


NAMED_TWICE = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "patternProperties": {"^n$": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def test_a_name_that_a_pattern_covers_too_is_followed_whatever_the_seed(server: RunningServer) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": NAMED_TWICE, "strict": True}}
    for seed in range(8):
        for text in contents(chat(server, response_format=schema, seed=seed, temperature=1, max_tokens=60)):
            assert isinstance(json.loads(text)["n"], int)


UNHELD = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "required": ["tags"],
    "additionalProperties": False,
}
TYPED: Any = {"type": "json_schema", "name": "tags", "schema": UNHELD}
SAID = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60}
FUNCTION: Any = {"name": "find", "parameters": UNHELD}
IN_TOOL, IN_FORM = 'tool "find": property "tags": uniqueItems', 'property "tags": uniqueItems'


def in_response_format(strict: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "tags", "schema": UNHELD, **strict}
    return {**SAID, "response_format": {"type": "json_schema", "json_schema": named}}


def in_function(strict: dict[str, Any], choice: Any = "auto") -> dict[str, Any]:
    return {**SAID, "tools": [{"type": "function", "function": {**FUNCTION, **strict}}], "tool_choice": choice}


def in_text_format(strict: dict[str, Any]) -> dict[str, Any]:
    return {"input": "Hi", "max_output_tokens": 60, "text": {"format": {**TYPED, **strict}}}


def in_responses_tool(strict: dict[str, Any]) -> dict[str, Any]:
    return {"input": "Hi", "max_output_tokens": 60, "tools": [{"type": "function", **FUNCTION, **strict}]}


def in_messages_tool(strict: dict[str, Any]) -> dict[str, Any]:
    return {**SAID, "tools": [{"name": "find", "input_schema": UNHELD, **strict}], "tool_choice": {"type": "any"}}


NAMED = {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/chat/completions", in_response_format, "response_format", IN_FORM),
        ("/v1/chat/completions", in_function, "tools", IN_TOOL),
        ("/v1/chat/completions", partial(in_function, choice="required"), "tools", IN_TOOL),
        ("/v1/chat/completions", partial(in_function, choice=NAMED), "tools", IN_TOOL),
        ("/v1/responses", in_text_format, "text.format", IN_FORM),
        ("/v1/responses", in_responses_tool, "tools", IN_TOOL),
        ("/v1/messages", in_messages_tool, "tools", IN_TOOL),
    ],
)
def test_a_keyword_that_no_grammar_holds_is_refused_where_strict_was_asked_for_and_only_there(
    server: RunningServer, path: str, body: Any, param: str, message: str
) -> None:
    for stream in (False, True):
        response = server.post(path, **body({"strict": True}), stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert message in error["message"]
        assert error.get("param", param) == param
    for strict in ({}, {"strict": False}):
        assert server.post(path, **body(strict)).status_code == 200


ADDRESS_TOOL = {"name": "save_address", "description": "Saves an address.", "parameters": ADDRESS}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("choice", [None, "none", "required"])
def test_with_tools_and_a_form_the_model_calls_or_answers_in_that_form(
    server: RunningServer, choice: str | None, strict: bool
) -> None:
    tools = [{"type": "function", "function": {**ADDRESS_TOOL, "strict": strict}}]
    fields: dict[str, Any] = {"tools": tools, "response_format": ADDRESS_FORMAT, "max_tokens": 100}
    if choice is not None:
        fields["tool_choice"] = choice
    fits = jsonschema_rs.validator_for(ADDRESS)
    for seed in range(2):
        message = chat(server, **fields, seed=seed, temperature=1).json()["choices"][0]["message"]
        called = message.get("tool_calls")
        if choice is not None:
            assert bool(called) is (choice == "required")
        if not called:
            fits.validate(json.loads(message["content"]))
        elif strict or choice == "required":
            fits.validate(json.loads(called[0]["function"]["arguments"]))
        stream = chat(server, **fields, seed=seed, temperature=1, stream=True).text
        events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
        pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        assert "".join(piece.get("arguments") or "" for piece in pieces) == "".join(
            call["function"]["arguments"] for call in called or ()
        )


def test_with_tools_and_a_form_the_other_routes_do_the_same(server: RunningServer) -> None:
    fits = jsonschema_rs.validator_for(ADDRESS)
    typed: Any = {"type": "json_schema", "name": "address", "schema": ADDRESS, "strict": True}
    for choice in ("auto", "none", "required"):
        answer = server.post(
            "/v1/responses",
            input=QUESTION,
            temperature=0,
            max_output_tokens=100,
            tools=[{"type": "function", **ADDRESS_TOOL}],
            tool_choice=choice,
            text={"format": typed},
        ).json()
        assert answer["status"] == "completed"
        kinds = {item["type"] for item in answer["output"]}
        assert kinds == {"function_call" if choice == "required" else "message"} or choice == "auto"
        for item in answer["output"]:
            if item["type"] == "message":
                fits.validate(json.loads(item["content"][0]["text"]))
    for choice in ("auto", "none", "any"):
        answer = server.post(
            "/v1/messages",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=100,
            tools=[{"name": "save_address", "input_schema": ADDRESS}],
            tool_choice={"type": choice},
            output_config={"format": {"type": "json_schema", "schema": ADDRESS}},
        ).json()
        assert answer["stop_reason"] != "max_tokens"
        for block in answer["content"]:
            if block["type"] == "text":
                assert choice != "any"
                fits.validate(json.loads(block["text"]))
            else:
                assert choice != "none"


def test_a_choice_may_be_any_text(server: RunningServer) -> None:
    for text in ('say "hi" \\', "two\nlines\t", "\\", "/", "🧑‍🤝‍🧑 é", "\x00\x7f", "<|im_end|>", "^.*$"):
        assert complete(server, "Say:", max_tokens=60, choice=[text], skip_special_tokens=False) == text
    assert complete(server, "Say:", max_tokens=60, choice=["", ""]) == ""


def test_numbers_of_any_schema_are_bounded(server: RunningServer) -> None:
    for schema in ({}, {"type": "number"}, {"type": "integer"}, {"type": "array", "items": {}}):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        for text in contents(chat(server, response_format=form, n=4, temperature=5, max_tokens=80)):
            assert not re.search(r"\d{41}", text)


def test_bounds_beyond_64_bits_are_read_as_they_are_meant(server: RunningServer) -> None:
    items = """[{"type": "number", "minimum": 0, "maximum": 1.8e308},
                {"type": "integer", "minimum": -9223372036854776000, "maximum": 9223372036854775807}]"""
    schema = f'{{"type": "array", "minItems": 2, "maxItems": 2, "prefixItems": {items}}}'
    form = f'{{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}'
    text = f'{{"prompt": "A number:", "max_tokens": 40, "response_format": {form}}}'
    response = httpx.post(
        f"{server.url}/v1/completions", content=text, headers={"content-type": "application/json"}, timeout=120
    )
    assert response.status_code == 200, response.text
    first, second = json.loads(response.json()["choices"][0]["text"])
    assert first >= 0
    assert -(2**63) <= second < 2**63
