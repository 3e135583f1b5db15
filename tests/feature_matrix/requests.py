"""What a cell of the matrix asks and what it gets, and in what two answers differ. Knows no engine and no feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mini_sglang import FinishReason, SamplingParams, TokenLogprobs
from tests import tiny

LOGPROB_TOLERANCE = 2e-5  # rounding in float32: chunks, experts and ranks add up in another order


@dataclass(frozen=True)
class Ask:
    """A request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str = ""
    priority: int = 0


@dataclass(frozen=True)
class Answer:
    """What came of a request. `text` is None where it came from an engine, which knows none."""

    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None  # one per token id, if asked for
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached: int = 0  # tokens of the prompt that were not computed
    text: str | None = None


def answer_of(outputs: Sequence[tiny.TokenOutput]) -> Answer:
    """All that an engine put out for one request that has ended."""
    logprobs = [output.logprobs for output in outputs]
    return Answer(
        token_ids=[token for output in outputs for token in output.token_ids],
        finish_reason=(outputs[-1].finish_reason or FinishReason.ERROR).value,
        logprobs=[entry for entries in logprobs for entry in entries or ()] if logprobs[0] is not None else None,
        prompt_logprobs=outputs[0].prompt_logprobs,
        num_cached=outputs[0].num_cached_tokens,
    )


def differences(got: Answer, expected: Answer) -> list[str]:
    """In what `got` differs from `expected`; empty if in nothing. What was cached is no part of an answer."""
    found = []
    if got.token_ids != expected.token_ids:
        pairs = zip(got.token_ids, expected.token_ids, strict=False)
        first = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), len(expected.token_ids))
        found.append(f"token {first} and on: {got.token_ids[first:]}, not {expected.token_ids[first:]}")
    if got.finish_reason != expected.finish_reason:
        found.append(f"finish reason {got.finish_reason}, not {expected.finish_reason}")
    if got.text is not None and got.text != expected.text:
        found.append(f"text {got.text!r}, not {expected.text!r}")
    found += _logprob_differences("log-probability", got.logprobs, expected.logprobs)
    found += _logprob_differences("prompt log-probability", got.prompt_logprobs, expected.prompt_logprobs)
    return found


def _logprob_differences(
    name: str, got: Sequence[TokenLogprobs] | None, expected: Sequence[TokenLogprobs] | None
) -> list[str]:
    if got is None or expected is None:
        return [] if got is expected else [f"{name}: {got}, not {expected}"]
    if len(got) != len(expected):
        return [f"{name}: {len(got)} entries, not {len(expected)}"]
    return [
        f"{name} {index}: {mine}, not {theirs}"
        for index, (mine, theirs) in enumerate(zip(got, expected, strict=True))
        if mine.token_ids != theirs.token_ids
        or any(abs(a - b) > LOGPROB_TOLERANCE and a != b for a, b in zip(mine.logprobs, theirs.logprobs, strict=True))
    ]
