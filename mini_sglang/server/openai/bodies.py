"""The bodies of OpenAI's /v1/chat/completions and /v1/completions, to which this server adds its sampling fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from mini_sglang.errors import FieldError
from mini_sglang.sampling_params import MAX_LOGPROBS, Json
from mini_sglang.server import chat, fields
from mini_sglang.server.bodies import SAMPLING_FIELDS, Body, SamplingBody, schema_format

DEFAULT_COMPLETION_TOKENS = 16  # /v1/completions, as OpenAI


class StructuredOutputs(Body):
    """`structured_outputs`, vLLM's name for the form that an answer must have."""

    json_schema: Json | fields.GrammarText | None = Field(default=None, alias="json")  # or as JSON text
    json_object: bool | None = None
    regex: fields.GrammarText | None = None
    grammar: fields.GrammarText | None = None
    choice: fields.GrammarChoices | None = None

    def sampling_fields(self) -> Json:
        """The same as fields of SamplingParams. Raises FieldError."""
        fields: Json = {"regex": self.regex, "ebnf": self.grammar, "choice": self.choice}
        if self.json_object:
            fields["response_format"] = {"type": "json_object"}
        if self.json_schema is not None:
            expected = "hold a schema, or its text, as json"
            fields["response_format"] = schema_format(self.json_schema, "structured_outputs", expected)
            if self.json_object:
                raise FieldError("structured_outputs", "must not hold both json and json_object")
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def field_names(self) -> Mapping[str, str]:
        """The body's names for the fields that `sampling_fields` sets."""
        given = {"regex": self.regex, "choice": self.choice}
        names = {name: f"structured_outputs.{name}" for name, value in given.items() if value is not None}
        if self.grammar is not None:
            names["ebnf"] = "structured_outputs.grammar"
        if self.json_schema is not None or self.json_object:
            names["response_format"] = f"structured_outputs.{'json_object' if self.json_object else 'json'}"
        return names


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # the usage so far in every chunk
    include_obfuscation: fields.OffIfFalse = None


class OpenAIBody(SamplingBody):
    """The fields that chats and plain completions share."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=fields.MAX_CHOICES)
    response_format: Json | None = None
    structured_outputs: StructuredOutputs | None = None
    stream_options: StreamOptions | None = None
    # Labels for OpenAI's bookkeeping, which change no answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: fields.Labels | None = None
    prompt_cache_retention: fields.Ignored = None
    prompt_cache_options: fields.Ignored = None
    service_tier: str | None = None
    store: fields.OffIfFalse = None
    # SGLang's router writes these into every body.
    no_stop_trim: bool | None = None  # another name of include_stop_str_in_output
    return_hidden_states: fields.OffIfFalse = None

    @model_validator(mode="after")
    def _one_name_for_kept_stop_strings(self) -> Self:
        if self.no_stop_trim is not None and self.include_stop_str_in_output is not None:
            raise FieldError("no_stop_trim", "and include_stop_str_in_output are two names of one field: give one")
        return self

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is only allowed with stream")
        return self

    @property
    def field_names(self) -> Mapping[str, str]:
        return {} if self.structured_outputs is None else self.structured_outputs.field_names

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def sampling_fields(self) -> Json:
        fields: Json = self.model_dump(include=SAMPLING_FIELDS, exclude_none=True)
        if self.no_stop_trim is not None:
            fields["include_stop_str_in_output"] = self.no_stop_trim
        if self.response_format is not None:
            fields["response_format"] = self.response_format
        if self.structured_outputs is not None:
            grammar = self.structured_outputs.sampling_fields()
            if both := fields.keys() & grammar.keys():
                raise FieldError("structured_outputs", f"cannot be combined with {min(both)}")
            fields |= grammar
        return fields

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries its choice's usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatBody(OpenAIBody, chat.ConversationBody, chat.TemplateBody):
    """POST /v1/chat/completions."""

    messages: chat.Messages
    tools: Annotated[chat.Tools, fields.at_most(fields.MAX_CHAT_TOOLS)] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)  # OpenAI's newer word for max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    # Not supported.
    functions: fields.OffIfEmpty = None
    function_call: Annotated[None, fields.must_be_off("none", "auto")] = None
    separate_reasoning: Annotated[None, fields.must_be_off(True)] = None
    stream_reasoning: Annotated[None, fields.must_be_off(True)] = None
    include_reasoning: Annotated[None, fields.must_be_off(True)] = None
    modalities: Annotated[None, fields.must_be_off(["text"])] = None
    audio: fields.Off = None
    prediction: fields.Off = None
    web_search_options: fields.Off = None
    moderation: fields.Off = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "is only allowed with logprobs")
        return self

    def chat_messages(self) -> list[chat.Message]:
        return self.messages

    def template(self) -> chat.TemplateBody:
        return self

    @property
    def field_names(self) -> Mapping[str, str]:
        names = {"prompt": "messages", **super().field_names}
        return names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}

    def sampling_fields(self) -> Json:
        return {
            **super().sampling_fields(),
            "max_tokens": self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }


class CompletionBody(OpenAIBody):
    """POST /v1/completions. `prompt` is a string, a list of strings, token ids, or a list of lists of token ids."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    echo: bool | None = None  # the answer begins with the prompt; with logprobs, its log-probabilities too
    # Not supported.
    suffix: Annotated[None, fields.must_be_off("")] = None

    @model_validator(mode="after")
    def _no_best_of(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise FieldError("best_of", f"is not supported unless it equals n, got {self.best_of}")
        return self

    @property
    def is_only_echo(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def sampling_fields(self) -> Json:
        limit = self.max_tokens if "max_tokens" in self.model_fields_set else DEFAULT_COMPLETION_TOKENS
        return {
            **super().sampling_fields(),
            "max_tokens": 1 if self.is_only_echo else limit,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.logprobs if self.echo else None,
        }
