"""Tools in words, for models whose template does not know them."""

from __future__ import annotations

from mini_sglang.server.answers.tool_calls import HERMES
from mini_sglang.server.answers.tool_prompt import with_plain_tools

QUESTION = {"role": "user", "content": "What time is it?"}


def test_a_conversation_without_tools_is_left_as_it_is() -> None:
    assert with_plain_tools([QUESTION], [], HERMES.syntax) == [QUESTION]


def test_tools_are_described_ahead_of_the_conversation() -> None:
    system, question = with_plain_tools([QUESTION], [{"type": "function", "function": {"name": "add"}}], HERMES.syntax)
    assert question == QUESTION
    assert system["role"] == "system"
    assert '{"name": "add"}' in system["content"]
