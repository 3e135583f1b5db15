"""Chats for the templates of Mistral's third format (7B v0.3, Nemo, Large 2407), so that prompts are as by its library.

These templates paste results and descriptions into JSON as they are, and forget the system message where a result comes
last. So results and descriptions are made JSON before, and the system message a part of the last question, which is
where Mistral's library puts it. Later formats need none of this. Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from mini_sglang.sampling_params import Json

_PASTED_RESULT = '[TOOL_RESULTS]{"content": '


def is_third_format(template: str) -> bool:
    """Whether a chat template pastes results into JSON."""
    return _PASTED_RESULT in template


def third_format_messages(messages: Sequence[Json]) -> list[Json]:
    """The messages with results as JSON, and the system message before the text of the last question."""
    made = [
        {**message, "content": _as_json(message["content"])} if message["role"] == "tool" else message
        for message in messages
    ]
    questions = [index for index, message in enumerate(made) if message["role"] == "user"]
    if not questions or made[0]["role"] != "system":
        return made
    last = made[questions[-1]]
    made[questions[-1]] = {**last, "content": f"{made[0]['content']}\n\n{last['content']}"}
    return made[1:]


def third_format_tools(tools: Sequence[Json]) -> list[Json]:
    """The tools with names and descriptions spelled as within JSON's quotation marks."""

    def spell(value: object) -> object:
        return json.dumps(value, ensure_ascii=False)[1:-1] if isinstance(value, str) else value

    return [{**tool, "function": {key: spell(value) for key, value in tool["function"].items()}} for tool in tools]


def _as_json(result: str) -> str:
    """The result in JSON, evenly spaced: a JSON value is itself, other text a string, and none an empty object."""
    try:
        value = json.loads(result or "{}")
    except (ValueError, RecursionError):
        value = result
    return json.dumps(value, ensure_ascii=False)
