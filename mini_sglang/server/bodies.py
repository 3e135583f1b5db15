"""What the bodies of several APIs share: the fields of every job, and the sampling parameters.

Each API declares its bodies in its folder, with the types of `fields`; `chat` has what chat APIs share. The reader of
bodies refuses every field that a body does not declare.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mini_sglang.errors import FieldError, shorten
from mini_sglang.sampling_params import MAX_SALT_LENGTH, PRIORITIES, Json
from mini_sglang.server import fields

_EMPTY: tuple[Any, ...] = (None, "", [], {})


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class HistoryPart(Body):
    """A part of a conversation. Clients send all vendors' answers back, with fields unknown here: empty ones pass."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.keys() <= cls.model_fields.keys():
            return value
        return {name: item for name, item in value.items() if name in cls.model_fields or item not in _EMPTY}


class JobBody(Body):
    """The fields of every route that generates, without the sampling parameters."""

    stream: bool | None = None
    # Smaller ones run first under `--schedule priority`.
    priority: int = Field(default=0, ge=PRIORITIES.start, lt=PRIORITIES.stop)
    # Requests share cached prefixes only with equal salts.
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_LENGTH)] | None = None

    @property
    def field_names(self) -> Mapping[str, str]:
        """The body's name for each field that the engine calls otherwise."""
        return {}

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return 1

    @property
    def is_only_echo(self) -> bool:
        """Whether the client wants only the prompt. The answer leaves out the one token that the engine generates."""
        return False

    @abstractmethod
    def sampling_fields(self) -> Json:
        """The fields of SamplingParams that the body sets; None: not given. Raises FieldError."""


class SamplingBody(JobBody):
    """The sampling parameters, under the names of `SamplingParams`."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: fields.StopStrings | None = None
    stop_token_ids: fields.StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: fields.LogitBias | None = None
    allowed_token_ids: fields.TokenIds | None = None
    # The form of the answer: one of these, or response_format in the bodies that have it.
    regex: fields.GrammarText | None = None
    ebnf: fields.GrammarText | None = None
    choice: fields.GrammarChoices | None = None


SAMPLING_FIELDS = set(SamplingBody.model_fields) - set(JobBody.model_fields)


def schema_format(schema: Json | str, field: str, expected: str) -> Json:
    """A JSON schema, or its text, as `response_format`. Raises FieldError (`field` must `expected`) for other text."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise FieldError(field, f"must {expected}: {error}") from None
        if not isinstance(schema, dict):
            raise FieldError(field, f"must {expected}: it has to be an object, got {shorten(schema)}")
    return {"type": "json_schema", "json_schema": {"schema": schema}}
