"""The parts that the bodies of several APIs share: strict types, the fields of every job, messages, tools and the
arguments of the chat template. Each API's bodies are in its folder; `SamplingParams.validate` checks ranges.

Types are strict ("5" is no integer, true is no number) and null means "not given". A field that an API has and this
server does not is accepted only with the value that switches it off; every other name is refused by the reader.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from mini_sglang.errors import FieldError, shorten
from mini_sglang.sampling_params import (
    MAX_GRAMMAR_CHOICES,
    MAX_GRAMMAR_LENGTH,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Json,
)

MAX_CHOICES = 128  # of `n`, as OpenAI
MAX_MESSAGES = 100_000  # and parts of one message
MAX_TOOLS = 128  # as OpenAI
MAX_TOKEN_IDS = 1_000_000  # of one list; models have smaller contexts and vocabularies
MAX_LABELS = 16  # of `metadata`, as OpenAI
MAX_TEMPLATE_BYTES = 1 << 16  # of `chat_template_kwargs`, as JSON
MAX_SALT_LENGTH = 256


def must_be_off(*allowed: JsonValue) -> BeforeValidator:
    """Accept a field that is not supported only with a value that asks for nothing."""

    def check(value: JsonValue) -> JsonValue:
        if any(type(value) is type(off) and value == off for off in (None, *allowed)):
            return None
        raise ValueError("is not supported by this server")

    return BeforeValidator(check)


def at_most(limit: int) -> BeforeValidator:
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


Off = Annotated[None, must_be_off()]
OffIfFalse = Annotated[None, must_be_off(False)]
OffIfEmpty = Annotated[None, must_be_off([])]
FAIL_FAST = Field(fail_fast=True)  # one wrong entry is enough, where pydantic would describe them all
StopStrings = Annotated[list[str], FAIL_FAST, at_most(MAX_STOP_STRINGS), BeforeValidator(_as_list)]
StopTokenIds = Annotated[list[int], FAIL_FAST, at_most(MAX_STOP_TOKEN_IDS)]
TokenIds = Annotated[list[int], FAIL_FAST, at_most(MAX_TOKEN_IDS)]
LogitBias = Annotated[dict[str, float], at_most(MAX_LOGIT_BIASES)]
Labels = Annotated[dict[str, str], at_most(MAX_LABELS)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
GrammarChoices = Annotated[list[str], FAIL_FAST, at_most(MAX_GRAMMAR_CHOICES)]
TemplateArguments = Annotated[dict[str, JsonValue], BeforeValidator(_check_template_size)]
Content = Annotated[str, BeforeValidator(_join_text_parts)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class JobBody(Body):
    """The fields of every route that generates, without the sampling parameters."""

    stream: bool | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)  # smaller runs first under `--schedule priority`
    # Requests share cached prefixes only with equal salts.
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_LENGTH)] | None = None

    @property
    def field_names(self) -> Mapping[str, str]:
        """The body's names of fields by the engine's, where they differ."""
        return {}

    @property
    def num_choices(self) -> int:
        """Answers per prompt."""
        return 1

    @property
    def is_only_echo(self) -> bool:
        """Whether only the prompt is asked for: one token is generated and left out."""
        return False

    @abstractmethod
    def sampling_fields(self) -> Json:
        """The fields of SamplingParams that the body asks for; None: not given. Raises FieldError."""


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
    stop: StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    # The form of the answer: one of these, or response_format in the bodies that have it.
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    choice: GrammarChoices | None = None


SAMPLING_FIELDS = set(SamplingBody.model_fields) - set(JobBody.model_fields)


def schema_format(schema: Json | str, field: str, expected: str) -> Json:
    """A JSON schema, or its text, as `response_format`. Raises FieldError for other text: `field` must `expected`."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise FieldError(field, f"must {expected}: {error}") from None
    return {"type": "json_schema", "json_schema": {"schema": schema}}


class CalledFunction(Body):
    name: str
    arguments: str | Json = ""  # JSON text, or the object itself

    def for_template(self) -> Json:
        """As chat templates expect it: with the arguments as an object, unless they are none."""
        arguments: Any = self.arguments or {}
        if isinstance(arguments, str):
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                arguments = msgspec.json.decode(arguments, type=Json)
        return {"name": self.name, "arguments": arguments}


