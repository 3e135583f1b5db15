"""Chats for gpt-oss's template, which takes one call for each message and knows a result only by the call before it.

Calls that were made together become messages of their own, each followed by its result, and what was said before a call
joins the thoughts before it, since the template refuses both. Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mini_sglang.sampling_params import Json

_FIRST_CALL_ONLY = "message.tool_calls[0]"
_ANALYSIS = "<|channel|>analysis<|message|>"


def is_harmony(template: str) -> bool:
    """Whether a chat template writes harmony, and the first call of a message only."""
    return _ANALYSIS in template and _FIRST_CALL_ONLY in template


def harmony_messages(messages: Sequence[Json]) -> list[Json]:
    """The messages with one call each, and each call's result after it."""
    made: list[Json] = []
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        if not message.get("tool_calls"):
            made.append(message)
            continue
        results = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        made += _one_by_one(message, results)
    return made


def _one_by_one(message: Json, results: Sequence[Json]) -> Iterator[Json]:
    """The calls of a message, each with the results that are its own; the last with those that name no call."""
    first, *others = message["tool_calls"]
    calls = [_with_content_as_thought({**message, "tool_calls": [first]})]
    calls += [{"role": message["role"], "content": "", "tool_calls": [call]} for call in others]
    left = list(results)
    for call in calls:
        is_last = call is calls[-1]
        own = [result for result in left if is_last or result.get("tool_call_id") == call["tool_calls"][0]["id"]]
        left = [result for result in left if result not in own]
        yield call
        yield from own


def _with_content_as_thought(message: Json) -> Json:
    if not message.get("reasoning_content"):
        return message  # the template takes content for a thought then
    thought = "\n".join(filter(None, (message["reasoning_content"], message["content"])))
    return {**message, "content": "", "reasoning_content": thought}
