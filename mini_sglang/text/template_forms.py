"""Chats in the forms that some chat templates want, where those are others than transformers gives to all of them.

Mistral's third format (7B v0.3, Nemo, Large 2407): its templates paste results and descriptions into JSON as they are,
and forget the system message where a result comes last. Ministral takes thoughts as a part of the content, functionary
arguments as text. What comes out are the prompts that the models' own libraries make.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from mini_sglang.errors import FieldError
from mini_sglang.sampling_params import Json
from mini_sglang.text.tokenizer import Tokenizer

_PASTED_RESULT = '[TOOL_RESULTS]{"content": '
_QUESTION: Json = {"role": "user", "content": "x"}
_THINKING_PART = re.compile(r"""block\['type'\] == 'thinking'""")


def in_template_form(
    tokenizer: Tokenizer, messages: Sequence[Json], tools: Sequence[Json]
) -> tuple[Sequence[Json], Sequence[Json]]:
    """Messages and tools in the form that the tokenizer's chat template takes."""
    if _PASTED_RESULT in tokenizer.chat_template:
        messages = _system_in_question([_with_json_result(message) for message in messages])
        tools = [_spelled_in_json(tool) for tool in tools]
    if _THINKING_PART.search(tokenizer.chat_template):
        messages = [_with_thinking_part(message) for message in messages]
    if any("tool_calls" in message for message in messages) and _takes_arguments_as_text(tokenizer):
        messages = [_with_text_arguments(message) for message in messages]
    return messages, tools


def _takes_arguments_as_text(tokenizer: Tokenizer) -> bool:
    """Whether the chat template takes a call's arguments as JSON text only: most take an object."""

    def renders(arguments: object) -> bool:
        call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": arguments}}
        tool = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
        messages: list[Json] = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            tokenizer.apply_chat_template(messages, tools=[{"type": "function", "function": tool}])
        except FieldError:
            return False
        return True

    return not renders({}) and renders("{}")


def _with_json_result(message: Json) -> Json:
    """A result in JSON, evenly spaced: a JSON value is itself, other text a string, and none an empty object."""
    if message["role"] != "tool":
        return message
    try:
        value = json.loads(message["content"] or "{}")
    except (ValueError, RecursionError):
        value = message["content"]
    return {**message, "content": json.dumps(value, ensure_ascii=False)}


def _system_in_question(messages: list[Json]) -> list[Json]:
    """The system message before the text of the last question, which is where Mistral's library puts it."""
    questions = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not questions or messages[0]["role"] != "system":
        return messages
    made, last = list(messages), messages[questions[-1]]
    made[questions[-1]] = {**last, "content": f"{messages[0]['content']}\n\n{last['content']}"}
    return made[1:]


def _spelled_in_json(tool: Json) -> Json:
    """The tool with its name and description spelled as between JSON's quotation marks."""

    def spell(value: object) -> object:
        return json.dumps(value, ensure_ascii=False)[1:-1] if isinstance(value, str) else value

    return {**tool, "function": {key: spell(value) for key, value in tool["function"].items()}}


def _with_thinking_part(message: Json) -> Json:
    if message["role"] != "assistant" or not (thoughts := message.get("reasoning_content")):
        return message
    texts = [{"type": "text", "text": message["content"]}] if message["content"] else []
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**kept, "content": [{"type": "thinking", "thinking": thoughts}, *texts]}


def _with_text_arguments(message: Json) -> Json:
    if not (calls := message.get("tool_calls")):
        return message
    return {**message, "tool_calls": [{**call, "function": _in_text(call["function"])} for call in calls]}


def _in_text(function: Json) -> Json:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}
