"""The tables of docs/api.md are true: what is supported has an effect, what is refused is refused by name.

Every field of a table has an example here, so a row that is added to the document needs one too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.server.conftest import ScriptedEngine

Json = dict[str, Any]

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
ROUTES = {
    "Tool calls": "/v1/chat/completions",
    "Reasoning": "/v1/chat/completions",
    "Chat completions and completions": "/v1/chat/completions",
    "Responses": "/v1/responses",
    "Anthropic's messages": "/v1/messages",
    "/generate": "/generate",
}
HI = [{"role": "user", "content": "Hi"}]
BASES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 64},
    "/generate": {"text": "Hi"},
}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
EPHEMERAL = {"type": "ephemeral"}
GET_TIME = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}
CUSTOM = {**CALLED, "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}]}
REASONING = {"role": "assistant", "content": "No.", "reasoning": "Hm."}
TEMPLATE = (  # shows all that a template can be given
    "{{ tools }}{{ enable_thinking }}{{ reasoning_effort }}{{ verbosity }}{% for message in messages %}<|im_start|>"
    "{{ message.role }}{{ message.tool_calls }}{{ message.reasoning_content }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def answered(**extra: Any) -> Json:
    """An example: an earlier answer of a chat with these fields, beside one without them."""
    message = {"role": "assistant", "content": "Hello"}
    return {"messages": [*HI, {**message, **extra}], "with": {"messages": [*HI, message]}}


def with_call(**extra: Any) -> Json:
    """An earlier answer of a chat with a call that has these fields."""
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [{**call, **extra}]}


def item(kind: str, **extra: Any) -> Json:
    """An example: the input of a response with such an item."""
    user = {"role": "user", "content": "Hi"}
    return {"input": [user, {"type": kind, "id": "x", **extra}], "with": {"input": [user]}}


def block(kind: str, **extra: Any) -> Json:
    """An example: an earlier answer of Anthropic's with such a block."""
    text = {"type": "text", "text": "Hello"}
    content = [text, {"type": kind, **extra}]
    answer = {"role": "assistant", "content": [text]}
    return {"messages": [*HI, {**answer, "content": content}, *HI], "with": {"messages": [*HI, answer, *HI]}}


def in_block(base: Json, **extra: Any) -> Json:
    """An example: the same with these fields in a block, beside the block without them."""
    answer = {"role": "assistant", "content": [base]}
    return {
        "messages": [*HI, {**answer, "content": [{**base, **extra}]}, *HI],
        "with": {"messages": [*HI, answer, *HI]},
    }


RESPONSE_TOOL = {"type": "function", "name": "f"}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}
BOOKKEEPING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
TOOL_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


def beside(tool: Json, **other: Any) -> Json:
    """An example: another tool beside this one."""
    return {"tools": [other, tool], "with": {"tools": [tool]}}


def tool_with(**extra: Any) -> Json:
    """An example: a tool of Anthropic's form with these fields, beside one without them."""
    return {"tools": [{**ANTHROPIC_TOOL, **extra}], "with": {"tools": [ANTHROPIC_TOOL]}}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
