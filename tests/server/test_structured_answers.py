"""Structured output over HTTP, with the built-in model: answers fit, free requests are not disturbed, hostile grammars
are a 400 within a second."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Literal

import httpx
import jsonschema_rs
import openai
import pydantic
import pytest

from tests.server.conftest import QUESTION, StartServer, chat, complete, contents
from tests.tiny import RunningServer

ADDRESS = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("city", "street", "zip")},
    "required": ["city", "street", "zip"],
    "additionalProperties": False,
}
ADDRESS_FORMAT = {"type": "json_schema", "json_schema": {"name": "address", "schema": ADDRESS, "strict": True}}
FREE = ("The capital of France is", "Once upon a time", "def add(a, b):")


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Any:
    return start_server("--dtype", "float32", "--run-ahead", "1")


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_fifty_answers_fit_their_schema_and_free_ones_are_as_without_them(server: RunningServer) -> None:
    alone = [complete(server, prompt, max_tokens=24) for prompt in FREE]
    with ThreadPoolExecutor(9) as pool:
        asked = [
            pool.submit(chat, server, n=10, seed=seed, temperature=1, max_tokens=100, response_format=ADDRESS_FORMAT)
            for seed in range(0, 50, 10)
        ]
        greedy = pool.submit(chat, server, temperature=0, max_tokens=100, response_format=ADDRESS_FORMAT)
        assert list(pool.map(lambda prompt: complete(server, prompt, max_tokens=24), FREE)) == alone
    answers = [text for response in (*asked, greedy) for text in contents(response.result())]
    assert len(answers) == 51
    assert len(set(answers)) > 25
    fits = jsonschema_rs.validator_for(ADDRESS)
    for text in answers:
        fits.validate(json.loads(text))
        assert max((len(run) for run in re.findall(r"\s+", re.sub(r'"[^"]*"', "", text))), default=0) < 20
    reasons = {choice["finish_reason"] for response in asked for choice in response.result().json()["choices"]}
    assert reasons == {"stop"}


def test_the_openai_client_parses_answers_into_its_types(client: openai.OpenAI) -> None:
    class Review(pydantic.BaseModel):
        stars: Literal[1, 2, 3, 4, 5]
        words: list[str] = pydantic.Field(max_length=3)
        author: str | None

    model = client.models.list().data[0].id
    messages: Any = [{"role": "user", "content": "Review a film as JSON."}]
    answer = client.chat.completions.parse(model=model, messages=messages, response_format=Review, max_tokens=80)
    assert isinstance(answer.choices[0].message.parsed, Review)
    answer_of_any_shape = client.chat.completions.create(
        model=model, messages=messages, response_format={"type": "json_object"}, max_tokens=40
    )
    assert isinstance(json.loads(answer_of_any_shape.choices[0].message.content or ""), dict)


def test_a_stream_says_what_a_plain_answer_says(client: openai.OpenAI, server: RunningServer) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "response_format": ADDRESS_FORMAT}
    (plain,) = contents(chat(server, **fields))
    model = client.models.list().data[0].id
    messages: Any = [{"role": "user", "content": QUESTION}]
    stream = client.chat.completions.create(model=model, messages=messages, stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == plain


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"ebnf": 'root ::= "<" [a-z]{3} ">"'}, "<[a-z]{3}>"),
        ({"structured_outputs": {"regex": "[a-c]{5}"}}, "[a-c]{5}"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, "x[0-9]{2}"),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "1|2"),
        ({"structured_outputs": {"json": '{"const": [true]}'}}, r"\[ ?true ?\]|\[\n *true\s*\]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}}, "true|false"),
    ],
)
def test_every_way_to_ask_for_a_form_is_followed(server: RunningServer, fields: dict[str, Any], pattern: str) -> None:
    for text in (
        complete(server, "Tell me:", max_tokens=40, **fields),
        *contents(chat(server, max_tokens=40, seed=0, **fields)),
    ):
        assert re.fullmatch(pattern, text), text


def test_generate_takes_grammars_too(server: RunningServer) -> None:
    for fields in (
        {"regex": "[0-9]{4}"},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "integer", "minimum": 1000, "maximum": 9999}},
            }
        },
    ):
        answer = server.post("/generate", prompt="The year is", max_tokens=20, **fields).json()
        assert re.fullmatch("[0-9]{4}", answer["text"])
        assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "["}, "regex"),
        ({"regex": ""}, "regex"),
        ({"regex": "x" * 300_000}, "regex"),
        ({"ebnf": "root ::= missing"}, "ebnf"),
        ({"choice": []}, "choice"),
        ({"choice": [1]}, "choice"),
        ({"choice": ["a"], "regex": "a"}, "regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "regex": "a"}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "x"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}, "regex": "a"}, "structured_outputs.json_object"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "array", "uniqueItems": True}, "strict": True},
                }
            },
            "response_format",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_a_400_that_names_the_field(
    server: RunningServer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    response = chat(server, stream=stream, max_tokens=5, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert len(response.content) < 1200


def test_a_hostile_schema_is_refused_while_streams_go_on(server: RunningServer) -> None:
    hostile = "((a{50}){50}){50}"
    arrivals: list[float] = []
    lines: list[str] = []

    def listen() -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            for line in filter(None, response.iter_lines()):
                arrivals.append(time.perf_counter())
                lines.append(line)

    listener = threading.Thread(target=listen)
    listener.start()
    for _ in range(2):
        response = chat(server, regex=hostile)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "regex")
    listener.join()
    assert lines[-1] == "data: [DONE]"  # several tokens may share an event, so it is they that are counted
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 60
    longest_gap = max(later - earlier for earlier, later in pairwise(arrivals))
    assert longest_gap < (arrivals[-1] - arrivals[0]) / 2
    (text,) = contents(chat(server, response_format=ADDRESS_FORMAT, max_tokens=100, temperature=0))
    json.loads(text)
