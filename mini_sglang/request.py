"""What a request is, from the caller's sampling parameters to the tokens it has so far.

Plain data, no torch and no text: the scheduler, the engine and the API process all speak these types. The parts that
cross a process boundary are msgspec structs, so that the wire format needs no second set of classes.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 4096
MAX_GRAMMAR_LENGTH = 1 << 18  # characters of a schema as JSON, or of another grammar
MAX_GRAMMAR_CHOICES = 4096


class FinishReason(str, enum.Enum):
    """Why a request ended. An answer that was aborted is what there is of it; with `ERROR` there is none."""

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

    Per row the sampler applies, in this order: `logit_bias` and `allowed_token_ids`, the grammar, the repetition,
    presence and frequency penalties, `min_tokens`, `temperature`, `top_k`, `top_p`, `min_p`, and draws with a random
    number that depends on (`seed`, position) alone. `temperature=0` is greedy.

    At most one of `response_format`, `regex`, `ebnf`, `choice` and `tool_grammar` says what an answer must look like;
    tokens that do not fit are then not drawn, and the answer ends where its grammar does.

    Raises ValueError from `validate()`; the message starts with the field's name.
    """

    max_tokens: int | None = None  # None: up to the context length
    min_tokens: int = 0  # no end token and no stop token id is drawn before, unless nothing else may be
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
    shown_special_ids: list[int] = []  # special tokens that are text all the same
    logprobs: int | None = None  # number of alternatives per token, 0 to MAX_LOGPROBS; None: no log-probabilities
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, which are then computed, cached or not
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    response_format: dict[str, Any] | None = None  # OpenAI's object: of type text, json_object or json_schema
    regex: str | None = None  # the whole answer matches it
    ebnf: str | None = None  # a grammar in Lark's or llama.cpp's (GBNF) notation
    choice: list[str] | None = None  # the answer is one of these
    tool_grammar: str | None = None  # of tool calls, as `structured_output.tool_call_grammar` writes it
    grammar_after: str | None = None  # any text up to and including this one comes before what the grammar describes

    @property
    def grammar_field(self) -> str | None:
        """The field that says what the answer must look like, if one does."""
        for name in _GRAMMAR_FIELDS:
            if getattr(self, name) is not None and (name != "response_format" or self.response_format != _PLAIN_TEXT):
                return name
        return None

    @property
    def is_constrained(self) -> bool:
        return self.grammar_field is not None

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise ValueError naming the first field whose value is of the wrong type or out of range.

        With `vocab_size`, token ids in `stop_token_ids`, `logit_bias` and `allowed_token_ids` are checked too.
        """
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens)
            if self.max_tokens < 1:
                raise ValueError(f"max_tokens must be at least 1, got {shorten(self.max_tokens)}")
        _require_int("min_tokens", self.min_tokens)
        if self.min_tokens >= 2**63:  # which cannot be sent to the engine
            raise ValueError(f"min_tokens must fit in 64 bits, got {shorten(self.min_tokens)}")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise ValueError(
                f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {shorten(self.min_tokens)}"
            )
        for name, low, high in _FLOAT_RANGES:
            _require_float(name, getattr(self, name), low, high)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {shorten(value)}")
        _require_int("top_k", self.top_k)
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
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _require_int(name, count)
                if not 0 <= count <= MAX_LOGPROBS:
                    raise ValueError(f"{name} must be between 0 and {MAX_LOGPROBS}, got {shorten(count)}")
        _validate_stop(self.stop)
        _require_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _validate_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _require_list("shown_special_ids", self.shown_special_ids, MAX_STOP_TOKEN_IDS)
        _validate_token_ids("shown_special_ids", self.shown_special_ids, vocab_size)
        if not isinstance(self.logit_bias, dict):
            raise ValueError(f"logit_bias must map token ids to numbers, got {shorten(self.logit_bias)}")
        _require_list("logit_bias", list(self.logit_bias), MAX_LOGIT_BIASES)
        _validate_token_ids("logit_bias", list(self.logit_bias), vocab_size)
        for bias in self.logit_bias.values():
            _require_float("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _require_list("allowed_token_ids", self.allowed_token_ids, vocab_size)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must not be empty; leave it out to allow every token")
            _validate_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _validate_grammar(self)


_PLAIN_TEXT = {"type": "text"}
_GRAMMAR_FIELDS = ("response_format", "regex", "ebnf", "choice", "tool_grammar")
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


def _validate_grammar(params: SamplingParams) -> None:
    given = [name for name in _GRAMMAR_FIELDS if getattr(params, name) is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]} cannot be combined with {given[1]}: one grammar per answer")
    if given and params.allowed_token_ids is not None:
        raise ValueError(f"{given[0]} cannot be combined with allowed_token_ids")
    for name in ("regex", "ebnf", "tool_grammar", "grammar_after"):
        text = getattr(params, name)
        if text is not None:
            if not isinstance(text, str) or not text:
                raise ValueError(f"{name} must be a string that is not empty, got {shorten(text)}")
            _require_length(name, len(text))
    if params.choice is not None:
        _require_list("choice", params.choice, MAX_GRAMMAR_CHOICES)
        if not params.choice:
            raise ValueError("choice must hold at least one string")
        for text in params.choice:
            if not isinstance(text, str) or not text:
                raise ValueError(f"choice must hold strings that are not empty, got {shorten(text)}")
        _require_length("choice", sum(map(len, params.choice)))
    if params.response_format is not None:
        _validate_response_format(params.response_format)


def _validate_response_format(value: object) -> None:
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise ValueError(f"response_format must have a type of text, json_object or json_schema, got {shorten(kind)}")
    if unknown := value.keys() - ({"type", "json_schema"} if kind == "json_schema" else {"type"}):
        raise ValueError(f"response_format of type {kind} must not have the field {shorten(min(unknown))}")
    if kind == "json_schema":
        _validate_json_schema(value.get("json_schema"))


def _validate_json_schema(named: object) -> None:
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise ValueError('response_format must be like {"type": "json_schema", "json_schema": {"schema": {…}}}')
    for name, item in named.items():
        if name not in ("name", "description", "schema", "strict"):
            raise ValueError(f"response_format must not have json_schema.{shorten(name)}")
        if name == "strict" and not isinstance(item, bool | None):
            raise ValueError(f"response_format must have true or false as json_schema.strict, got {shorten(item)}")
    try:
        length = len(json.dumps(named["schema"]))
        msgspec.msgpack.encode(named["schema"])  # the engine process must be able to get it
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"response_format must hold a schema of JSON values: {error}") from error
    _require_length("response_format", length)


def _require_length(name: str, length: int) -> None:
    if length > MAX_GRAMMAR_LENGTH:
        raise ValueError(f"{name} may take at most {MAX_GRAMMAR_LENGTH} characters, got {length}")


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. The scheduler alone changes it after `Scheduler.add`.

    `num_computed_tokens` catches up with `num_tokens`: a prompt chunk, a prefix hit, a decode and a resumed request are
    all "compute k more tokens".
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
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of prompt_ids[1:], as far as steps were read
    is_constrained: bool = field(init=False)  # each token is drawn under a mask, which depends on the tokens before
    mask: bytes = b""  # one bit per token of the vocabulary, those that may be drawn, lowest bit first
    mask_position: int = 0  # of the token that `mask` is for

    def __post_init__(self) -> None:
        self.is_constrained = self.params.is_constrained

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens whose values were read."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those not read yet included: whoever computes the last token samples one more."""
        return max(self.num_known_tokens, self.num_computed_tokens + 1)

    @property
    def may_sample(self) -> bool:
        """Whether all is known that the next token depends on: a constrained one has to wait for its mask."""
        return not self.is_constrained or self.mask_position == self.num_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are asked for and were not given out with the first token."""
        return self.params.prompt_logprobs is not None and not self.output_ids

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
    error_param: str | None = None  # the field of the request that is at fault, if one is


class StepOutputs(msgspec.Struct, omit_defaults=True):
    """What one step added to all requests. Crosses the process boundary.

    `token_ids[i]` is the one token of request `request_ids[i]`, of which there is nothing else to say; `others` are
    the requests of which there is. Iterating gives a TokenOutput for each request, at the iterating side's cost.
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
    reasoning_tokens: int = 0  # of completion_tokens; known to who reads thoughts

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
    error: str | None = None
    error_param: str | None = None  # the field of the request that is at fault, if one is
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
        """How many tokens had been generated when the text was first so long."""
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
