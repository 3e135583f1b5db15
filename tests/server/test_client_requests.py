"""Bodies and calls as real clients send them, written down from what each was seen to send.

They run without the clients' packages; tests/clients runs those that can be installed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.server.conftest import ScriptedEngine

TEXT = "Hello there, dear friend."
HI = [{"role": "user", "content": "Hi"}]
GET_TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}

Json = dict[str, Any]


def ask(client: TestClient, route: str, body: Json, **headers: str) -> Json:
    response = client.post(route, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json())


def chunks(client: TestClient, route: str, body: Json) -> list[Json]:
    response = client.post(route, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


# --- load generators ------------------------------------------------------------------------------------------------


def test_vllms_load_generator_counts_every_token_of_a_completion(client: TestClient) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "scripted"
    body = {
        "model": "scripted",
        "prompt": "One two three",
        "repetition_penalty": 1.0,
        "max_tokens": 9,
        "logprobs": None,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    *parts, last = chunks(client, "/v1/completions", body)
    assert len(parts) == 9
    assert all(part["choices"] for part in parts)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 9)


def test_vllms_load_generator_counts_every_token_of_a_chat(client: TestClient) -> None:
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "One two three"}]}],
        "max_completion_tokens": 9,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    *_, last = chunks(client, "/v1/chat/completions", body)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 9)
    assert client.post("/reset_prefix_cache").status_code == 200


def test_sglangs_load_generator_for_openais_routes(client: TestClient) -> None:
    fields = {"model": "scripted", "temperature": 0.0, "ignore_eos": True}
    parts = chunks(client, "/v1/completions", {**fields, "prompt": "One two", "best_of": 1, "max_tokens": 9})
    assert len(parts) == 9  # each has a choice, which this client does not look for
    chat = chunks(client, "/v1/chat/completions", {**fields, "messages": HI, "max_completion_tokens": 9})
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in chat).startswith(TEXT)
    assert client.post("/flush_cache", params={"timeout": 60.0}).status_code == 200


@pytest.mark.parametrize("prompt", [{"text": "One two"}, {"input_ids": [5, 6, 7]}])
def test_sglangs_load_generator_for_its_own_route(client: TestClient, prompt: Json) -> None:
    body = {
        **prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 9, "ignore_eos": True},
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    *_, last = chunks(client, "/generate", body)
    assert last["meta_info"]["completion_tokens"] == 9
    info = client.get("/server_info").json()
    assert info["internal_states"][0].get("avg_spec_accept_length") is None


# --- SGLang's router ------------------------------------------------------------------------------------------------

FROM_THE_ROUTER = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}


def test_the_router_learns_what_is_served(client: TestClient) -> None:
    assert client.get("/health").status_code == 200
    info = client.get("/server_info").json()
    assert (info["served_model_name"], info["model_path"]) == ("scripted", "scripted")
    assert client.get("/model_info").json()["model_path"] == "scripted"


def test_the_router_hands_on_openais_bodies(client: TestClient) -> None:
    chat = {
        "messages": [*HI, {"role": "assistant", "content": "x"}, *HI],
        "model": "scripted",
        "logprobs": False,
        "max_completion_tokens": 20,
        "stream": False,
        "tool_choice": "auto",
        "tools": [GET_TIME],
        "continue_final_message": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "include_reasoning": True,
        **FROM_THE_ROUTER,
    }
    assert ask(client, "/v1/chat/completions", chat)["choices"][0]["message"]["content"] == TEXT
    completion = {"model": "scripted", "prompt": "Hi", "stream": False, "echo": False, **FROM_THE_ROUTER}
    assert ask(client, "/v1/completions", completion)["choices"][0]["text"] == TEXT


def test_the_router_hands_on_sglangs_bodies(client: TestClient) -> None:
    body = {
        "text": "Hi",
        "model": None,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 5},
        "return_text_in_logprobs": False,
        "stream": False,
        "log_metrics": True,
        "return_hidden_states": False,
        "background": False,
        "no_logs": False,
        "return_bytes": False,
        "return_entropy": False,
    }
    assert ask(client, "/generate", body)["meta_info"]["completion_tokens"] == 5
    assert client.post("/generate", json={**body, "model": "other"}).status_code == 404


def test_stop_strings_are_kept_under_either_name(client: TestClient) -> None:
    for name in ("no_stop_trim", "include_stop_str_in_output"):
        body = {"prompt": "Hi", "stop": ",", name: True}
        assert ask(client, "/v1/completions", body)["choices"][0]["text"] == "Hello there,"
    both = client.post(
        "/v1/completions", json={"prompt": "Hi", "no_stop_trim": True, "include_stop_str_in_output": True}
    )
    assert (both.status_code, both.json()["error"]["param"]) == (400, "no_stop_trim")


@pytest.mark.parametrize("name", ["separate_reasoning", "stream_reasoning", "include_reasoning"])
def test_reasoning_that_is_not_to_be_told_apart_is_refused(client: TestClient, name: str) -> None:
    response = client.post("/v1/chat/completions", json={"messages": HI, name: False})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


# --- Open WebUI -----------------------------------------------------------------------------------------------------


def test_open_webui_lists_models_and_streams_a_chat(client: TestClient) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["scripted"]
    body = {
        "model": "scripted",
        "messages": [{"role": "system", "content": "Be short."}, *HI],
        "stream_options": {"include_usage": True},
        "temperature": 0.8,
        "top_p": 0.9,
        "min_p": 0.0,
        "max_tokens": 64,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": 7,
        "stop": ["\n\n\n"],
        "reasoning_effort": "medium",
        "logit_bias": {"5": -100},
    }
    parts = chunks(client, "/v1/chat/completions", body)
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts[:-1]) == TEXT
    assert parts[-1]["usage"]["completion_tokens"] == 7


def test_open_webui_asks_for_a_title_and_answers_to_tools(client: TestClient) -> None:
    assert ask(client, "/v1/chat/completions", {"model": "scripted", "messages": HI, "stream": False})["choices"]
    call = {"id": "call_1", "type": "function", "index": 0, "function": {"name": "get_time", "arguments": "{}"}}
    history: list[Json] = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "09:30"},
    ]
    assert chunks(client, "/v1/chat/completions", {"model": "scripted", "messages": history, "tools": [GET_TIME]})


def test_open_webui_uses_the_responses_route(client: TestClient) -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    body = {"model": "scripted", "stream": False, "instructions": "Be short.", "max_output_tokens": 64}
    tools = [{"type": "function", "name": "get_time", "parameters": {"type": "object"}, "strict": False}]
    answer = ask(client, "/v1/responses", {**body, "input": [asked, said, asked], "tools": tools})
    assert answer["output"][0]["content"][0]["text"] == TEXT


# --- evaluation programs --------------------------------------------------------------------------------------------


def test_lm_eval_takes_its_tokens_from_the_server(client: TestClient, engine: ScriptedEngine) -> None:
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in info["chat_template"]
    asked = {"prompt": info["eos_token"], "add_special_tokens": False}
    tokens = ask(client, "/tokenize", asked)["tokens"]
    assert tokens[0] in engine.tokenizer.eos_token_ids
    assert ask(client, "/detokenize", {"tokens": tokens})["prompt"] == info["eos_token"]


def test_lm_eval_asks_for_the_log_probabilities_of_batches(client: TestClient) -> None:
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = ask(client, "/v1/completions", {"model": "scripted", "prompt": prompts, **fields})["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["top_logprobs"]) == len(prompt) + 1
        assert all(choice["logprobs"]["top_logprobs"][1:])  # the largest of each is looked for


def test_lm_eval_generates_until_a_stop_string(client: TestClient) -> None:
    fields = {"model": "scripted", "max_tokens": 64, "temperature": 0, "stop": [", ", "<|im_end|>"], "seed": 1234}
    assert ask(client, "/v1/chat/completions", {"messages": HI, **fields})["choices"][0]["finish_reason"] == "stop"
    [choice] = ask(client, "/v1/completions", {"prompt": [[5, 6]], **fields})["choices"]
    assert choice["text"] == "Hello there"
