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

_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "text")


def _plain_parts(content: Any) -> Any:
    """Turn a message's parts, whose types have other names here, into the parts of a chat's message."""
    if not isinstance(content, list) or len(content) > fields.MAX_MESSAGES:
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        else part
        for part in content
    ]


def _typed_items(value: Any) -> Any:
    """Give every item its type, which messages may leave out. A string is a message of the user."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or len(value) > fields.MAX_MESSAGES:
        return value
    return [{"type": "message", **item} if isinstance(item, dict) else item for item in value]


Parts = Annotated[fields.Content, BeforeValidator(_plain_parts)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(Body):
    """A message of the conversation. A message of an earlier answer may keep all fields that it had there."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class InputReasoning(Body):
    """Reasoning of an earlier answer; the chat template decides whether the model sees it again."""

    type: Literal["reasoning"]
    content: Parts | None = None
    summary: list[Json] | None = None
    encrypted_content: fields.Off = None
    id: str | None = None
    status: Status | None = None


class InputCall(Body):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    # The client's own dump of an earlier answer has these.
    async_: fields.Off = None
    caller: fields.Off = None
    namespace: fields.Off = None


class InputCallOutput(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: Status | None = None


InputItem = Annotated[InputMessage | InputReasoning | InputCall | InputCallOutput, Field(discriminator="type")]
InputItems = Annotated[
    list[InputItem],
    Field(min_length=1),
    fields.FAIL_FAST,
    fields.at_most(fields.MAX_MESSAGES),
    BeforeValidator(_typed_items, json_schema_input_type=str | list[InputItem]),
]
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]  # no answer has the latter


class FunctionTool(Body):
    """A function that the client runs."""

    type: Literal["function"]
    name: chat.ToolName
    description: str | None = None
    parameters: Annotated[chat.ParameterSchema, BeforeValidator(_not_deep)] | None = None
    strict: bool | None = None

    def for_chat(self) -> chat.Tool:
        return chat.Tool(type="function", function=chat.Function(**self.model_dump(exclude={"type"})))


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
    verbosity: Annotated[None, fields.must_be_off("medium")] = None


class ReasoningOptions(Body):
    effort: chat.ReasoningEffort | None = None
    summary: Annotated[None, fields.must_be_off("auto")] = None
    generate_summary: fields.Off = None


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
    tools: Annotated[list[FunctionTool], fields.FAIL_FAST, fields.at_most(fields.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: fields.TemplateArguments | None = None  # as for a chat
    # Labels for OpenAI's bookkeeping, which change no answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    metadata: fields.Labels | None = None
    service_tier: Annotated[None, fields.must_be_off("auto", "default")] = None
    # Not supported.
    store: fields.OffIfFalse = None
    previous_response_id: fields.Off = None
    conversation: fields.Off = None
    background: fields.OffIfFalse = None
    prompt: fields.Off = None
    truncation: Annotated[None, fields.must_be_off("disabled")] = None
    max_tool_calls: fields.Off = None
    context_management: fields.Off = None
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

    def chat_messages(self) -> list[chat.Message]:
        """The conversation of a chat: the instructions come first, and all items of one answer are one message."""
        instructions = [] if self.instructions is None else [chat.Message(role="system", content=self.instructions)]
        return instructions + chat.join_runs(map(_chat_message_of, self.input), ("assistant",))

    def template(self) -> chat.TemplateBody:
        choice = self.tool_choice
        return chat.TemplateBody(
            chat_template_kwargs=self.chat_template_kwargs,
            tools=None if not self.tools else [tool.for_chat() for tool in self.tools],
            tool_choice=choice.for_chat() if isinstance(choice, NamedFunction) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
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


def _chat_message_of(item: InputMessage | InputReasoning | InputCall | InputCallOutput) -> chat.Message:
    match item:
        case InputMessage():
            return chat.Message(role=item.role, content=item.content)
        case InputReasoning():
            return chat.Message(role="assistant", reasoning_content=item.content)
        case InputCall():
            call = chat.MessageCall(
                id=item.call_id, function=chat.CalledFunction(name=item.name, arguments=item.arguments)
            )
            return chat.Message(role="assistant", tool_calls=[call])
        case InputCallOutput():
            return chat.Message(role="tool", content=item.output, tool_call_id=item.call_id)
