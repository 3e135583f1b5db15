"""Reasoning is told from the answer however the text is cut up."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_sglang.server.answers.deltas import Answer
from mini_sglang.server.answers.reader import AnswerReader
from mini_sglang.text.notations import MISTRAL_THINK, THINK


def reader(*, inside: bool = False) -> AnswerReader:
    return AnswerReader(THINK, None, {}, prompt_end="<think>" if inside else "")


def parse(*parts: str, inside: bool = False) -> tuple[str, str]:
    """(reasoning, content)"""
    parser = reader(inside=inside)
    deltas = [delta for part in parts for delta in parser.push(part)]
    answer = Answer.of([*deltas, *parser.push("", final=True)])
    return answer.reasoning, answer.content


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nTwo and two.\n</think>\n\nFour.", False, "Two and two.", "Four."),
        ("\n<think>Two.\n\nFour.</think>4 \n", False, "Two.\n\nFour.", "4 \n"),
        ("Two and two.\n</think>\n\nFour.", True, "Two and two.", "Four."),
        ("<think>\n\n</think>\n\nFour.", False, "", "Four."),
        ("Four.", False, "", "Four."),
        (" \n Four. <think>", False, "", " \n Four. <think>"),
        ("Reasoning is written <think>…</think>.", False, "", "Reasoning is written <think>…</think>."),
        ("<think>Two and", False, "Two and", ""),
        ("Two and </thi", True, "Two and </thi", ""),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<thi", False, "", "<thi"),
        ("<think>", False, "", ""),
        ("", True, "", ""),
        ("</think>Four.", True, "", "Four."),
    ],
)
def test_reasoning_and_answer(text: str, inside: bool, reasoning: str, content: str) -> None:
    assert parse(text, inside=inside) == (reasoning, content)
    assert parse(*text, inside=inside) == (reasoning, content)


def test_reasoning_is_given_out_as_it_comes() -> None:
    parser = reader()
    assert Answer.of(parser.push("<think>\nTwo a")).reasoning == "Two a"
    assert Answer.of(parser.push("nd <")).reasoning == "nd"
    assert Answer.of(parser.push("two")).reasoning == " <two"
    assert Answer.of(parser.push("</think>Fo")).content == "Fo"


def test_the_characters_of_reasoning_are_counted_with_its_markers() -> None:
    parser = reader()
    for character in "<think>a</think>\n\nb":
        parser.push(character)
    assert parser.reasoning_characters == len("<think>a</think>")
    none = reader()
    none.push("Four.")
    assert none.reasoning_characters == 0
    cut_off = reader()
    cut_off.push("<think>a")
    assert cut_off.in_reasoning
    assert cut_off.reasoning_characters == len("<think>a")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<think>\nTwo", True),
    ],
)
def test_a_prompt_may_open_the_reasoning(prompt: str, expected: bool) -> None:
    assert THINK.is_open_in(prompt) is expected
    assert not MISTRAL_THINK.is_open_in(prompt)


FRAGMENTS = ["<think>", "</think>", "<thi", "nk>", "</", " ", "\n", "a", "<", "b c", "é"]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), st.booleans(), st.randoms(use_true_random=False))
def test_cuts_make_no_difference(text: str, inside: bool, random: Random) -> None:
    whole = parse(text, inside=inside)
    assert parse(*text, inside=inside) == whole
    cuts = sorted(random.randint(0, len(text)) for _ in range(3))
    deltas = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(*deltas, inside=inside) == whole
