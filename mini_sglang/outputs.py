"""What comes out: tokens, as the engine gives them step by step, and text, as a caller sees it.

TokenOutput and StepOutputs cross the process boundary, so they are msgspec structs. Knows no request and no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from mini_sglang.errors import FieldError


class FinishReason(str, enum.Enum):
    """Why a request ended. An answer that was aborted is what there is of it; with `ERROR` there is none."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the model's own distribution (before penalties and temperature).

    `token_ids[0]` is the token that stands there, sampled or the prompt's; the best alternatives follow, most likely
    first (the first one among them again if it is one of the best).
    """

    token_ids: list[int]
    logprobs: list[float]


class TokenOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step added to one request: the engine's output, in tokens. Crosses the process boundary."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token id
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first token: of the prompt's tokens but its first
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the end token that ended the request; it is the last of token_ids
    num_cached_tokens: int = 0  # said with the first token, and later whenever the output is one of `others`
    queued_s: float | None = None  # with the first token: seconds from when it came to its first step
    error: str | None = None  # set when finish_reason is ERROR
    error_field: str | None = None  # if a field of the request is at fault; `error` is then the problem of a FieldError


class StepOutputs(msgspec.Struct, omit_defaults=True):
    """What one step added to all requests. Crosses the process boundary.

    A request that gained one token and nothing else is an entry in two columns, `request_ids[i]` and `token_ids[i]`;
    every other one is a whole TokenOutput in `others`. Iterating gives a TokenOutput for each request, at the iterating
    side's cost.
    """

    request_ids: list[str] = []
    token_ids: list[int] = []
    others: list[TokenOutput] = []

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.others)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + sum(len(output.token_ids) for output in self.others)

    def __iter__(self) -> Iterator[TokenOutput]:
        for request_id, token_id in zip(self.request_ids, self.token_ids, strict=True):
            yield TokenOutput(request_id=request_id, token_ids=[token_id])
        yield from self.others


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # of completion_tokens; set by the server, which parses reasoning

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class GeneratedTokens:
    """All that one request has generated, in append-only lists. Its RequestOutputs are views of beginnings of these."""

    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)  # when each of token_ids came, on time.perf_counter's clock
    logprobs: list[TokenLogprobs] | None = None  # one per token id; None: not asked for
    prompt_logprobs: list[TokenLogprobs] | None = None
    text_pieces: list[str] = field(default_factory=list)
    num_tokens_at_piece: list[int] = field(default_factory=list)  # of token_ids, when each of text_pieces came


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What a caller sees of a request so far, in text and tokens. `text_delta` is what the latest step added.

    `token_ids` holds every generated token, an end token included; `text` never shows a stop string (unless asked
    for) and skips special tokens (unless told not to). An output stays as it was when later ones follow. The whole
    `text`, `token_ids` and `logprobs` are made when asked for (O(length)); a stream that only reads `text_delta`,
    `new_token_ids` and `new_logprobs` costs the same for every token.
    """

    request_id: str
    usage: Usage
    text_delta: str = ""
    num_new_tokens: int = 0  # how many of token_ids (and logprobs) the latest step added
    finish_reason: FinishReason | None = None
    queued_s: float | None = None  # seconds that the engine let the request wait before its first step; None: until now
    stop_reason: str | int | None = None  # the stop string or the one of `stop_token_ids` that ended the request
    error: str | None = None  # set when finish_reason is ERROR
    field_error: FieldError | None = None  # the same, if a field of the request is at fault
    generated: GeneratedTokens = field(default_factory=GeneratedTokens, compare=False)
    num_text_pieces: int = field(default=0, compare=False)

    def __repr__(self) -> str:
        reason = None if self.finish_reason is None else self.finish_reason.value
        return (
            f"RequestOutput(request_id={self.request_id!r}, text={self.text!r}, token_ids={self.token_ids}, "
            f"finish_reason={reason!r}, stop_reason={self.stop_reason!r}, usage={self.usage}, error={self.error!r})"
        )

    @property
    def text(self) -> str:
        return "".join(self.generated.text_pieces[: self.num_text_pieces])

    @property
    def token_ids(self) -> list[int]:
        return self.generated.token_ids[: self.usage.completion_tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One per token id; None if the sampling parameters did not ask for them."""
        logprobs = self.generated.logprobs
        return None if logprobs is None else logprobs[: self.usage.completion_tokens]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """One per prompt token but the first, of which there is none; known with the first output token."""
        return self.generated.prompt_logprobs

    @property
    def new_token_ids(self) -> list[int]:
        return self.generated.token_ids[self._first_new : self.usage.completion_tokens]

    @property
    def new_token_times(self) -> list[float]:
        """When each of `new_token_ids` came, on the clock of time.perf_counter."""
        return self.generated.token_times[self._first_new : self.usage.completion_tokens]

    @property
    def new_logprobs(self) -> list[TokenLogprobs] | None:
        logprobs = self.generated.logprobs
        return None if logprobs is None else logprobs[self._first_new : self.usage.completion_tokens]

    def num_tokens_of_text(self, num_characters: int) -> int:
        """The number of tokens that had been generated when the text first had this many characters."""
        num_tokens = 0
        pieces = zip(self.generated.text_pieces, self.generated.num_tokens_at_piece, strict=True)
        for text, num_tokens_then in pieces:
            if num_characters <= 0:
                break
            num_characters -= len(text)
            num_tokens = num_tokens_then
        return num_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def _first_new(self) -> int:
        return self.usage.completion_tokens - self.num_new_tokens
