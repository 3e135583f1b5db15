"""Sampling parameters: how tokens are chosen, which form the answer must have, when it ends.

Plain data, checked by itself: no torch, no text, no request. A msgspec struct, so that it crosses the process boundary
as it is.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from mini_sglang.errors import FieldError, shorten

Json = dict[str, Any]  # a JSON object

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 4096
MAX_SALT_LENGTH = 256  # characters of a request's cache_salt
PRIORITIES = range(-(2**31), 2**31)  # that a request may have
MAX_GRAMMAR_LENGTH = 1 << 18  # characters of a schema as JSON, or of another grammar
MAX_GRAMMAR_CHOICES = 4096


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when to stop.

    Per row the sampler applies, in this order: `logit_bias` and `allowed_token_ids`, the grammar, the repetition,
    presence and frequency penalties, `min_tokens`, `temperature`, `top_k`, `top_p`, `min_p`, and draws with a random
    number that depends on (`seed`, position) alone. `temperature=0` is greedy.

    At most one of `response_format`, `regex`, `ebnf`, `choice` and `tool_grammar` gives the form of the answer; tokens
    that do not fit are then not drawn, and the answer ends where its grammar does.

    `validate()` raises FieldError for the first field that is wrong.
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
    response_format: Json | None = None  # OpenAI's object: of type text, json_object or json_schema
    regex: str | None = None  # the whole answer matches it
    ebnf: str | None = None  # a grammar in Lark's or llama.cpp's (GBNF) notation
    choice: list[str] | None = None  # the answer is one of these
    tool_grammar: str | None = None  # of tool calls, as `grammar.compiler.tool_call_grammar` writes it
    grammar_after: str | None = None  # any text up to and including this one comes before what the grammar describes

    @property
    def grammar_field(self) -> str | None:
        """The field that gives the form of the answer, if one does."""
        for name in _GRAMMAR_FIELDS:
            if getattr(self, name) is not None and (name != "response_format" or self.response_format != _PLAIN_TEXT):
                return name
        return None

    @property
    def is_constrained(self) -> bool:
        return self.grammar_field is not None

    @property
    def is_penalised(self) -> bool:
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise FieldError for the first field whose value is of the wrong type or out of range.

        With `vocab_size`, token ids in `stop_token_ids`, `logit_bias` and `allowed_token_ids` are checked too.
        """
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens)
            if self.max_tokens < 1:
                raise FieldError("max_tokens", f"must be at least 1, got {shorten(self.max_tokens)}")
        _require_int("min_tokens", self.min_tokens)
        if self.min_tokens >= 2**63:  # which cannot be sent to the engine
            raise FieldError("min_tokens", f"must fit in 64 bits, got {shorten(self.min_tokens)}")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise FieldError(
                "min_tokens",
                f"must be between 0 and max_tokens ({self.max_tokens}), got {shorten(self.min_tokens)}",
                "max_tokens",
            )
        for name, low, high in _FLOAT_RANGES:
            _require_float(name, getattr(self, name), low, high)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise FieldError(name, f"must be true or false, got {shorten(value)}")
        _require_int("top_k", self.top_k)
        if self.top_k < -1:
            raise FieldError("top_k", f"must be -1 or 0 (off) or at least 1, got {shorten(self.top_k)}")
        if not self.top_p > 0:
            raise FieldError("top_p", f"must be in (0, 1], got {self.top_p}")
        if not self.repetition_penalty > 0:
            raise FieldError("repetition_penalty", f"must be greater than 0, got {self.repetition_penalty}")
        if self.seed is not None:
            _require_int("seed", self.seed)
            if not -(2**63) <= self.seed < 2**63:
                raise FieldError("seed", f"must fit in 64 bits, got {shorten(self.seed)}")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _require_int(name, count)
                if not 0 <= count <= MAX_LOGPROBS:
                    raise FieldError(name, f"must be between 0 and {MAX_LOGPROBS}, got {shorten(count)}")
        _validate_stop(self.stop)
        _require_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _validate_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _require_list("shown_special_ids", self.shown_special_ids, MAX_STOP_TOKEN_IDS)
        _validate_token_ids("shown_special_ids", self.shown_special_ids, vocab_size)
        if not isinstance(self.logit_bias, dict):
            raise FieldError("logit_bias", f"must map token ids to numbers, got {shorten(self.logit_bias)}")
        _require_list("logit_bias", list(self.logit_bias), MAX_LOGIT_BIASES)
        _validate_token_ids("logit_bias", list(self.logit_bias), vocab_size)
        for bias in self.logit_bias.values():
            _require_float("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _require_list("allowed_token_ids", self.allowed_token_ids, vocab_size)
            if not self.allowed_token_ids:
                raise FieldError("allowed_token_ids", "must not be empty; leave it out to allow every token")
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


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(name, f"must be an integer, got {shorten(value)}")


def _require_float(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise FieldError(name, f"must be a finite number, got {shorten(value)}")
    if not low <= value <= high:
        raise FieldError(name, f"must be between {low:g} and {high:g}, got {shorten(value)}")


def _validate_stop(stop: list[str]) -> None:
    _require_list("stop", stop, MAX_STOP_STRINGS)
    for text in stop:
        if not isinstance(text, str) or not text:
            raise FieldError("stop", f"must hold non-empty strings, got {shorten(text)}")
        if len(text) > MAX_STOP_LENGTH:
            raise FieldError(
                "stop", f"may hold strings of at most {MAX_STOP_LENGTH} characters, got one of {len(text)}"
            )


def _require_list(name: str, value: object, most: int | None = None) -> None:
    if not isinstance(value, (list, tuple)):  # a string would pass as a list of its characters
        raise FieldError(name, f"must be a list, got {shorten(value)}")
    if most is not None and len(value) > most:
        raise FieldError(name, f"may hold at most {most} entries, got {len(value)}")


def _validate_token_ids(name: str, token_ids: list[int], vocab_size: int | None) -> None:
    for token_id in token_ids:
        _require_int(name, token_id)
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            limit = "" if vocab_size is None else f" and below the vocabulary size {vocab_size}"
            raise FieldError(name, f"must hold token ids that are at least 0{limit}, got {shorten(token_id)}")


def _validate_grammar(params: SamplingParams) -> None:
    given = [name for name in _GRAMMAR_FIELDS if getattr(params, name) is not None]
    if len(given) > 1:
        raise FieldError(given[0], f"cannot be combined with {given[1]}: one grammar per answer", given[1])
    if given and params.allowed_token_ids is not None:
        raise FieldError(given[0], "cannot be combined with allowed_token_ids", "allowed_token_ids")
    for name in ("regex", "ebnf", "tool_grammar", "grammar_after"):
        text = getattr(params, name)
        if text is not None:
            if not isinstance(text, str) or not text:
                raise FieldError(name, f"must be a string that is not empty, got {shorten(text)}")
            _require_length(name, len(text))
    if params.choice is not None:
        _require_list("choice", params.choice, MAX_GRAMMAR_CHOICES)
        if not params.choice:
            raise FieldError("choice", "must hold at least one string")
        for text in params.choice:
            if not isinstance(text, str) or not _is_utf8(text):
                raise FieldError("choice", f"must hold strings of whole characters, got {shorten(text)}")
        _require_length("choice", sum(map(len, params.choice)))
    if params.response_format is not None:
        _validate_response_format(params.response_format)


def _validate_response_format(value: object) -> None:
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise FieldError(
            "response_format", f"must have a type of text, json_object or json_schema, got {shorten(kind)}"
        )
    if unknown := value.keys() - ({"type", "json_schema"} if kind == "json_schema" else {"type"}):
        raise FieldError("response_format", f"of type {kind} must not have the field {shorten(min(unknown))}")
    if kind == "json_schema":
        _validate_json_schema(value.get("json_schema"))


def _validate_json_schema(named: object) -> None:
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise FieldError("response_format", 'must be like {"type": "json_schema", "json_schema": {"schema": {…}}}')
    for name, item in named.items():
        if name not in ("name", "description", "schema", "strict"):
            raise FieldError("response_format", f"must not have json_schema.{shorten(name)}")
        if name == "strict" and not isinstance(item, bool | None):
            raise FieldError("response_format", f"must have true or false as json_schema.strict, got {shorten(item)}")
    try:
        length = len(json.dumps(named["schema"]))
        try:
            msgspec.msgpack.encode(named["schema"])  # the engine process must be able to get it
        except OverflowError:
            named["schema"] = _with_integers_that_fit(named["schema"])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FieldError("response_format", f"must hold a schema of JSON values: {error}") from error
    _require_length("response_format", length)


def _with_integers_that_fit(value: Any) -> Any:
    """JSON with floats for the integers beyond 64 bits, such as JavaScript makes of bounds that it rounds.

    Raises OverflowError if no float is as large, RecursionError.
    """
    if isinstance(value, dict):
        return {key: _with_integers_that_fit(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_integers_that_fit(item) for item in value]
    return float(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


def _is_utf8(text: str) -> bool:
    """Whether no half of a surrogate pair is in it."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _require_length(name: str, length: int) -> None:
    if length > MAX_GRAMMAR_LENGTH:
        raise FieldError(name, f"may take at most {MAX_GRAMMAR_LENGTH} characters, got {length}")
