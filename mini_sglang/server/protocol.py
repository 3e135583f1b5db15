"""The bodies that clients send: which fields there are and of which type. `SamplingParams.validate` knows the ranges.

Types are strict ("5" is no integer, true is no number) and null means "not given". A field that OpenAI's API has and
this server does not is accepted only with the value that switches it off; every other name is refused by the reader.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from mini_sglang.request import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    shorten,
)

MAX_CHOICES = 128  # of `n`, as OpenAI
MAX_MESSAGES = 100_000  # and parts of one message
MAX_TOKEN_IDS = 1_000_000  # of one list; models have smaller contexts and vocabularies
MAX_LABELS = 16  # of `metadata`, as OpenAI
MAX_TEMPLATE_BYTES = 1 << 16  # of `chat_template_kwargs`, as JSON
MAX_SALT_LENGTH = 256
DEFAULT_COMPLETION_TOKENS = 16  # /v1/completions, as OpenAI
DEFAULT_GENERATE_TOKENS = 64  # /generate


def _must_be_off(*allowed: JsonValue) -> BeforeValidator:
    """Accept a field that is not supported only with a value that asks for nothing."""

    def check(value: JsonValue) -> JsonValue:
        if any(type(value) is type(off) and value == off for off in (None, *allowed)):
            return None
        raise ValueError("is not supported by this server")

    return BeforeValidator(check)


def _at_most(limit: int) -> BeforeValidator:
    """Refuse a longer list or object before anything looks at its entries."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > limit:
            raise ValueError(f"may hold at most {limit} entries, got {len(value)}")
        return value

    return BeforeValidator(check)


def _check_template_size(value: Any) -> Any:
    size = len(msgspec.json.encode(value))
    if size > MAX_TEMPLATE_BYTES:
        raise ValueError(f"may take at most {MAX_TEMPLATE_BYTES} bytes as JSON, got {size}")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _join_text_parts(content: Any) -> Any:
    """Message content given as a list of text parts, as the one string that the parts make without separators."""
    if not isinstance(content, list):
        return content
    if len(content) > MAX_MESSAGES:
        raise ValueError(f"may hold at most {MAX_MESSAGES} parts, got {len(content)}")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(
                f'holds a part that is not {{"type": "text", "text": "…"}} at {index}, got type {shorten(kind)}'
            )
        texts.append(part["text"])
    return "".join(texts)


