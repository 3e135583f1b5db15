"""What coding agents send, whole: their requests are answered, and what changes no answer changes no prompt."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from mini_sglang.server import fields
from mini_sglang.server.answers.model_format import ModelFormat
from mini_sglang.server.anthropic.bodies import MessagesBody
from mini_sglang.server.config import ServerConfig
from mini_sglang.server.responses.bodies import ResponsesBody
from mini_sglang.text.tokenizer import Tokenizer
from tests.server.conftest import ScriptedEngine

Json = dict[str, Any]

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
EPHEMERAL = {"type": "ephemeral"}
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"

CLAUDE_CODE: Json = {
    "max_tokens": 300,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": BILLING},
        {"type": "text", "text": "You are an agent.", "cache_control": {**EPHEMERAL, "ttl": "1h"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "List the files.", "cache_control": EPHEMERAL}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "I need ls.", "signature": ""},
                {
                    "type": "tool_use",
                    "id": "t1",
                    "name": "Bash",
                    "input": {"command": "ls"},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "a.txt", "is_error": False},
                {"type": "text", "text": "And now?", "cache_control": EPHEMERAL},
            ],
        },
        {"role": "system", "content": "The user has opened a.txt."},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Run a command.",
            "input_schema": PARAMETERS,
            "eager_input_streaming": True,
            "cache_control": EPHEMERAL,
        },
        {"name": "mcp__git__log", "input_schema": PARAMETERS, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "user_x"},
    "betas": ["claude-code-20250219"],
}
CODEX: Json = {
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "function_call", "name": "shell", "arguments": '{"command": "ls"}', "call_id": "c1", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
        {
            "type": "custom_tool_call",
            "name": "apply_patch",
            "input": "*** Begin",
            "call_id": "c2",
            "status": "completed",
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Done."}]},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Run.", "strict": False, "parameters": PARAMETERS},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client", "parameters": PARAMETERS},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "x",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "x"},
}
# Chat clients: Cline, Roo, opencode, aider, Goose, Zed, Continue, the Vercel AI SDK and LiteLLM, in one.
CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "I need ls.",
    "reasoning_details": [{"type": "reasoning.text", "text": "I need ls."}],
    "refusal": None,
    "audio": None,
    "function_call": None,
    "annotations": [],
    "provider_specific_fields": {"refusal": None},
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "index": 0,
            "function": {"name": "shell", "arguments": '{"command": "ls"}', "parsed_arguments": None},
            "provider_specific_fields": {"thought_signature": "x"},
            "extra_content": None,
        }
    ],
}
CHAT_AGENT: Json = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL}]},
        {"role": "user", "content": [{"type": "text", "text": "List the files.", "cache_control": EPHEMERAL}]},
        CALLED,
        {"role": "tool", "tool_call_id": "c1", "name": "shell", "content": [{"type": "text", "text": "a.txt"}]},
        {"role": "user", "content": "And now?", "cache_control": EPHEMERAL},
    ],
    "tools": [
        {"type": "function", "function": {"name": "shell", "parameters": PARAMETERS}, "cache_control": EPHEMERAL}
    ],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 64,
    "temperature": 0,
    "reasoning_effort": "medium",
    "reasoning": {"exclude": True},
    "verbosity": "medium",
    "store": False,
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "metadata": {"session": "x"},
    "service_tier": "auto",
    "user": "x",
}


@pytest.fixture
def client(make_app: Callable[..., FastAPI]) -> TestClient:
    return TestClient(make_app(tool_call_parser="hermes", reasoning_parser="think"))


@pytest.mark.parametrize(
    ("route", "body"),
    [(MESSAGES, CLAUDE_CODE), (RESPONSES, CODEX), (CHAT, CHAT_AGENT)],
    ids=[MESSAGES, RESPONSES, CHAT],
)
def test_an_agents_request_is_answered(client: TestClient, engine: ScriptedEngine, route: str, body: Json) -> None:
    call = '<tool_call>{"name": "NAME", "arguments": {"command": "cat a.txt"}}</tool_call>'
    name = "Bash" if route == MESSAGES else "shell"
    engine.tokens = [*engine.tokenizer.encode(call.replace("NAME", name)), engine.eos]
    response = client.post(f"{route}?beta=true", json=body)
    assert response.status_code == 200, response.text
    pieces = re.findall(r'"(?:arguments|partial_json)":\s*"((?:[^"\\]|\\.)*)"', response.text)  # as they came
    assert "cat a.txt" in "".join(pieces)
    text = engine.tokenizer.decode(engine.calls[0].prompt_ids)
    for part in ("You are an agent.", "List the files.", '{"command": "ls"}', "a.txt", "And now?"):
        assert part in text
    assert "billing" not in text
    if route == MESSAGES:
        counted = client.post(f"{route}/count_tokens", json={**body, "stream": False})
        assert counted.json() == {"input_tokens": len(engine.calls[0].prompt_ids)}


def test_calls_of_a_vendors_tools_stay_in_the_conversation() -> None:
    items = [
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "c2"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done."},
        {"type": "local_shell_call", "action": {"command": ["ls"]}, "call_id": "c3", "status": "completed", "id": "x"},
        {"type": "local_shell_call_output", "call_id": "c3", "output": "a.txt"},
        {"type": "shell_call_output", "call_id": "c4", "output": [{"stdout": "b"}]},
    ]
    messages = ResponsesBody.model_validate({"input": items}).chat_messages()
    first, done, second, listed, shell = [message.for_template() for message in messages]
    assert first["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": {"input": "*** Begin"}}
    assert second["tool_calls"][0]["function"] == {
        "name": "local_shell",
        "arguments": {"action": {"command": ["ls"]}},
    }
    assert [message["tool_call_id"] for message in (done, listed, shell)] == ["c2", "c3", "c4"]
    assert [message["content"] for message in (done, listed, shell)] == ["Done.", "a.txt", '[{"stdout": "b"}]']


@pytest.mark.parametrize("empty", [None, "", [], {}])
@pytest.mark.parametrize("place", ["message", "call", "function", "turn", "block", "item"])
def test_fields_of_other_vendors_pass_where_they_are_empty(client: TestClient, place: str, empty: Any) -> None:
    for value, status in ((empty, 200), ("x", 400)):
        extra = {"vendor_field": value}
        function = {"name": "f", "arguments": "{}", **(extra if place == "function" else {})}
        call = {"id": "c", "type": "function", "function": function, **(extra if place == "call" else {})}
        message = {"role": "assistant", "content": "", "tool_calls": [call], **(extra if place == "message" else {})}
        block = {"type": "text", "text": "x", **(extra if place == "block" else {})}
        turn = {"role": "assistant", "content": [block], **(extra if place == "turn" else {})}
        item = {"type": "message", "role": "assistant", "content": "x", **(extra if place == "item" else {})}
        route, body = {
            "turn": (MESSAGES, {"max_tokens": 8, "messages": [*HI, turn, *HI]}),
            "block": (MESSAGES, {"max_tokens": 8, "messages": [*HI, turn, *HI]}),
            "item": (RESPONSES, {"input": [*HI, item, *HI]}),
        }.get(place, (CHAT, {"messages": [*HI, message, *HI]}))
        response = client.post(route, json=body)
        assert response.status_code == status, response.text
        if status == 400:
            assert "vendor_field is not supported" in response.json()["error"]["message"]


def test_a_chats_answer_comes_back_with_its_reasoning(client: TestClient, engine: ScriptedEngine) -> None:
    engine.tokens = [*engine.tokenizer.encode("<think>Hm.</think>Yes."), engine.eos]
    message = client.post(CHAT, json={"messages": HI}).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert client.post(CHAT, json={"messages": [*HI, message, *HI]}).status_code == 200


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (BILLING, None),
        (f"{BILLING}\nYou are", "You are"),
        (f"{BILLING}You are", "You are"),
        ("x-anthropic-billing-header: cc_version=2.1; cch=abc\n\nYou are", "You are"),
        ("x-anthropic-billing-header: cc_version=2.1; cch=abc", None),
        ("You are", "You are"),
        ("What is x-anthropic-billing-header: a=b;?", "What is x-anthropic-billing-header: a=b;?"),
        ("x-anthropic-billing-header is", "x-anthropic-billing-header is"),
        ("", ""),
    ],
)
def test_only_the_line_of_bookkeeping_is_left_out(text: str, rest: str | None) -> None:
    assert fields.without_bookkeeping(text) == rest
    part = {"type": "text", "text": text}
    more = {"type": "text", "text": "more"}
    expected = [more] if rest is None else [{**part, "text": rest}, more]
    assert fields.without_bookkeeping([part, more]) == expected


def bookkept(route: str, line: str) -> Json:
    """A request with such a line at its head."""
    prompt = f"{line}\nYou are an agent."
    match route:
        case "/v1/chat/completions":
            return {"messages": [{"role": "system", "content": prompt}, *HI]}
        case "/v1/responses":
            return {"instructions": prompt, "input": "Hi"}
        case _:
            return {"system": prompt, "messages": HI, "max_tokens": 8}


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
def test_bookkeeping_changes_no_prompt(client: TestClient, engine: ScriptedEngine, route: str) -> None:
    for line in (BILLING, BILLING.replace("36ee5", "0aaa9"), ""):
        assert client.post(route, json=bookkept(route, line)).status_code == 200
    first, second, _ = [call.prompt_ids for call in engine.calls]
    chat = [{"role": "system", "content": "You are an agent."}, *HI]
    assert first == second == engine.tokenizer.apply_chat_template(chat)


def test_a_users_text_may_begin_with_such_a_line(client: TestClient, engine: ScriptedEngine) -> None:
    client.post(CHAT, json={"messages": [{"role": "user", "content": BILLING}]})
    assert BILLING in engine.tokenizer.decode(engine.calls[0].prompt_ids)


@pytest.mark.parametrize("length", [500, 100_000])
@pytest.mark.parametrize(
    ("route", "field", "body"),
    [
        (MESSAGES, "system", {"messages": HI, "max_tokens": 8}),
        (f"{MESSAGES}/count_tokens", "system", {"messages": HI}),
        (RESPONSES, "instructions", {"input": "Hi"}),
        (CHAT, "messages", {}),
        (CHAT, "tools", {"messages": HI}),
        (RESPONSES, "tools", {"input": "Hi", "instructions": "Be short."}),
    ],
)
def test_the_field_that_makes_a_prompt_too_long_is_named(
    client: TestClient, route: str, field: str, body: Json, length: int
) -> None:
    text = "1 " * length
    tool = {"name": "f", "description": text}
    values: Json = {
        "messages": [{"role": "system", "content": text}, *HI],
        "tools": [{"type": "function", **(tool if route == RESPONSES else {"function": tool})}],
    }
    response = client.post(route, json={**body, field: values.get(field, text)})
    if "count" in route and length == 500:
        assert response.status_code == 200  # it is counted, whatever can be served
        return
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert response.json()["error"]["message"].startswith(f"{field} has ")


def test_a_list_in_the_place_of_an_object_is_told_in_plain_words(client: TestClient) -> None:
    error = client.post("/generate", json={"text": "Hi", "sampling_params": [{}, {}]}).json()["error"]
    assert error["message"] == "sampling_params: input should be an object, got a list of 2 entries"


def test_an_image_is_refused_in_the_words_of_the_route(client: TestClient) -> None:
    image = {"type": "input_image", "image_url": "x"}
    for item in (
        {"role": "user", "content": [image]},
        {"type": "function_call_output", "call_id": "c", "output": [image]},
    ):
        message = client.post(RESPONSES, json={"input": [item]}).json()["error"]["message"]
        assert '{"type": "input_text", "text": "…"} at 0, got type \'input_image\'' in message


def tools_of(route: str, count: int) -> list[Json]:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    if route == MESSAGES:
        return [{"name": f"mcp__server__{index}", "input_schema": schema} for index in range(count)]
    function = [{"name": f"mcp__server__{index}", "parameters": schema} for index in range(count)]
    if route == RESPONSES:
        return [{"type": "function", **one} for one in function]
    return [{"type": "function", "function": one} for one in function]


MANY: list[tuple[str, int, Json]] = [
    (MESSAGES, 1024, {"messages": HI, "max_tokens": 4, "tool_choice": {"type": "none"}}),
    (RESPONSES, 1024, {"input": "Hi", "tool_choice": "none"}),
    (CHAT, 128, {"messages": HI, "tool_choice": "none"}),
    ("/tokenize", 1024, {"messages": HI, "tool_choice": "none"}),
]


@pytest.mark.parametrize(("route", "most", "body"), MANY)
def test_as_many_tools_may_be_offered_as_the_route_says(client: TestClient, route: str, most: int, body: Json) -> None:
    assert client.post(route, json={**body, "tools": tools_of(route, most)}).status_code == 200
    refused = client.post(route, json={**body, "tools": tools_of(route, most + 1)})
    assert refused.status_code == 400
    assert f"tools may hold at most {most} entries, got {most + 1}" in refused.text


@pytest.mark.parametrize("body", [MessagesBody, ResponsesBody])
def test_a_model_is_told_of_all_the_tools(builtin_tokenizer: Tokenizer, body: Any) -> None:
    route, asks = (MESSAGES, MANY[0][2]) if body is MessagesBody else (RESPONSES, MANY[1][2])
    asked = body.model_validate({**asks, "tool_choice": None, "tools": tools_of(route, 1024)})
    prompt = ModelFormat.of(builtin_tokenizer, ServerConfig()).render(asked.chat_messages(), asked.template())
    assert len(re.findall(r"mcp__server__\d+", builtin_tokenizer.decode(prompt))) == 1024


def test_one_turn_may_call_as_often_as_there_may_be_tools() -> None:
    calls = [{"type": "tool_use", "id": f"c{index}", "name": "f", "input": {}} for index in range(1024)]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": calls}]
    asked = MessagesBody.model_validate({"messages": turns, "max_tokens": 4})
    assert len(asked.chat_messages()[1].tool_calls or ()) == 1024


def test_the_output_of_a_local_shell_may_name_its_call_by_id() -> None:
    output = {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"}
    items = [output, {**output, "call_id": "c2"}]
    messages = ResponsesBody.model_validate({"input": items}).chat_messages()
    assert [message.tool_call_id for message in messages] == ["c1", "c2"]


def test_a_call_of_a_custom_tool_is_one_of_a_function_in_every_form_of_a_chat(
    client: TestClient, engine: ScriptedEngine
) -> None:
    custom = {"name": "apply_patch", "input": "*** Begin"}
    call = {"id": "c1", "type": "custom", "custom": custom}
    answers: list[Json] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Done."},
    ]
    items = [
        {"type": "custom_tool_call", "call_id": "c1", **custom},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
    ]
    assert client.post(CHAT, json={"messages": [*HI, *answers]}).status_code == 200
    assert client.post(RESPONSES, json={"input": [*HI, *items]}).status_code == 200
    chat, responses = [call.prompt_ids for call in engine.calls]
    assert chat == responses
    assert '"arguments": {"input": "*** Begin"}' in engine.tokenizer.decode(chat)
    for wrong in ({"input": "x"}, "x", None):
        broken = {**call, "custom": wrong}
        response = client.post(CHAT, json={"messages": [*HI, {**answers[0], "tool_calls": [broken]}]})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("route", [CHAT, RESPONSES])
@pytest.mark.parametrize("kind", ["allowed_tools", "custom", "web_search"])
def test_a_choice_of_what_is_no_function_is_refused_by_its_name(client: TestClient, route: str, kind: str) -> None:
    tool = {"type": "function", **({"name": "f"} if route == RESPONSES else {"function": {"name": "f"}})}
    asked = {"input": "Hi"} if route == RESPONSES else {"messages": HI}
    choice = {"type": kind, kind: {"mode": "auto", "tools": [tool]}, "mode": "auto", "tools": [tool], "name": "f"}
    error = client.post(route, json={**asked, "tools": [tool], "tool_choice": choice}).json()["error"]
    assert error["param"] == "tool_choice"
    assert error["message"] == (
        'tool_choice must be "none", "auto", "required" or a choice of type "function": '
        f"this server takes none of type '{kind}'"
    )


def test_no_alternatives_may_be_asked_for_without_log_probabilities(client: TestClient) -> None:
    for logprobs in ({}, {"logprobs": False}, {"logprobs": None}):
        for count, status in ((0, 200), (1, 400)):
            response = client.post(CHAT, json={"messages": HI, **logprobs, "top_logprobs": count})
            assert response.status_code == status, response.text