class MessageCall(Body):
    """A tool call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # streams number calls, and some clients send the number back


class Message(Body):
    """One message of a conversation. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None  # only an assistant may have said nothing
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], FAIL_FAST, at_most(MAX_TOOLS)] | None = None  # of the assistant
    tool_call_id: str | None = None  # the call that a tool answers
    reasoning_content: str | None = None  # the assistant's; templates decide whether the model sees it again
    reasoning: str | None = None  # another name of reasoning_content
    # Clients send an earlier answer back with all its fields, those that held nothing included.
    refusal: Off = None
    audio: Off = None
    function_call: Off = None
    annotations: OffIfEmpty = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"must have content, which only the role assistant may leave out, not {self.role}")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"must not have tool_calls, which only the role assistant may have, not {self.role}")
        return self

    def for_template(self) -> Json:
        """The message as chat templates expect it."""
        message: Json = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self.content or ""
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id or "", "type": "function", "function": call.function.for_template()}
                for call in self.tool_calls
            ]
        return message


def join_runs(messages: Iterable[Message], roles: Container[str]) -> list[Message]:
    """The conversation in which messages that follow each other in one of these roles are one."""
    joined: list[Message] = []
    for role, group in itertools.groupby(messages, key=lambda message: message.role):
        run = list(group)
        joined += [_joined(run)] if role in roles else run
    return joined


def _joined(run: Sequence[Message]) -> Message:
    """Messages of one role as one. Made at once: pair by pair, each would copy all the text before it."""
    if len(run) == 1:
        return run[0]
    return Message(
        role=run[0].role,
        content="\n".join(message.content for message in run if message.content),
        tool_calls=[call for message in run for call in message.tool_calls or ()] or None,
        reasoning_content="\n".join(message.reasoning_content for message in run if message.reasoning_content) or None,
    )


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: Json | None = None  # a JSON schema; none: there are no parameters
    strict: bool | None = None  # calls are held to the schema by a grammar


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> Json:
        """The tool as chat templates expect it."""
        function: Json = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """A `tool_choice`: this function must be called."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], FAIL_FAST, at_most(MAX_TOOLS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Messages = Annotated[list[Message], Field(min_length=1), FAIL_FAST, at_most(MAX_MESSAGES)]


class TemplateBody(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    continue_final_message: bool = False
    chat_template_kwargs: TemplateArguments | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None  # None: auto, if there are tools
    parallel_tool_calls: bool | None = None  # False: one call at most
    reasoning_effort: ReasoningEffort | None = None  # an argument of the template

    @model_validator(mode="after")
    def _one_way_to_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError("continue_final_message", "cannot be combined with add_generation_prompt")
        for name in self.chat_template_kwargs or ():
            if name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
                raise FieldError("chat_template_kwargs", f"must not hold {name}")
        return self

    @model_validator(mode="after")
    def _chosen_tools_exist(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise FieldError("tools", f"must have different names, got {twice} twice")
        if self.tool_choice == "required" and not names:
            raise FieldError("tool_choice", "required needs tools to choose from")
        if self.named_tool is not None and self.named_tool not in names:
            raise FieldError("tool_choice", f"names {shorten(self.named_tool)}, which is not among the tools")
        return self

    @property
    def named_tool(self) -> str | None:
        """The one function that must be called, if the body names one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt tells the model of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the opening of an assistant message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def template_arguments(self) -> dict[str, JsonValue]:
        """The template's arguments besides messages and tools."""
        arguments: dict[str, JsonValue] = {}
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            arguments["enable_thinking"] = False
        return {**arguments, **(self.chat_template_kwargs or {})}


class ConversationBody(SamplingBody):
    """The body of a chat API, which turns itself into messages and the template's arguments."""

    @abstractmethod
    def chat_messages(self) -> list[Message]:
        """The conversation."""

    @abstractmethod
    def template(self) -> TemplateBody:
        """How the messages become a prompt. Raises ValidationError if tools and choice do not fit."""
