"""How long a step takes, and how many prompt tokens fit into one: the budget of a step in tokens and in time.

The time is a sum of five parts, each a number times what one of them takes. It begins with what steps took when the
engine started, and follows those that run. Microseconds throughout. Knows rows, no request and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from mini_sglang.scheduling.batch import Row

LONG_PROMPT = 2  # steps: a prompt that takes more leaves half of a step to prompts that can end in it
RATE = 1 / 4  # of a step's error that the next prediction corrects
MOST_ERROR = 1.0  # of what was predicted: a step that was held up by something else says little
LEAST_ERROR = -0.5


class Work(NamedTuple):
    """What a step computes."""

    steps: int  # 1: whatever a step computes, it reads the weights
    decodes: int  # rows of one token
    context: int  # tokens of KV that those read
    tokens: int  # of the other rows
    pairs: int  # of such a token and one that it attends to


def work_of(rows: Iterable[Row]) -> Work:
    """The work of a step that computes `rows`."""
    decodes = context = tokens = pairs = 0
    for row in rows:
        if row.count == 1:
            decodes += 1
            context += row.start
        else:
            tokens += row.count
            pairs += row.count * row.start + row.count * (row.count + 1) // 2
    return Work(1, decodes, context, tokens, pairs)


class StepCost:
    """What each part of `Work` takes, in microseconds: a normalised LMS filter, whose inputs are the parts."""

    def __init__(self, step: float, decode: float, context: float, token: float, pair: float, draft: float = 0) -> None:
        self.us_of = [step, decode, context, token, pair]  # all above 0
        self.draft_us = draft  # beside those: for each time that a model drafts a token, of any number of requests

    def predict(self, work: Work) -> float:
        """Microseconds that a step of this work takes."""
        return sum(us * number for us, number in zip(self.us_of, work, strict=True))

    def learn(self, work: Work, took_us: float, drafts: int = 0) -> float:
        """Follow a step that was seen to take `took_us`: each part is corrected by its share in the prediction.

        Before it a model has drafted `drafts` times. Returns what was predicted, in microseconds.
        """
        parts = [us * number for us, number in zip(self.us_of, work, strict=True)] + [self.draft_us * drafts]
        expected = sum(parts)
        error = min(max(took_us / expected - 1, LEAST_ERROR), MOST_ERROR) * expected
        scale = RATE * error / sum(part * part for part in parts)
        known = [*self.us_of, self.draft_us]
        *self.us_of, self.draft_us = (us * (1 + scale * part) for us, part in zip(known, parts, strict=True))
        return expected

    def prompt_us(self, start: int, count: int) -> float:
        """What `count` prompt tokens from position `start` on add to a step."""
        *_, token, pair = self.us_of
        return count * token + (count * start + count * (count + 1) / 2) * pair

    def tokens_within(self, us: float, start: int) -> int:
        """The most prompt tokens from position `start` on that add at most `us`."""
        *_, token, pair = self.us_of
        first = token + pair * (start + 0.5)  # prompt_us is pair / 2 * count² + first * count
        return int(2 * us / (first + math.sqrt(first * first + 2 * pair * us)))


class PromptBudget:
    """What a step has left for prompts: tokens and, where requests decode beside them, microseconds.

    A long prompt gets half of it, then prompts that can end in the step, then the long one what they leave. So short
    prompts do not wait until a long one is through, and the long one goes on beside any number of short ones.
    """

    def __init__(self, tokens: int, us: float = math.inf, cost: StepCost | None = None) -> None:
        self._tokens = self._all_tokens = tokens
        self._us = self._all_us = us
        self._cost = cost
        self.is_shared = False  # a long prompt has its half

    def chunk(self, start: int, wanted: int) -> int:
        """How many of the `wanted` tokens of one more prompt, from position `start` on, the step computes."""
        most = self.most(start)
        if self.is_shared:
            return wanted if wanted <= most else 0
        return -(-most // 2) if self._is_long(start, wanted) else min(wanted, most)

    def most(self, start: int) -> int:
        """The most tokens from position `start` on that there is room for. The first prompt always gets one."""
        if self._tokens == self._all_tokens:
            return max(1, self._fitting(self._tokens, self._us, start))
        return self._fitting(self._tokens, self._us, start)

    def take(self, start: int, count: int, wanted: int) -> None:
        """Spend `count` tokens from position `start` on, of the `wanted` that the prompt lacks."""
        self._tokens -= count
        if self._cost is not None:
            self._us -= self._cost.prompt_us(start, count)
        if count < wanted and not self.is_shared:
            self.is_shared = self._is_long(start, wanted)
            if not self.is_shared:  # it was cut, so the step is full, whatever else a token of less context would take
                self._tokens = 0

    def _is_long(self, start: int, wanted: int) -> bool:
        return wanted > LONG_PROMPT * self._fitting(self._all_tokens, self._all_us, start)

    def _fitting(self, tokens: int, us: float, start: int) -> int:
        if self._cost is not None:
            tokens = min(tokens, self._cost.tokens_within(max(us, 0.0), start))
        return max(0, tokens)
