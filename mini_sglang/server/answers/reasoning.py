"""Splits an answer into the reasoning that comes first and the text after it, while it streams.

Works on text alone: however the text is cut up, the deltas join to the same answer. Reasoning is looked for only at the
beginning, so that an answer that mentions the markers keeps them. Knows no model: the caller says what the markers are
and whether the prompt has opened the reasoning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mini_sglang.server.answers.deltas import Content, Delta, Reasoning
from mini_sglang.text.detokenizer import partial_match


@dataclass(frozen=True)
class Markers:
    """The texts that a model writes around its reasoning."""

    opening: str
    closing: str


THINK = Markers("<think>", "</think>")
MISTRAL_THINK = Markers("[THINK]", "[/THINK]")
# The names of `--reasoning-parser`; several are other servers' words for the same.
REASONING_PARSERS = {"think": THINK, "qwen3": THINK, "deepseek_r1": THINK, "mistral": MISTRAL_THINK}


def opens_reasoning(text: str, markers: Markers) -> bool:
    """Whether `text`, the beginning of an answer, leaves its reasoning open."""
    return text.rfind(markers.opening) > text.rfind(markers.closing)


class ReasoningParser:
    """Takes the text of one answer and gives `Reasoning` and `Content` deltas.

    White space around the markers belongs to neither. Only text that may begin a marker, and white space before a
    possible marker, is held back. Reasoning that is never closed lasts to the end of the answer.
    """

    def __init__(self, markers: Markers, *, inside: bool = False) -> None:
        """`inside`: the prompt has opened the reasoning."""
        self._markers = markers
        self._held = ""
        self._characters = 0  # of the text so far
        self.reasoning_characters = 0  # up to the end of the reasoning, markers included; 0: none so far
        self._began = False  # the reasoning has text
        self._step: Callable[[bool], Delta | None] | None = self._inside if inside else self._before

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._step == self._inside

    def push(self, text: str, *, final: bool = False) -> list[Delta]:
        """The deltas that `text` makes certain; with `final`, all that are left."""
        self._characters += len(text)
        deltas: list[Delta] = []
        self._held += text
        while self._step is not None and self._held:
            step = self._step
            if delta := step(final):
                deltas.append(delta)
            if self._step == step:  # it waits for more text
                break
        if self._step is None and self._held:
            deltas.append(Content(self._held))
            self._held = ""
        if self.in_reasoning:
            self.reasoning_characters = self._characters
        return deltas

    def _before(self, final: bool) -> None:
        """Only white space so far: reasoning begins here or there is none."""
        text = self._held.lstrip()
        opening = self._markers.opening
        if text.startswith(opening):
            self._held = text[len(opening) :]
            self._step = self._inside
        elif final or not opening.startswith(text):
            self._step = None

    def _inside(self, final: bool) -> Reasoning | None:
        text, closing, rest = self._held.partition(self._markers.closing)
        if closing:
            self.reasoning_characters = self._characters - len(rest)
            self._held = rest
            self._step = self._after
            shown = text.rstrip()
        else:
            shown = text[: len(text) - (0 if final else partial_match(text, self._markers.closing))].rstrip()
            self._held = "" if final else text[len(shown) :]
        if not self._began:
            shown = shown.lstrip()
            self._began = bool(shown)
        return Reasoning(shown) if shown else None

    def _after(self, final: bool) -> None:
        """The reasoning is over and the text has not begun."""
        self._held = self._held.lstrip()
        if self._held:
            self._step = None
