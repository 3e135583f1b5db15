"""Splits an answer into the thought that comes first and the text after it, while it streams.

A pure text machine: however the text is cut into deltas, the joined pieces are the same. A thought is only looked for
at the beginning, so that an answer that speaks of the markers keeps them. Knows no model: who makes a parser says which
markers there are, and whether the prompt has opened the thought already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mini_sglang.server.answers.deltas import Content, Piece, Reasoning
from mini_sglang.text.detokenizer import partial_match


@dataclass(frozen=True)
class Markers:
    """What a model writes around its thoughts."""

    opening: str
    closing: str


THINK = Markers("<think>", "</think>")
MISTRAL_THINK = Markers("[THINK]", "[/THINK]")
# The names of `--reasoning-parser`; several are other servers' words for the same.
REASONING_PARSERS = {"think": THINK, "qwen3": THINK, "deepseek_r1": THINK, "mistral": MISTRAL_THINK}


def opens_thought(text: str, markers: Markers) -> bool:
    """Whether `text`, the beginning of an answer, leaves a thought open."""
    return text.rfind(markers.opening) > text.rfind(markers.closing)


class ReasoningParser:
    """Takes the text of one answer and gives `Reasoning` and `Content` pieces.

    White space around the markers belongs to neither. Held back is only what may be the beginning of a marker, and
    white space that a marker may follow. A thought that never closes is reasoning to its end.
    """

    def __init__(self, markers: Markers, *, inside: bool = False) -> None:
        """`inside`: the prompt has opened the thought."""
        self._markers = markers
        self._held = ""
        self._characters = 0  # of the text so far
        self.reasoning_characters = 0  # of the text up to the thought's end, markers included; 0: no thought (yet)
        self._began = False  # the thought has text
        self._step: Callable[[bool], Piece | None] | None = self._in_thought if inside else self._before

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends within a thought."""
        return self._step == self._in_thought

    def push(self, text: str, *, final: bool = False) -> list[Piece]:
        """The pieces that are certain now and were not before; with `final`, all that is left."""
        self._characters += len(text)
        pieces: list[Piece] = []
        self._held += text
        while self._step is not None and self._held:
            step = self._step
            if piece := step(final):
                pieces.append(piece)
            if self._step == step:  # it waits for more text
                break
        if self._step is None and self._held:
            pieces.append(Content(self._held))
            self._held = ""
        if self.is_thinking:
            self.reasoning_characters = self._characters
        return pieces

    def _before(self, final: bool) -> None:
        """Nothing but white space so far: a thought begins here, or there is none."""
        text = self._held.lstrip()
        opening = self._markers.opening
        if text.startswith(opening):
            self._held = text[len(opening) :]
            self._step = self._in_thought
        elif final or not opening.startswith(text):
            self._step = None

    def _in_thought(self, final: bool) -> Reasoning | None:
        thought, closing, rest = self._held.partition(self._markers.closing)
        if closing:
            self.reasoning_characters = self._characters - len(rest)
            self._held = rest
            self._step = self._after
            shown = thought.rstrip()
        else:
            shown = thought[: len(thought) - (0 if final else partial_match(thought, self._markers.closing))].rstrip()
            self._held = "" if final else thought[len(shown) :]
        if not self._began:
            shown = shown.lstrip()
            self._began = bool(shown)
        return Reasoning(shown) if shown else None

    def _after(self, final: bool) -> None:
        """The thought is over, its text has not begun."""
        self._held = self._held.lstrip()
        if self._held:
            self._step = None
