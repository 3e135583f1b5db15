"""How an answer that follows a grammar may go on along a draft: what is allowed behind each drafted token.

Drafted tokens are tried on copies of the matcher. So the answer goes on from the copy behind the last one that came,
and what was tried in vain leaves nothing behind. Knows one answer; no request and no engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from mini_sglang.errors import FieldError
from mini_sglang.grammar.compiler import Matcher


@dataclass(frozen=True, slots=True)
class Ahead:
    """What may be drawn next, and behind each token of a draft that the grammar allows."""

    masks: list[bytes]  # one bit per token, lowest first; one mask more than the draft has tokens
    draft: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)  # for each token of the draft: the grammar allows no other


class Lookahead:
    """One answer, from where `matcher` stands: at its beginning."""

    def __init__(self, matcher: Matcher) -> None:
        self._matchers = [matcher]  # behind the known tokens, and behind each token of the draft
        self._masks: list[bytes] = []  # of these, as far as they were looked at: a matcher gives each once
        self._draft: list[int] = []

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that came: some of the draft, and one behind. Raises FieldError as `Matcher` does."""
        pairs = zip(self._draft, token_ids, strict=False)
        kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._matchers, self._masks, self._draft = [self._matchers[kept]], self._masks[kept : kept + 1], []
        for token_id in token_ids[kept:]:
            self._matchers[0].advance(token_id)
            self._masks = []

    def look(self, draft: Sequence[int] = (), most: int = 0) -> Ahead | None:
        """Try up to `most` tokens: those of `draft` as far as they are allowed, and any that the grammar forces.

        It ends before a token that ends the answer, which is drawn like any other. Returns None if the answer is
        complete. Raises FieldError if the grammar cannot go on from the known tokens.
        """
        [matcher] = self._matchers
        if matcher.is_finished:
            return None
        ahead, left = Ahead(self._masks or [matcher.mask()]), list(draft)
        while len(ahead.draft) < most and matcher.tokens_left > 1:
            token_id = forced = _only(ahead.masks[-1])
            if left and forced is not None and left[0] != forced:
                left = []  # it goes on behind something that will not come
            elif left:
                token_id = left.pop(0)
            if token_id is None or not _allows(ahead.masks[-1], token_id):
                break
            matcher = matcher.fork()
            try:
                matcher.advance(token_id)
                if matcher.is_finished:
                    break
                ahead.masks.append(matcher.mask())
            except FieldError:  # the answer may never come here
                break
            self._matchers.append(matcher)
            ahead.draft.append(token_id)
            ahead.forced.append(forced is not None)
        self._masks, self._draft = ahead.masks, ahead.draft
        return ahead


def _only(mask: bytes) -> int | None:
    """The token that a mask allows, if there is one alone."""
    allowed = int.from_bytes(mask, "little")
    return None if allowed & (allowed - 1) else allowed.bit_length() - 1


def _allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)
