"""The API's description, as OpenAPI: the framework's document of the routes, completed by their bodies, examples,
streams and the one shape of errors. Knows routes only from the document.
"""

from __future__ import annotations

import functools
import itertools

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mini_sglang.sampling_params import Json
from mini_sglang.server.anthropic.bodies import CountTokensBody, MessagesBody
from mini_sglang.server.native.bodies import AbortBody, DetokenizeBody, GenerateBody, ProfileBody, TokenizeBody
from mini_sglang.server.openai.bodies import ChatBody, CompletionBody
from mini_sglang.server.request_body import SCHEMA_REF
from mini_sglang.server.responses.bodies import ResponsesBody
from mini_sglang.server.sglang.bodies import SglangBody

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "what is wrong, with the field and the limit"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "code": {"type": ["string", "null"], "description": "a word for programs"},
            },
        }
    },
}
_EVENT = {
    "type": "object",
    "description": "each of the server-sent events; some APIs end with data that is [DONE] instead of JSON",
    "required": ["data"],
    "properties": {
        "event": {"type": "string", "description": "the type of what `data` holds, in the APIs that name events"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
_ERROR_ANSWER = {"content": {"application/json": {"schema": {"$ref": SCHEMA_REF.format(model="Error")}}}}

_QUESTION = {"messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 64}

EXAMPLES: dict[type[BaseModel], dict[str, Json]] = {  # of every body, by what the example shows
    ChatBody: {
        "A question": _QUESTION,
        "Streamed, with usage": {**_QUESTION, "stream": True, "stream_options": {"include_usage": True}},
        "With log-probabilities": {**_QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 5},
        "A system message, two answers": {
            "messages": [
                {"role": "system", "content": "Answer in one short sentence."},
                {"role": "user", "content": "Why is the sky blue?"},
            ],
            "temperature": 0.8,
            "seed": 7,
            "n": 2,
            "max_tokens": 64,
        },
    },
    CompletionBody: {
        "One prompt": {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 20},
        "Several prompts": {"prompt": ["1, 2, 3,", "Monday, Tuesday,"], "temperature": 0, "stop": "\n"},
    },
    ResponsesBody: {
        "A question": {"input": "Name three colours.", "max_output_tokens": 64},
        "With instructions, streamed": {
            "instructions": "Answer in one short sentence.",
            "input": "Why is the sky blue?",
            "stream": True,
        },
    },
    MessagesBody: {
        "A question": _QUESTION,
        "With a system message, streamed": {"system": "Answer briefly.", **_QUESTION, "stream": True},
    },
    CountTokensBody: {"A question": {"messages": _QUESTION["messages"]}},
    GenerateBody: {
        "A prompt": {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 20},
        "Streamed": {"prompt": "Once upon a time", "max_tokens": 40, "stream": True},
    },
    SglangBody: {
        "SGLang's form": {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 20}},
    },
    TokenizeBody: {"A text": {"prompt": "Hello there"}, "A conversation": {"messages": _QUESTION["messages"]}},
    DetokenizeBody: {"Token ids": {"tokens": [19556, 665]}},
    AbortBody: {"A request": {"request_id": "gen-1"}},
    ProfileBody: {"A few steps": {"num_steps": 20}, "Until /stop_profile": {}},
}


def describe(app: FastAPI) -> None:
    """Let `app.openapi()` give the whole document."""
    make = app.openapi
    app.openapi = functools.cache(lambda: _complete(make()))  # type: ignore[method-assign]


def _complete(document: Json) -> Json:
    _, bodies = models_json_schema([(model, "validation") for model in EXAMPLES], ref_template=SCHEMA_REF)
    components = document.setdefault("components", {})
    components["schemas"] = {**bodies["$defs"], "Error": _ERROR}
    for operation in itertools.chain.from_iterable(path.values() for path in document["paths"].values()):
        responses = operation["responses"]
        responses.pop("422", None)  # the framework's: errors have one shape here
        responses["4XX"] = {"description": "The request is at fault; the message says how.", **_ERROR_ANSWER}
        responses["5XX"] = {"description": "The server cannot answer, or not now.", **_ERROR_ANSWER}
        if "requestBody" in operation:
            _describe_body(operation, bodies["$defs"])
    return document


def _describe_body(operation: Json, schemas: Json) -> None:
    """Add the examples, and the stream as a second kind of answer where there is one."""
    content = operation["requestBody"]["content"]["application/json"]
    names = [schema["$ref"].rpartition("/")[2] for schema in content["schema"].get("anyOf", [content["schema"]])]
    content["examples"] = {
        title: {"value": value}
        for model, examples in EXAMPLES.items()
        if model.__name__ in names
        for title, value in examples.items()
    }
    if "stream" in schemas[names[0]]["properties"]:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
