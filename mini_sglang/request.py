"""What a request is, from the caller's sampling parameters to the tokens it has so far.

Plain data, no torch and no text: the scheduler, the engine and the API process all speak these types. The parts that
cross a process boundary are msgspec structs, so that the wire format needs no second set of classes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 4096


class FinishReason(str, enum.Enum):
    """Why a request ended. `STOP` and `LENGTH` are what OpenAI clients see; the other two mean there is no answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(enum.Enum):
    """Where a request stands. A preempted request is `WAITING` again, with its output kept."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when to stop.

    Per row the sampler applies, in this order: `logit_bias` and `allowed_token_ids`, then the repetition, presence and
    frequency penalties, `temperature`, `top_k`, `top_p`, `min_p`, and draws with a random number that depends on
    (`seed`, position) alone. `temperature=0` is greedy.

    Raises ValueError from `validate()`; the message starts with the field's name.
    """

    max_tokens: int | None = None  # None: up to the context length
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # number of alternatives per token, 0 to MAX_LOGPROBS; None: no log-probabilities
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise ValueError naming the first field whose value is of the wrong type or out of range.

        With `vocab_size`, token ids in `stop_token_ids`, `logit_bias` and `allowed_token_ids` are checked too.
        """
        for name in ("top_k", *(("max_tokens",) if self.max_tokens is not None else ())):
            _require_int(name, getattr(self, name))
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {shorten(self.max_tokens)}")
        for name, low, high in _FLOAT_RANGES:
            _require_float(name, getattr(self, name), low, high)
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 or 0 (off) or at least 1, got {shorten(self.top_k)}")
        if not self.top_p > 0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be greater than 0, got {self.repetition_penalty}")
        if self.seed is not None:
            _require_int("seed", self.seed)
            if not -(2**63) <= self.seed < 2**63:
                raise ValueError(f"seed must fit in 64 bits, got {shorten(self.seed)}")
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs)
            if not 0 <= self.logprobs <= MAX_LOGPROBS:
                raise ValueError(f"logprobs must be between 0 and {MAX_LOGPROBS}, got {shorten(self.logprobs)}")
        _validate_stop(self.stop)
        _require_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _validate_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _require_list("logit_bias", list(self.logit_bias), MAX_LOGIT_BIASES)
        _validate_token_ids("logit_bias", list(self.logit_bias), vocab_size)
        for bias in self.logit_bias.values():
            _require_float("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _require_list("allowed_token_ids", self.allowed_token_ids, vocab_size)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must not be empty; leave it out to allow every token")
            _validate_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)


_FLOAT_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


def shorten(value: object, length: int = 80) -> str:
    """A value for an error message, cut to a readable length; costs little however large the value is."""
    if isinstance(value, (dict, list, tuple)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[: length + 1] if isinstance(value, str) else value)
    return text if len(text) <= length + 2 else f"{text[:length]}…"


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {shorten(value)}")


def _require_float(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ValueError(f"{name} must be a finite number, got {shorten(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low:g} and {high:g}, got {shorten(value)}")


def _validate_stop(stop: list[str]) -> None:
    _require_list("stop", stop, MAX_STOP_STRINGS)
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop must hold non-empty strings, got {shorten(text)}")
        if len(text) > MAX_STOP_LENGTH:
            raise ValueError(f"stop may hold strings of at most {MAX_STOP_LENGTH} characters, got one of {len(text)}")


def _require_list(name: str, value: object, most: int | None = None) -> None:
    if not isinstance(value, (list, tuple)):  # a string would pass as a list of its characters
        raise ValueError(f"{name} must be a list, got {shorten(value)}")
    if most is not None and len(value) > most:
        raise ValueError(f"{name} may hold at most {most} entries, got {len(value)}")


def _validate_token_ids(name: str, token_ids: list[int], vocab_size: int | None) -> None:
    for token_id in token_ids:
        _require_int(name, token_id)
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            limit = "" if vocab_size is None else f" and below the vocabulary size {vocab_size}"
            raise ValueError(f"{name} must hold token ids that are at least 0{limit}, got {shorten(token_id)}")


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. The scheduler alone changes it after `Scheduler.add`.

    `num_computed_tokens` catches up with `num_tokens`: a prompt chunk, a prefix hit, a decode and a resumed request are
    all "compute k more tokens". While a request decodes, its counters are only brought up to date when somebody needs
    them (`Scheduler.settle`); `output_ids` always holds every token that was read.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""  # requests share cached prefixes only with equal salts
    priority: int = 0  # smaller runs first under `--schedule priority`
    seed: int = 0  # params.seed, or one drawn at random for this request
    arrival: int = 0  # order of Scheduler.add
    max_num_tokens: int = 0  # prompt and output together never exceed it; set by Scheduler.add

    output_ids: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache when first admitted
    was_admitted: bool = False  # has run before; WAITING then means preempted
    last_step: int = 0  # number of the last launched step that contains this request
    slot: int | None = None  # row of the RequestTable while running
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens whose values were read."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those not read yet included: whoever computes the last token samples one more."""
        return max(self.num_known_tokens, self.num_computed_tokens + 1)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end the answer."""
        ends = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return ends.union(self.params.stop_token_ids) if self.params.stop_token_ids else ends

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose values are known, prompt first (a new list)."""
        return self.prompt_ids + self.output_ids


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position, of the model's own distribution (before penalties and temperature).

    `token_ids[0]` is the sampled token; the best alternatives follow, most likely first (the sampled one among them
    again if it is one of the best).
    """

    token_ids: list[int]
    logprobs: list[float]


class TokenOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step added to one request: the engine's output, in tokens. Crosses the process boundary."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token id
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the end token that ended the request; it is the last of token_ids
    num_cached_tokens: int = 0  # said with the first token, and later whenever the output is one of `others`
    error: str | None = None  # set when finish_reason is ERROR


class StepOutputs(msgspec.Struct, omit_defaults=True):
    """What one step added to all requests. Crosses the process boundary.

    `token_ids[i]` is the one token of request `request_ids[i]`, of which there is nothing else to say; `others` are
    the requests of which there is. Iterating gives a TokenOutput for each request, at the iterating side's cost.
    """

    request_ids: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    others: Sequence[TokenOutput] = ()

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

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class GeneratedTokens:
    """All that one request has generated, in append-only lists. Its RequestOutputs are views of beginnings of these."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # one per token id; None: not asked for
    text_pieces: list[str] = field(default_factory=list)


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
    stop_reason: str | int | None = None  # the stop string or the one of `stop_token_ids` that ended the request
    error: str | None = None
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
    def new_token_ids(self) -> list[int]:
        return self.generated.token_ids[self._first_new : self.usage.completion_tokens]

    @property
    def new_logprobs(self) -> list[TokenLogprobs] | None:
        logprobs = self.generated.logprobs
        return None if logprobs is None else logprobs[self._first_new : self.usage.completion_tokens]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def _first_new(self) -> int:
        return self.usage.completion_tokens - self.num_new_tokens