Off = Annotated[None, _must_be_off()]
OffIfFalse = Annotated[None, _must_be_off(False)]
OffIfEmpty = Annotated[None, _must_be_off([])]
FAIL_FAST = Field(fail_fast=True)  # one wrong entry is enough, where pydantic would describe them all
StopStrings = Annotated[list[str], FAIL_FAST, _at_most(MAX_STOP_STRINGS), BeforeValidator(_as_list)]
StopTokenIds = Annotated[list[int], FAIL_FAST, _at_most(MAX_STOP_TOKEN_IDS)]
TokenIds = Annotated[list[int], FAIL_FAST, _at_most(MAX_TOKEN_IDS)]
LogitBias = Annotated[dict[str, float], _at_most(MAX_LOGIT_BIASES)]
Labels = Annotated[dict[str, str], _at_most(MAX_LABELS)]
TemplateArguments = Annotated[dict[str, JsonValue], BeforeValidator(_check_template_size)]
Content = Annotated[str, BeforeValidator(_join_text_parts)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class SamplingBody(Body):
    """What every route that generates takes. Names are those of `SamplingParams`."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None

    stream: bool | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)  # smaller runs first under `--schedule priority`
    # Requests share cached prefixes only with equal salts.
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_LENGTH)] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: OffIfFalse = None


class OpenAIBody(SamplingBody):
    """What chat and plain completions have in common."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None
    # Labels for OpenAI's bookkeeping, which change no answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Labels | None = None
    store: OffIfFalse = None
    service_tier: Annotated[None, _must_be_off("auto", "default")] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Message(Body):
    """One message of a conversation. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    # Clients send an earlier answer back with all its fields, those that held nothing included.
    refusal: Off = None
    reasoning_content: Off = None
    audio: Off = None
    function_call: Off = None
    tool_calls: OffIfEmpty = None
    annotations: OffIfEmpty = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


Messages = Annotated[list[Message], Field(min_length=1), FAIL_FAST, _at_most(MAX_MESSAGES)]


class TemplateBody(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    continue_final_message: bool = False
    chat_template_kwargs: TemplateArguments | None = None

    @model_validator(mode="after")
    def _one_way_to_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message cannot be combined with add_generation_prompt")
        for name in self.template_arguments:
            if name in ("messages", *TemplateBody.model_fields):
                raise ValueError(f"chat_template_kwargs must not hold {name}")
        return self

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the opening of an assistant message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def template_arguments(self) -> dict[str, JsonValue]:
        return self.chat_template_kwargs or {}


class ChatBody(OpenAIBody, TemplateBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1)  # OpenAI's newer word for max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    # Not supported.
    tools: OffIfEmpty = None
    tool_choice: Annotated[None, _must_be_off("none", "auto")] = None
    parallel_tool_calls: Annotated[None, _must_be_off(True, False)] = None
    functions: OffIfEmpty = None
    function_call: Annotated[None, _must_be_off("none", "auto")] = None
    response_format: Annotated[None, _must_be_off({"type": "text"})] = None
    reasoning_effort: Off = None
    verbosity: Off = None
    modalities: Annotated[None, _must_be_off(["text"])] = None
    audio: Off = None
    prediction: Off = None
    web_search_options: Off = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs")
        return self

    def sampling_params(self) -> SamplingParams:
        """Raises ValueError, naming the field, if a value is out of range."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return to_sampling_params(self, max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class CompletionBody(OpenAIBody):
    """POST /v1/completions. `prompt` is a string, a list of strings, token ids, or a list of lists of token ids."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    # Not supported.
    echo: OffIfFalse = None
    suffix: Annotated[None, _must_be_off("")] = None

    @model_validator(mode="after")
    def _no_best_of(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise ValueError(f"best_of is not supported unless it equals n, got {self.best_of}")
        return self

    def sampling_params(self) -> SamplingParams:
        """Raises ValueError, naming the field, if a value is out of range."""
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return to_sampling_params(self, max_tokens=limit, logprobs=self.logprobs)


class GenerateBody(SamplingBody):
    """POST /generate. `prompt` is a string or a list of token ids."""

    prompt: Any
    rep_penalty: float | None = Field(default=None, gt=0, le=100)  # another name of repetition_penalty
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None  # to abort it by

    @model_validator(mode="after")
    def _one_penalty(self) -> Self:
        if self.rep_penalty is not None and self.repetition_penalty is not None:
            raise ValueError("rep_penalty and repetition_penalty are two names of one field: give one")
        return self

    def sampling_params(self) -> SamplingParams:
        """Raises ValueError, naming the field, if a value is out of range."""
        limit = DEFAULT_GENERATE_TOKENS if self.max_tokens is None else self.max_tokens
        body = self if self.rep_penalty is None else self.model_copy(update={"repetition_penalty": self.rep_penalty})
        return to_sampling_params(body, max_tokens=limit, logprobs=self.logprobs)


class TokenizeBody(TemplateBody):
    """POST /tokenize: a prompt, or messages as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages is required, and only one of them")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False


class AbortBody(Body):
    """POST /abort: the `id` of an answer or stream; all its choices end."""

    request_id: str


ROUTE_BODIES = (ChatBody, CompletionBody, GenerateBody, TokenizeBody, DetokenizeBody, AbortBody)

_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "allowed_token_ids",
)


def to_sampling_params(body: SamplingBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The sampling parameters that a body asks for; what it leaves out keeps the engine's default.

    Raises ValueError, naming the field, if a value is out of range.
    """
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    bias = _parse_logit_bias(body.logit_bias or {})
    params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, logit_bias=bias, **given)
    params.validate()
    return params


def _parse_logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings; these must be token ids."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"logit_bias must map token ids to numbers, got the key {shorten(key, 20)}")
    return {int(key): value for key, value in bias.items()}


def parse_prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a completions request, in order. Raises ValueError, naming `prompt`."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"prompt must be a string or a list, got {type(value).__name__}")
    if not value:
        raise ValueError("prompt must not be an empty list")
    if isinstance(value[0], (str, list)):
        return [parse_prompt(item) for item in value]
    return [parse_prompt(value)]


def parse_prompt(value: Any) -> str | list[int]:
    """One prompt: text or token ids. Raises ValueError, naming `prompt`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"prompt must be a string or a list of token ids, got {type(value).__name__}")
    if len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"prompt may hold at most {MAX_TOKEN_IDS} token ids, got {len(value)}")
    for item in value:
        if type(item) is not int:
            raise ValueError(f"prompt must hold token ids only, got {shorten(item)} among them")
    return value