# By section and field, the fields that ask for something: sent with those of "with" and compared with them alone.
EXAMPLES: dict[str, dict[str, Json]] = {
    "Tool calls": {
        "tools[].type: custom": {
            "tools": [{"type": "custom", "custom": {"name": "c"}}, GET_TIME],
            "with": {"tools": [GET_TIME]},
        },
        "tools[].cache_control": {"tools": [{**GET_TIME, "cache_control": EPHEMERAL}], "with": {"tools": [GET_TIME]}},
        "tools": {"tools": [GET_TIME]},
        "tool_choice": {"tool_choice": "required", "with": {"tools": [GET_TIME]}},
        "parallel_tool_calls": {
            "parallel_tool_calls": False,
            "with": {"tools": [GET_TIME], "tool_choice": "required"},
        },
        "function.strict": {"tools": [STRICT], "with": {"tools": [GET_TIME]}},
        "tool": {"messages": [*HI, CALLED, {"role": "tool", "tool_call_id": "c", "content": "09:30"}]},
        "assistant": {"messages": [*HI, CALLED]},
        "messages[].tool_calls[].type: custom": {"messages": [*HI, CUSTOM], "with": {"messages": [*HI, CALLED]}},
        "tool_choice: allowed_tools": {
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [GET_TIME]}},
            "with": {"tools": [GET_TIME]},
        },
    },
    "Reasoning": {
        "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
        "reasoning_effort": {"reasoning_effort": "low"},
        "enable_thinking": {"enable_thinking": False},
        "thinking.type": {"thinking": {"type": "disabled"}},
        "reasoning.enabled": {"reasoning": {"enabled": True}},
        "reasoning.effort": {"reasoning": {"effort": "high"}},
        "thinking.budget_tokens": {
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "with": {"thinking": {"type": "enabled"}},
        },
        "reasoning.max_tokens": {"reasoning": {"max_tokens": 9}},
        "reasoning.exclude": {"reasoning": {"exclude": True}},
        "verbosity": {"verbosity": "low"},
        "reasoning_content": {
            "messages": [*HI, {**REASONING, "reasoning_content": "Ah."}],
            "with": {"messages": [*HI, REASONING]},
        },
        "reasoning": {"messages": [*HI, REASONING], "with": {"messages": [*HI, {**REASONING, "reasoning": None}]}},
    },
    "Chat completions and completions": {
        "max_tokens": {"max_tokens": 3},
        "max_completion_tokens": {"max_completion_tokens": 3},
        "min_tokens": {"min_tokens": 3},
        "n": {"n": 2},
        "best_of": {"best_of": 2, "n": 2, "route": "/v1/completions"},
        "temperature": {"temperature": 0.3},
        "top_p": {"top_p": 0.3},
        "top_k": {"top_k": 3},
        "min_p": {"min_p": 0.3},
        "presence_penalty": {"presence_penalty": 0.3},
        "frequency_penalty": {"frequency_penalty": 0.3},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "logit_bias": {"logit_bias": {"5": 3}},
        "allowed_token_ids": {"allowed_token_ids": [5]},
        "seed": {"seed": 3},
        "stop": {"stop": ","},
        "stop_token_ids": {"stop_token_ids": [5]},
        "include_stop_str_in_output": {"include_stop_str_in_output": True},
        "no_stop_trim": {"no_stop_trim": True},
        "ignore_eos": {"ignore_eos": True, "max_tokens": 9, "with": {"max_tokens": 9}},
        "skip_special_tokens": {"skip_special_tokens": False},
        "logprobs": {"logprobs": True},
        "top_logprobs": {"logprobs": True, "top_logprobs": 2, "with": {"logprobs": True}},
        "echo": {"echo": True, "route": "/v1/completions"},
        "stream": {"stream": True},
        "stream_options.include_usage": {"stream_options": {"include_usage": True}, "with": {"stream": True}},
        "stream_options.continuous_usage_stats": {
            "stream_options": {"continuous_usage_stats": True},
            "with": {"stream": True},
        },
        "response_format": {"response_format": {"type": "json_object"}},
        "structured_outputs": {"structured_outputs": {"choice": ["a", "b"]}},
        "regex": {"regex": "a+"},
        "ebnf": {"ebnf": 'root ::= "a"'},
        "choice": {"choice": ["a", "b"]},
        "continue_final_message": {"continue_final_message": True},
        "add_generation_prompt": {"add_generation_prompt": False},
        "cache_salt": {"cache_salt": "x"},
        "priority": {"priority": 3},
        "user": {"user": "x"},
        "safety_identifier": {"safety_identifier": "x"},
        "prompt_cache_key": {"prompt_cache_key": "x"},
        "metadata": {"metadata": {"a": "b"}},
        "service_tier": {"service_tier": "flex"},
        "prompt_cache_retention": {"prompt_cache_retention": "24h"},
        "prompt_cache_options": {"prompt_cache_options": {"ttl": "30m"}},
        "messages[].annotations": answered(annotations=[{"type": "url_citation", "url_citation": {}}]),
        "messages[].cache_control": answered(cache_control=EPHEMERAL),
        "messages[].parsed": answered(parsed={"a": 1}),
        "messages[].provider_specific_fields": answered(provider_specific_fields={"refusal": None}),
        "messages[].reasoning_details": answered(reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}]),
        "messages[].thinking_blocks": answered(thinking_blocks=[{"type": "thinking", "signature": "x"}]),
        "messages[].tool_calls[].extra_content": {
            "messages": [*HI, with_call(extra_content={"google": {"thought_signature": "x"}})],
            "with": {"messages": [*HI, with_call()]},
        },
        "messages[].refusal": {
            "messages": [*HI, {"role": "assistant", "content": None, "refusal": "No."}],
            "with": {"messages": [*HI, {"role": "assistant", "content": None}]},
        },
        "messages[].audio": answered(audio={"id": "x"}),
        "messages[].function_call": answered(function_call={"name": "f", "arguments": "{}"}),
        "moderation": {"moderation": {"model": "omni-moderation-latest"}},
        "separate_reasoning": {"separate_reasoning": False},
        "stream_reasoning": {"stream_reasoning": False},
        "include_reasoning": {"include_reasoning": False},
        "return_hidden_states": {"return_hidden_states": True},
        "suffix": {"suffix": "x", "route": "/v1/completions"},
        "functions": {"functions": [{"name": "f"}]},
        "function_call": {"function_call": {"name": "f"}},
        "audio": {"audio": {"voice": "x"}},
        "prediction": {"prediction": {"type": "content", "content": "x"}},
        "modalities": {"modalities": ["text", "audio"]},
        "store: true": {"store": True},
        "web_search_options": {"web_search_options": {}},
    },
    "Responses": {
        "input": {"input": [{"role": "user", "content": "Hello"}, CALL]},
        "input[].type: custom_tool_call": item("custom_tool_call", call_id="c", name="f", input="x"),
        "input[].type: local_shell_call": item("local_shell_call", call_id="c", action={"type": "exec"}),
        "input[].type: shell_call": item("shell_call", call_id="c", action={"commands": ["ls"]}),
        "input[].type: apply_patch_call": item("apply_patch_call", call_id="c", operation={"type": "delete_file"}),
        "input[].type: tool_search_call": item("tool_search_call", call_id="c", arguments={"q": "x"}),
        "input[].type: web_search_call": item("web_search_call", action={"type": "search"}, status="completed"),
        "input[].type: file_search_call": item("file_search_call", queries=["x"], status="completed"),
        "input[].type: code_interpreter_call": item("code_interpreter_call", code="1", container_id="x"),
        "input[].type: image_generation_call": item("image_generation_call", result=None),
        "input[].type: mcp_call": item("mcp_call", name="f", arguments="{}", server_label="s"),
        "input[].type: mcp_list_tools": item("mcp_list_tools", server_label="s", tools=[]),
        "input[].type: mcp_approval_request": item("mcp_approval_request", name="f", arguments="{}"),
        "input[].type: mcp_approval_response": item("mcp_approval_response", approve=True),
        "input[].encrypted_content": {
            **item("reasoning", summary=[], encrypted_content="x"),
            "with": {"input": item("reasoning", summary=[])["input"]},
        },
        "input[].type: item_reference": item("item_reference"),
        "input[].type: compaction": item("compaction", encrypted_content="x"),
        "input[].type: additional_tools": item("additional_tools", role="developer", tools=[]),
        "tools[].type: web_search": beside(RESPONSE_TOOL, type="web_search"),
        "tools[].type: custom": beside(RESPONSE_TOOL, type="custom", name="c", format={"type": "text"}),
        "tools[].type: local_shell": beside(RESPONSE_TOOL, type="local_shell"),
        "tools[].type: namespace": beside(RESPONSE_TOOL, type="namespace", name="n", tools=[RESPONSE_TOOL]),
        "tools[].type: mcp": beside(RESPONSE_TOOL, type="mcp", server_label="s", server_url="x"),
        "tools[].type: tool_search": beside(RESPONSE_TOOL, type="tool_search"),
        "tool_choice: web_search": {"tool_choice": {"type": "web_search"}, "with": {"tools": [RESPONSE_TOOL]}},
        "tool_choice: allowed_tools": {
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [RESPONSE_TOOL]},
            "with": {"tools": [RESPONSE_TOOL]},
        },
        "tool_choice: custom": {"tool_choice": {"type": "custom", "name": "f"}, "with": {"tools": [RESPONSE_TOOL]}},
        "tools[].defer_loading": {
            "tools": [{**RESPONSE_TOOL, "defer_loading": True}],
            "with": {"tools": [RESPONSE_TOOL]},
        },
        "text.verbosity": {"text": {"verbosity": "low"}},
        "reasoning.summary": {"reasoning": {"summary": "detailed"}},
        "reasoning.generate_summary": {"reasoning": {"generate_summary": "auto"}},
        "reasoning.context": {"reasoning": {"context": "all_turns"}},
        "reasoning.mode: pro": {"reasoning": {"mode": "pro"}},
        **{
            f'include: ["{name}"]': {"include": [name]}
            for name in (
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "file_search_call.results",
                "message.input_image.image_url",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
            )
        },
        "client_metadata": {"client_metadata": {"x": "y"}},
        "service_tier": {"service_tier": "priority"},
        "prompt_cache_options": {"prompt_cache_options": {"ttl": "30m"}},
        "context_management": {"context_management": [{"type": "compaction", "compact_threshold": 9}]},
        "access_programs": {"access_programs": {"cyber": "standard"}},
        "background_options": {"background_options": {"completion_window": "soonest"}},
        "image": {"image": {"context_compression": "auto"}},
        "moderation": {"moderation": {"model": "omni-moderation-latest"}},
        "instructions": {"instructions": "Be short."},
        "max_output_tokens": {"max_output_tokens": 3},
        "tools": {"tools": [{"type": "function", "name": "f"}]},
        "tool_choice": {
            "tool_choice": "required",
            "with": {"tools": [{"type": "function", "name": "f"}]},
        },
        "parallel_tool_calls": {
            "parallel_tool_calls": False,
            "with": {"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
        },
        "text.format": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        "reasoning.effort": {"reasoning": {"effort": "low"}},
        "top_logprobs": {"top_logprobs": 2},
        'include: ["message.output_text.logprobs"]': {"include": ["message.output_text.logprobs"]},
        "temperature": {"temperature": 0.3},
        "top_p": {"top_p": 0.3},
        "user": {"user": "x"},
        "metadata": {"metadata": {"a": "b"}},
        "safety_identifier": {"safety_identifier": "x"},
        "prompt_cache_key": {"prompt_cache_key": "x"},
        "prompt_cache_retention": {"prompt_cache_retention": "24h"},
        "store: true": {"store": True},
        "previous_response_id": {"previous_response_id": "x"},
        "conversation": {"conversation": "x"},
        "background": {"background": True},
        "prompt": {"prompt": {"id": "x"}},
        'truncation: "auto"': {"truncation": "auto"},
        "max_tool_calls": {"max_tool_calls": 1},
    },
    "Anthropic's messages": {
        "messages": {"messages": [*HI, {"role": "assistant", "content": "And"}]},
        "system": {"system": [{"type": "text", "text": "Be short."}]},
        "max_tokens": {"max_tokens": 3},
        "stop_sequences": {"stop_sequences": [","]},
        "temperature": {"temperature": 0.3},
        "top_p": {"top_p": 0.3},
        "top_k": {"top_k": 3},
        "tools": {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        "tool_choice": {
            "tool_choice": {"type": "any"},
            "with": {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        },
        "messages[].role: system": {"messages": [*HI, {"role": "system", "content": "Be short."}]},
        "messages[].clear_at": {
            "messages": [{"role": "system", "content": "Be short.", "clear_at": "next_user_message"}, *HI],
            "with": {"messages": [{"role": "system", "content": "Be short."}, *HI]},
        },
        "messages[].content[].type: search_result": block("search_result", title="x", source="y", content=[]),
        "messages[].content[].type: document": block("document", source={"type": "text", "data": "x"}),
        "messages[].content[].type: tool_reference": block("tool_reference", tool_name="f"),
        "messages[].content[].type: compaction": block("compaction", content="x"),
        "messages[].content[].type: redacted_thinking": block("redacted_thinking", data="x"),
        "messages[].content[].type: server_tool_use": block("server_tool_use", id="s", name="web_search", input={}),
        **{
            f"messages[].content[].type: {kind}": block(kind, tool_use_id="s", content=[])
            for kind in (
                "web_search_tool_result",
                "web_fetch_tool_result",
                "code_execution_tool_result",
                "bash_code_execution_tool_result",
                "text_editor_code_execution_tool_result",
                "tool_search_tool_result",
                "advisor_tool_result",
                "mcp_tool_result",
            )
        },
        "messages[].content[].type: mcp_tool_use": block("mcp_tool_use", id="s", name="f", server_name="s", input={}),
        "messages[].content[].type: mcp_tool_listing": block("mcp_tool_listing", tools=[]),
        "messages[].content[].type: fallback": block("fallback", to={"model": "x"}),
        "messages[].content[].signature": in_block({"type": "thinking", "thinking": "x"}, signature="y"),
        "messages[].content[].citations": in_block({"type": "text", "text": "x"}, citations=[{"url": "y"}]),
        "messages[].content[].caller": in_block(TOOL_USE, caller={"type": "direct"}),
        "messages[].content[].type: image": block("image", source={"type": "url", "url": "x"}),
        "messages[].content[].type: container_upload": block("container_upload", file_id="x"),
        "system[].text: x-anthropic-billing-header": {
            "system": [{"type": "text", "text": BOOKKEEPING}, {"type": "text", "text": "Be short."}],
            "with": {"system": "Be short."},
        },
        "tools[].input_examples": tool_with(input_examples=[{"a": 1}]),
        "tools[].cache_control": tool_with(cache_control=EPHEMERAL),
        "tools[].defer_loading": tool_with(defer_loading=True),
        "tools[].eager_input_streaming": tool_with(eager_input_streaming=True),
        "tools[].allowed_callers": tool_with(allowed_callers=["direct", "code_execution_20260120"]),
        "tools[].type: web_search_20250305": beside(ANTHROPIC_TOOL, type="web_search_20250305", name="web_search"),
        "tools[].type: bash_20250124": beside(ANTHROPIC_TOOL, type="bash_20250124", name="bash"),
        "tools[].type: text_editor_20250728": beside(ANTHROPIC_TOOL, type="text_editor_20250728", name="edit"),
        "tools[].type: tool_search_tool_regex_20251119": beside(
            ANTHROPIC_TOOL, type="tool_search_tool_regex_20251119", name="tool_search_tool_regex"
        ),
        "tools[].type: mcp_toolset": beside(ANTHROPIC_TOOL, type="mcp_toolset", mcp_server_name="s"),
        "thinking.type": {"thinking": {"type": "adaptive"}},
        "thinking.budget_tokens": {
            "thinking": {"type": "enabled", "budget_tokens": 32},
            "with": {"thinking": {"type": "enabled"}},
        },
        "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "metadata": {"metadata": {"user_id": "x", "session_id": "y"}},
        "cache_control": {"cache_control": {"type": "ephemeral"}},
        "container": {"container": "x"},
        "mcp_servers": {"mcp_servers": [{"name": "x"}]},
        "compaction": {"compaction": {"type": "summarize"}},
        "thread": {"thread": {"type": "create"}},
        "service_tier": {"service_tier": "standard_only"},
        "speed": {"speed": "fast"},
        "output_config.task_budget": {"output_config": {"task_budget": {"type": "tokens", "total": 9}}},
        "diagnostics": {"diagnostics": {"previous_message_id": None}},
        "fallbacks": {"fallbacks": "default"},
        "fallback_credit_token": {"fallback_credit_token": "x"},
        "billing_policy": {"billing_policy": {"type": "billing_policy"}},
        "user_profile_id": {"user_profile_id": "x"},
        "workspace_id": {"workspace_id": "x"},
        "betas": {"betas": ["interleaved-thinking-2025-05-14"]},
        "anthropic_beta": {"anthropic_beta": ["interleaved-thinking-2025-05-14"]},
        "anthropic_version": {"anthropic_version": "2023-06-01"},
        "output_format": {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        "output_config.effort": {"output_config": {"effort": "low"}},
        "context_management": {"context_management": {"edits": []}},
        "inference_geo": {"inference_geo": "eu"},
    },
    "/generate": {
        "text": {"text": "Hello"},
        "input_ids": {"input_ids": [5, 6], "text": None},
        "sampling_params": {"sampling_params": {"max_new_tokens": 3}},
        "return_logprob": {"return_logprob": True},
        "top_logprobs_num": {"top_logprobs_num": 2, "with": {"return_logprob": True}},
        "return_text_in_logprobs": {"return_text_in_logprobs": True, "with": {"return_logprob": True}},
        "logprob_start_len": {"logprob_start_len": 0, "with": {"return_logprob": True}},
        "stream": {"stream": True},
        "rid": {"rid": "mine"},
        "cache_salt": {"cache_salt": "x"},
        "priority": {"priority": 3},
        "log_metrics": {"log_metrics": True},
        "no_logs": {"no_logs": True},
        "sampling_params (list)": {"sampling_params": [{}]},
        "rid (list)": {"rid": ["a"]},
        "image_data": {"image_data": "x"},
        "input_embeds": {"input_embeds": [[0.5]]},
        "lora_path": {"lora_path": "x"},
        "session_params": {"session_params": {"id": "x"}},
        "return_hidden_states": {"return_hidden_states": True},
        "token_ids_logprob": {"token_ids_logprob": [5]},
        "return_bytes": {"return_bytes": True},
        "return_entropy": {"return_entropy": True},
    },
}
SAMPLING = {  # `sampling_params` of /generate, which a cell of the table lists
    "max_new_tokens": 3,
    "min_new_tokens": 3,
    "n": 2,
    "temperature": 0.3,
    "top_p": 0.3,
    "top_k": 3,
    "min_p": 0.3,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.3,
    "sampling_seed": 3,
    "stop": ",",
    "stop_token_ids": [5],
    "no_stop_trim": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logit_bias": {"5": 3},
    "json_schema": "{}",
    "regex": "a+",
    "ebnf": 'root ::= "a"',
}


def rows(section: str) -> list[tuple[list[str], str]]:
    """The fields and the effect of each row of a section's first table."""
    text = DOCUMENT.read_text().split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    table = text[text.index("\n|") :].strip().split("\n\n", 1)[0]
    cells = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    return [(re.findall(r"`[^`]+`(?: \(list\))?", first), second.strip()) for first, second in cells]


@pytest.fixture
def client(make_app: Callable[..., FastAPI], with_template: Callable[[str], Any]) -> TestClient:
    return TestClient(make_app(with_template(TEMPLATE), tool_call_parser="hermes"))


CASES = [
    (section, name.replace("`", ""), effect) for section in ROUTES for names, effect in rows(section) for name in names
]


def outcome(client: TestClient, engine: ScriptedEngine, route: str, fields: Json) -> Any:
    """What a request asked of the engine, and what came of it, without what is different each time.

    Of /v1/responses only the former: its answers repeat what they were asked.
    """
    engine.calls.clear()
    body = {name: value for name, value in {**BASES[route], **fields}.items() if value is not None}
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    answer = re.sub(r'"id":"[^"]*"|"created":\d+', "", response.text) if route != "/v1/responses" else ""
    if isinstance(fields.get("rid"), str):
        answer += engine.calls[0].request_id
    return [call[1:] for call in engine.calls], answer


@pytest.mark.parametrize(("section", "name", "effect"), CASES)
def test_the_table_says_what_happens(
    client: TestClient, engine: ScriptedEngine, section: str, name: str, effect: str
) -> None:
    fields = dict(EXAMPLES[section][name])
    route, base = fields.pop("route", ROUTES[section]), fields.pop("with", {})
    if effect.startswith("refused"):
        response = client.post(route, json={**BASES[route], **base, **fields})
        assert response.status_code == 400, response.text
        field = re.split(r"[.:(\[ ]", name)[0]
        error = response.json()["error"]
        assert field in (error["message"] if section == "Anthropic's messages" else error["param"])
        return
    with_it, without = outcome(client, engine, route, {**base, **fields}), outcome(client, engine, route, base)
    changes_nothing = with_it == without
    assert changes_nothing == effect.startswith("accepted")


def test_the_sampling_parameters_of_generate_are_listed(client: TestClient, engine: ScriptedEngine) -> None:
    [effect] = [effect for names, effect in rows("/generate") if names == ["`sampling_params`"]]
    assert {"max_new_tokens"} <= set(re.findall(r"`([^`]+)`", effect)) <= set(SAMPLING)
    without = outcome(client, engine, "/generate", {})
    for name, value in SAMPLING.items():
        assert outcome(client, engine, "/generate", {"sampling_params": {name: value}}) != without, name


def test_no_example_is_left_over() -> None:
    for section, examples in EXAMPLES.items():
        assert sorted(examples) == sorted(name for of, name, _ in CASES if of == section)


@pytest.mark.parametrize(
    ("name", "effect"), [(name, effect) for section, name, effect in CASES if section == "Anthropic's messages"]
)
def test_what_can_be_sent_can_be_counted(client: TestClient, engine: ScriptedEngine, name: str, effect: str) -> None:
    fields = {name: value for name, value in EXAMPLES["Anthropic's messages"][name].items() if name != "with"}
    body = {**BASES["/v1/messages"], **EXAMPLES["Anthropic's messages"][name].get("with", {}), **fields}
    counted = client.post("/v1/messages/count_tokens", json=body)
    if effect.startswith("refused"):
        assert counted.status_code == 400
    else:
        client.post("/v1/messages", json=body)
        assert counted.json() == {"input_tokens": len(engine.calls[-1].prompt_ids)}
