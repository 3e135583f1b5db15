"""Deltas join to blocks, and each says what it changes."""

from __future__ import annotations

from mini_sglang.server.answers.deltas import Answer, CallArguments, CallOpening, Content, Delta, Reasoning


def changes(answer: Answer, *deltas: Delta) -> list[tuple[str, int, str]]:
    """(change, number of the block, new text)"""
    return [(change, block.index, text) for change, block, text in answer.push(deltas)]


def test_each_delta_says_what_it_opens_closes_and_adds() -> None:
    answer = Answer()
    assert changes(answer, Reasoning("Hm"), Reasoning("m.")) == [
        ("opened", 0, ""),
        ("grown", 0, "Hm"),
        ("grown", 0, "m."),
    ]
    assert changes(answer, Content("Yes")) == [("closed", 0, ""), ("opened", 1, ""), ("grown", 1, "Yes")]
    assert changes(answer, CallOpening(0, "id", "add")) == [("closed", 1, ""), ("opened", 2, "")]
    assert changes(answer, CallArguments(0, "{}")) == [("grown", 2, "{}")]
    assert changes(answer, CallOpening(1, "id", "add")) == [("closed", 2, ""), ("opened", 3, "")]
    assert [block.kind for block in answer.blocks] == ["reasoning", "text", "call", "call"]
    assert [(block.call_id, block.name, block.text) for block in answer.calls] == [
        ("id", "add", "{}"),
        ("id", "add", ""),
    ]
    assert (answer.reasoning, answer.content) == ("Hmm.", "Yes")


def test_a_block_is_closed_once() -> None:
    answer = Answer()
    assert list(answer.close()) == []
    changes(answer, Content("Yes"))
    assert [(change, block.index) for change, block, _ in answer.close()] == [("closed", 0)]
    assert list(answer.close()) == []


def test_no_text_opens_no_block() -> None:
    answer = Answer()
    assert changes(answer, Content(""), Reasoning("")) == []
    assert answer.blocks == []
