"""The bodies of the server's own routes."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from mini_sglang.errors import FieldError
from mini_sglang.sampling_params import MAX_LOGPROBS, Json
from mini_sglang.server import chat, fields
from mini_sglang.server.bodies import SAMPLING_FIELDS, Body, SamplingBody

DEFAULT_GENERATE_TOKENS = 64  # /generate


class GenerateBody(SamplingBody):
    """POST /generate. `prompt` is a string or a list of token ids."""

    prompt: Any
    rep_penalty: float | None = Field(default=None, gt=0, le=100)  # another name of repetition_penalty
    response_format: Json | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None  # to abort it by

    @model_validator(mode="after")
    def _one_penalty(self) -> Self:
        if self.rep_penalty is not None and self.repetition_penalty is not None:
            raise FieldError("rep_penalty", "and repetition_penalty are two names of one field: give one")
        return self

    def sampling_fields(self) -> Json:
        return {
            **self.model_dump(include=SAMPLING_FIELDS),
            "max_tokens": self.max_tokens if "max_tokens" in self.model_fields_set else DEFAULT_GENERATE_TOKENS,
            "repetition_penalty": self.repetition_penalty if self.rep_penalty is None else self.rep_penalty,
            "logprobs": self.logprobs,
            "response_format": self.response_format,
        }


class TokenizeBody(chat.TemplateBody):
    """POST /tokenize: a prompt, or messages as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: chat.Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "or messages is required, and only one of them")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: fields.TokenIds
    skip_special_tokens: bool = False


class AbortBody(Body):
    """POST /abort: the `id` of an answer or stream; all its choices end."""

    request_id: str


class ProfileBody(Body):
    """POST /start_profile: with `num_steps` the trace ends by itself, else with /stop_profile."""

    num_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
