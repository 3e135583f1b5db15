"""Histories for gpt-oss's template, which takes one call for each message, and no text beside thoughts."""

from __future__ import annotations

from typing import Any

from mini_sglang.text.harmony_chats import harmony_messages, is_harmony

Json = dict[str, Any]


def called(*names: str, content: str = "", **fields: Any) -> Json:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls, **fields}


def result(name: str) -> Json:
    return {"role": "tool", "tool_call_id": name, "content": f"of {name}"}


QUESTION = {"role": "user", "content": "What now?"}
ANSWER = {"role": "assistant", "content": "This."}


def test_harmony_is_known_by_its_channels_and_its_first_call() -> None:
    assert is_harmony("<|channel|>analysis<|message|> {%- set tool_call = message.tool_calls[0] %}")
    assert not is_harmony("{%- set tool_call = message.tool_calls[0] %}")
    assert not is_harmony("<|channel|>analysis<|message|> {%- for call in message.tool_calls %}")


def test_each_call_has_a_message_and_its_result_after_it() -> None:
    thought = called("a", "b", reasoning_content="Both.")
    history = [QUESTION, thought, result("b"), result("a"), ANSWER, QUESTION, called("c"), result("c")]
    assert harmony_messages(history) == [
        *[QUESTION, called("a", reasoning_content="Both."), result("a"), called("b"), result("b")],
        *[ANSWER, QUESTION, called("c"), result("c")],
    ]


def test_a_result_of_no_call_comes_last_and_a_call_may_lack_its_result() -> None:
    nameless = {"role": "tool", "content": "of whom?"}
    assert harmony_messages([called("a", "b"), nameless, result("a")]) == [
        called("a"), result("a"), called("b"), nameless
    ]  # fmt: skip
    assert harmony_messages([called("a", "b"), result("b")]) == [called("a"), called("b"), result("b")]


def test_equal_results_of_two_calls_are_both_there() -> None:
    first, second = result("a"), {"role": "tool", "tool_call_id": "a", "content": "of a"}
    assert harmony_messages([called("a", "b"), first, second, result("b")]) == [
        called("a"), first, second, called("b"), result("b")
    ]  # fmt: skip


def test_what_was_said_before_a_call_joins_the_thoughts_before_it() -> None:
    assert harmony_messages([called("a", content="Let me see.", reasoning_content="Hm.")]) == [
        called("a", reasoning_content="Hm.\nLet me see.")
    ]
    alone = [called("a", content="Let me see.")]
    assert harmony_messages(alone) == alone
