"""SGLang's form of /generate, beside the simple one: its answers, batches, streams and log-probabilities."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from mini_sglang.errors import FieldError
from tests.server.conftest import ScriptedEngine

TEXT = "Hello there, dear friend."

Json = dict[str, Any]


def generate(client: TestClient, **fields: Any) -> Any:
    response = client.post("/generate", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: TestClient, **fields: Any) -> list[Json]:
    response = client.post("/generate", json={**fields, "stream": True})
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_the_bodys_fields_tell_which_form_it_is(client: TestClient) -> None:
    assert generate(client, prompt="Hi")["usage"]["completion_tokens"] == 7
    answer = generate(client, text="Hi", sampling_params={"max_new_tokens": 64, "temperature": 0})
    assert answer["text"] == TEXT
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == 7
    assert answer["meta_info"]["cached_tokens"] == 0
    both = client.post("/generate", json={"prompt": "Hi", "sampling_params": {}})
    assert both.status_code == 400
    assert both.json()["error"]["param"] == "prompt"


def test_the_parameters_reach_the_engine_by_their_names_there(client: TestClient, engine: ScriptedEngine) -> None:
    given = {
        "max_new_tokens": 9,
        "min_new_tokens": 3,
        "sampling_seed": 5,
        "top_k": 4,
        "no_stop_trim": True,
        "stop": "x",
    }
    generate(client, input_ids=[5, 6, 7], sampling_params=given)
    generate(client, text="Hi")
    first, second = engine.calls
    assert first.prompt_ids == [5, 6, 7]
    assert (first.params.max_tokens, first.params.min_tokens, first.params.seed, first.params.top_k) == (9, 3, 5, 4)
    assert (first.params.stop, first.params.include_stop_str_in_output) == (["x"], True)
    assert second.params.max_tokens == 128


def test_grammars_reach_the_engine(client: TestClient, engine: ScriptedEngine) -> None:
    generate(client, text="Hi", sampling_params={"json_schema": '{"type": "object"}'})
    generate(client, text="Hi", sampling_params={"regex": "a+"})
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert [engine.calls[0].params.response_format, engine.calls[1].params.regex] == [schema, "a+"]
    refused = client.post("/generate", json={"text": "Hi", "sampling_params": {"json_schema": "{"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "json_schema")


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"max_new_tokens": 2}, {"type": "length", "length": 2}),
        ({"stop": [", dear"]}, {"type": "stop", "matched": ", dear"}),
    ],
)
def test_the_end_is_told_in_its_words(client: TestClient, params: Json, reason: Json) -> None:
    assert generate(client, text="Hi", sampling_params=params)["meta_info"]["finish_reason"] == reason


def test_an_end_token_is_named(client: TestClient, engine: ScriptedEngine) -> None:
    answer = generate(client, text="Hi")
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": engine.eos}


def test_batches_are_lists_in_order(client: TestClient, engine: ScriptedEngine) -> None:
    answers = generate(client, text=["a", "b"], sampling_params={"n": 2, "max_new_tokens": 2})
    assert len(answers) == 4
    prompts = {call.request_id: call.prompt_ids for call in engine.calls}
    order = [prompts[answer["meta_info"]["id"]] for answer in answers]
    assert order == [engine.tokenizer.encode(text) for text in "aabb"]
    assert isinstance(generate(client, text=["a"]), list)
    assert len(generate(client, input_ids=[[1, 2], [3]])) == 2


def test_a_stream_repeats_the_text_and_not_the_tokens(client: TestClient, engine: ScriptedEngine) -> None:
    parts = events(client, text="Hi", return_logprob=True)
    assert parts[-1]["text"] == TEXT
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(parts))
    assert [token for part in parts for token in part["output_ids"]] == engine.tokens
    entries = [entry for part in parts for entry in part["meta_info"]["output_token_logprobs"]]
    assert [entry[1] for entry in entries] == engine.tokens
    assert parts[0]["meta_info"]["finish_reason"] is None
    assert {part["index"] for part in events(client, text=["a", "b"])} == {0, 1}


def test_log_probabilities_of_answer_and_prompt(client: TestClient, engine: ScriptedEngine) -> None:
    prompt = engine.tokenizer.encode("One two three")
    asked = {"text": "One two three", "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
    info = generate(client, **asked)["meta_info"]
    assert info["input_token_logprobs"] == []
    assert info["output_token_logprobs"] == [[-0.5, token, None] for token in engine.tokens[:2]]
    more = {**asked, "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    info = generate(client, **more)["meta_info"]
    assert [entry[1] for entry in info["input_token_logprobs"]] == prompt
    assert [entry[0] for entry in info["input_token_logprobs"]] == [None] + [-0.5] * (len(prompt) - 1)
    assert "".join(entry[2] for entry in info["input_token_logprobs"]) == "One two three"
    assert info["input_top_logprobs"][0] is None
    assert [len(best) for best in info["input_top_logprobs"][1:]] == [2] * (len(prompt) - 1)
    assert len(info["output_top_logprobs"]) == 2
    only = {**more, "sampling_params": {"max_new_tokens": 0}}
    answer = generate(client, **only)
    assert answer["text"] == ""
    assert answer["meta_info"]["output_token_logprobs"] == []
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(prompt)
    later = generate(client, **{**more, "logprob_start_len": len(prompt) - 1})["meta_info"]
    assert [entry[1] for entry in later["input_token_logprobs"]] == prompt[-1:]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"sampling_params": {}}, "text"),
        ({"text": [1, 2]}, "text"),
        ({"text": []}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": 10**7}}, "sampling_params"),
        ({"text": "a", "top_logprobs_num": 10**9}, "top_logprobs_num"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client: TestClient, fields: Json, named: str) -> None:
    response = client.post("/generate", json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == named
    assert named in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"sampling_seed": 2**63}, "sampling_seed"),
        ({"min_new_tokens": 500}, "min_new_tokens"),
        ({"no_stop_trim": True, "stop": [""]}, "stop"),
        ({"json_schema": "{}", "regex": "a"}, "json_schema"),
        ({"json_schema": "[1]"}, "json_schema"),
    ],
)
def test_what_the_engine_calls_otherwise_is_named_as_sglang_does(client: TestClient, params: Json, named: str) -> None:
    error = client.post("/generate", json={"text": "Hi", "sampling_params": params}).json()["error"]
    assert error["param"] == named
    assert error["message"].startswith(f"{named} ")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"min_new_tokens": 5, "max_new_tokens": 3},
            "min_new_tokens must be between 0 and max_new_tokens (3), got 5",
        ),
        (
            {"json_schema": "{}", "regex": "a"},
            "json_schema cannot be combined with regex: one grammar per answer",
        ),
    ],
)
def test_every_field_of_a_message_has_its_name_there(client: TestClient, params: Json, message: str) -> None:
    response = client.post("/generate", json={"text": "Hi", "sampling_params": params})
    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_while_it_runs_is_told_in_sglangs_words_too(
    client: TestClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.error = FieldError("response_format", "cannot be followed: too deep")
    asked = {"text": "Hi", "sampling_params": {"json_schema": "{}"}, "stream": stream}
    error = client.post("/generate", json=asked).json()["error"]
    assert (error["param"], error["message"]) == ("json_schema", "json_schema cannot be followed: too deep")


def test_a_load_generators_body_passes(client: TestClient) -> None:
    parts = events(
        client,
        text="Hi",
        sampling_params={"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
        lora_path=None,
        return_logprob=False,
        return_routed_experts=False,
        logprob_start_len=-1,
        image_data=None,
    )
    assert parts[-1]["meta_info"]["completion_tokens"] == 4
    assert client.get("/get_server_info").json()["internal_states"][0]["num_pages"] > 0
    assert client.get("/get_model_info").json()["is_generation"] is True
    assert client.post("/flush_cache").status_code == 200
