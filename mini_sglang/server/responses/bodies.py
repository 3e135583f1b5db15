"""The body of OpenAI's /v1/responses, to which this server adds its sampling fields.

The server keeps nothing between requests, so the body refuses a field that needs an earlier answer or keeps this one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mini_sglang.sampling_params import MAX_LOGPROBS, Json
from mini_sglang.server import chat, fields
from mini_sglang.server.bodies import SAMPLING_FIELDS, Body
from mini_sglang.server.responses.items import InputItems, chat_message_of

_MAX_DEPTH = 100  # of objects that an answer repeats


def _not_deep(value: Any) -> Any:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [*itertools.chain.from_iterable(inner)]
    if level:
        raise ValueError(f"must be nested at most {_MAX_DEPTH} deep")
    return value


RepeatedObject = Annotated[Json, BeforeValidator(_not_deep)]

Includable = Literal[
    "message.output_text.logprobs",
    # No answer has the others.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
]


class FunctionTool(Body):
    """A function that the client runs."""

    type: Literal["function"]
    name: chat.ToolName
    description: str | None = None
    parameters: Annotated[chat.ParameterSchema, BeforeValidator(_not_deep)] | None = None
    strict: bool | None = None
    defer_loading: fields.Ignored = None  # the model knows all tools from the start

    def for_chat(self) -> chat.Tool:
        function = self.model_dump(exclude={"type", "defer_loading"})
        return chat.Tool(type="function", function=chat.Function(**function))


class NamedFunction(Body):
    """A `tool_choice`: this function must be called."""

    type: Literal["function"]
    name: str

    def for_chat(self) -> chat.NamedTool:
        return chat.NamedTool(type="function", function=chat.FunctionName(name=self.name))


class PlainFormat(Body):
    type: Literal["text", "json_object"]

    def for_chat(self) -> Json:
        return {"type": self.type}


class SchemaFormat(Body):
    type: Literal["json_schema"]
    name: str
    description: str | None = None
    json_schema: RepeatedObject = Field(alias="schema")
    strict: bool | None = None

    def for_chat(self) -> Json:
        """As `response_format` of a chat."""
        return {"type": self.type, "json_schema": self.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}


class TextOptions(Body):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: chat.Verbosity | None = None


class ReasoningOptions(Body):
    effort: chat.ReasoningEffort | None = None
    # Reasoning comes whole, and the template decides what it repeats of earlier answers.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: fields.Ignored = None
    context: fields.Ignored = None
    mode: Annotated[None, fields.must_be_off("standard")] = None


class ResponseStreamOptions(Body):
    include_obfuscation: fields.OffIfFalse = None


class ResponsesBody(chat.ConversationBody):
    """POST /v1/responses."""

    model: str | None = None
    input: InputItems
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    max_tokens: fields.Off = None  # the other APIs' name of it
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include: Annotated[list[Includable], fields.FAIL_FAST, fields.at_most(16)] | None = None
    tools: (
        Annotated[
            list[FunctionTool],
            fields.FAIL_FAST,
            fields.at_most(fields.MAX_TOOLS),
            fields.only_functions("function", None),
        ]
        | None
    ) = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedFunction, fields.ONLY_FUNCTION_CHOICES] | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: fields.TemplateArguments | None = None  # as for a chat
    # Labels for OpenAI's bookkeeping, which change no answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: fields.Labels | None = None
    # For its caches, machines and tools: these change no answer either.
    access_programs: fields.Ignored = None
    background_options: fields.Ignored = None
    client_metadata: fields.Ignored = None
    context_management: fields.Ignored = None  # the conversation is taken as it is sent
    image: fields.Ignored = None
    max_tool_calls: fields.Ignored = None  # of the vendor's own tools
    prompt_cache_options: fields.Ignored = None
    service_tier: fields.Ignored = None
    # Not supported.
    store: fields.OffIfFalse = None
    previous_response_id: fields.Off = None
    conversation: fields.Off = None
    background: fields.OffIfFalse = None
    prompt: fields.Off = None
    truncation: Annotated[None, fields.must_be_off("disabled")] = None
    moderation: fields.Off = None

    @property
    def field_names(self) -> Mapping[str, str]:
        return {
            "prompt": "input",
            "messages": "input",
            "response_format": "text.format",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
        }

    @property
    def system_field(self) -> str:
        return "messages" if self.instructions is None else "instructions"

    def chat_messages(self) -> list[chat.Message]:
        """The conversation of a chat: the instructions come first, and all items of one answer are one message."""
        instructions = [] if self.instructions is None else [chat.Message(role="system", content=self.instructions)]
        return instructions + chat.join_runs(map(chat_message_of, self.input), ("assistant",))

    def template(self) -> chat.TemplateBody:
        choice = self.tool_choice
        return chat.TemplateBody(
            chat_template_kwargs=self.chat_template_kwargs,
            tools=None if not self.tools else [tool.for_chat() for tool in self.tools],
            tool_choice=choice.for_chat() if isinstance(choice, NamedFunction) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            verbosity=None if self.text is None else self.text.verbosity,
        )

    def sampling_fields(self) -> Json:
        wants_logprobs = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        wanted = None if self.text is None else self.text.format
        return {
            **self.model_dump(include=SAMPLING_FIELDS),
            "max_tokens": self.max_output_tokens,
            "logprobs": (self.top_logprobs or 0) if wants_logprobs else None,
            "response_format": None if wanted is None else wanted.for_chat(),
        }
