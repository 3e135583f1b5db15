"""Chats in the form that Mistral's templates want, so that prompts are as by its own library.

Templates of the third format (7B v0.3, Nemo, Large 2407) paste results and descriptions into JSON as they are, and
forget the system message where a result comes last. So results and descriptions are made JSON before, and the system
message a part of the last question, which is where Mistral's library puts it. Later models that think (Magistral,
Ministral 3) take thoughts as a part of the content. Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from mini_sglang.sampling_params import Json

_PASTED_RESULT = '[TOOL_RESULTS]{"content": '
_THINKING_PART = "block['type'] == 'thinking'"


def in_mistral_form(
    template: str, messages: Sequence[Json], tools: Sequence[Json]
) -> tuple[Sequence[Json], Sequence[Json]]:
    """Messages and tools in the form that a chat template of Mistral's wants; as they are for other templates."""
    if _PASTED_RESULT in template:
        messages = _with_system_in_question([_with_json_result(message) for message in messages])
        tools = [_spelled_in_json(tool) for tool in tools]
    if _THINKING_PART in template:
        messages = [_with_thinking_part(message) for message in messages]
    return messages, tools


def _with_json_result(message: Json) -> Json:
    """A result in JSON, evenly spaced: a JSON value is itself, other text a string, and none an empty object."""
    if message["role"] != "tool":
        return message
    try:
        value = json.loads(message["content"] or "{}")
    except (ValueError, RecursionError):
        value = message["content"]
    return {**message, "content": json.dumps(value, ensure_ascii=False)}


def _with_system_in_question(messages: list[Json]) -> list[Json]:
    """The system message before the text of the last question."""
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
    """The message with its thoughts as the first part of its content, if it has thoughts."""
    if message["role"] != "assistant" or not (thoughts := message.get("reasoning_content")):
        return message
    texts = [{"type": "text", "text": message["content"]}] if message["content"] else []
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**kept, "content": [{"type": "thinking", "thinking": thoughts}, *texts]}
