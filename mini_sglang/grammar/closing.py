"""A short way to the end of an answer that follows a grammar, for answers that come near their limit of tokens.

A model that has lost its way in a string would be cut off there, and what it said be no JSON. Closing what is open
takes few tokens, which are found here by trying: brackets before quotes, quotes before commas. It need not be the
shortest way, and in a grammar of something else than JSON there may be none that is found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llguidance import LLMatcher

# In this order, in a string and elsewhere: what closes the most, a quote (elsewhere it opens a string, to be closed at
# once), what leads on to something that is required, anything but white space.
_IN_STRINGS = (rb'"[\]}]*', rb"\S.*")
_ELSEWHERE = (rb"[\]}]+", rb'"', rb'"?[,:]"?', rb"\S.*")
_LETTER = rb"[qQ]"  # begins nothing in JSON but text


class EndingFinder:
    """Finds endings in one vocabulary. Sets of tokens are integers that have bit i for token i."""

    def __init__(self, tokens: list[bytes], eos_token_ids: list[int]) -> None:
        self._ends = frozenset(eos_token_ids)
        self._end = sum(1 << token_id for token_id in self._ends)
        self._letter = _matching(_LETTER, tokens)
        self._in_strings = [_matching(pattern, tokens) for pattern in _IN_STRINGS]
        self._elsewhere = [_matching(pattern, tokens) for pattern in _ELSEWHERE]

    def takes_text(self, matcher: LLMatcher) -> bool:
        """Whether any text may come next."""
        return bool(int.from_bytes(matcher.compute_bitmask(), "little") & self._letter)

    def find(self, matcher: LLMatcher, most: int, closings: Sequence[list[int]] = ()) -> list[int] | None:
        """At most `most` tokens that bring the answer to its end, or None. Moves `matcher`; give it a copy.

        `closings`: tokens that end text which stands in no quotes, or the last of several calls.
        """
        token_ids: list[int] = []
        while not matcher.is_stopped():
            if len(token_ids) >= most:
                return None
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if not allowed & self._end and (closing := self._closing(matcher, closings)):
                token_ids += closing
                continue
            preferences = self._in_strings if allowed & self._letter else self._elsewhere
            candidates = next(filter(None, (allowed & tokens for tokens in (self._end, *preferences))), allowed)
            if not candidates:
                return None
            token_ids.append((candidates & -candidates).bit_length() - 1)
            if token_ids[-1] in self._ends:
                return token_ids
            matcher.consume_token(token_ids[-1])
        return None if matcher.is_error() else token_ids

    def _closing(self, matcher: LLMatcher, closings: Sequence[list[int]]) -> list[int]:
        """The closing after which no more text may come, which `matcher` then has taken in; empty if there is none."""
        for closing in closings:
            trial = matcher.deep_copy()
            if trial.try_consume_tokens(closing) < len(closing):
                continue
            if not int.from_bytes(trial.compute_bitmask(), "little") & self._letter:
                matcher.consume_tokens(closing)
                return closing
        return []


def _matching(pattern: bytes, tokens: list[bytes]) -> int:
    """The set of tokens that match as a whole."""
    matches = re.compile(pattern, re.DOTALL).fullmatch
    members = bytearray(len(tokens) // 8 + 1)
    for token_id in [token_id for token_id, token in enumerate(tokens) if matches(token)]:
        members[token_id >> 3] |= 1 << (token_id & 7)
    return int.from_bytes(members, "little")
