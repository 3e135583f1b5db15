"""The common form of a conversation in every chat API: messages, tools and the arguments of the chat template.

The bodies of /v1/responses and /v1/messages turn themselves into these; /v1/chat/completions takes them as they are.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Container, Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from mini_sglang.errors import FieldError, shorten
from mini_sglang.grammar.compiler import check_parameters
from mini_sglang.sampling_params import Json
from mini_sglang.server import fields
from mini_sglang.server.bodies import Body, HistoryPart, SamplingBody
from mini_sglang.text.conversation import call_arguments


class CalledFunction(HistoryPart):
    name: str
    arguments: str | Json = ""  # JSON text, or the object itself
    parsed_arguments: fields.Ignored = None

    def for_template(self) -> Json:
        """The function as chat templates expect it: with an object as arguments, if the text is one."""
        return {"name": self.name, "arguments": call_arguments(self.arguments)}


def _call_of_function(call: Any) -> Any:
    """The call of a custom tool, which takes a text, as that of a function; other calls as they are."""
    if not (isinstance(call, dict) and call.get("type") == "custom" and isinstance(call.get("custom"), dict)):
        return call
    custom = dict(call["custom"])
    arguments = {"input": custom.pop("input", "")}
    rest = {name: value for name, value in call.items() if name not in ("type", "custom")}
    return {**rest, "function": {**custom, "arguments": arguments}}


class MessageCall(HistoryPart):
    """A tool call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # streams number calls, and some clients send the number back
    extra_content: fields.Ignored = None
    provider_specific_fields: fields.Ignored = None


MessageCalls = Annotated[
    list[Annotated[MessageCall, BeforeValidator(_call_of_function)]], fields.FAIL_FAST, fields.at_most(fields.MAX_TOOLS)
]


class Message(HistoryPart):
    """One message of a conversation. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: fields.Content | None = None  # only an assistant may have said nothing
    name: str | None = None
    tool_calls: MessageCalls | None = None  # of the assistant
    tool_call_id: str | None = None  # the call that a tool answers
    reasoning_content: str | None = None  # the assistant's; templates decide whether the model sees it again
    reasoning: str | None = None  # another name of reasoning_content
    refusal: str | None = None  # what the assistant said in place of content
    # Clients send an earlier answer back with all its fields.
    annotations: fields.Ignored = None
    cache_control: fields.Ignored = None
    parsed: fields.Ignored = None
    provider_specific_fields: fields.Ignored = None
    reasoning_details: fields.Ignored = None
    thinking_blocks: fields.Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_bookkeeping(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("role") not in ("system", "developer"):
            return value
        content = value.get("content")
        rest = fields.without_bookkeeping(content)
        return value if rest is content else {**value, "content": rest or ""}

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
        message["content"] = self.content or self.refusal or ""
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
    """Join messages that follow each other in the same one of these roles."""
    joined: list[Message] = []
    for role, group in itertools.groupby(messages, key=lambda message: message.role):
        run = list(group)
        joined += [_joined(run)] if role in roles else run
    return joined


def _joined(run: Sequence[Message]) -> Message:
    """Join messages of one role, all at once: pair by pair, each join would copy all the text before it."""
    if len(run) == 1:
        return run[0]
    return Message(
        role=run[0].role,
        content="\n".join(message.content for message in run if message.content),
        tool_calls=[call for message in run for call in message.tool_calls or ()] or None,
        reasoning_content="\n".join(message.reasoning_content for message in run if message.reasoning_content) or None,
    )


def _describes_object(schema: Json) -> Json:
    check_parameters(schema)
    return schema


ParameterSchema = Annotated[Json, AfterValidator(_describes_object)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: ParameterSchema | None = None  # a JSON schema; none: there are no parameters
    strict: bool | None = None  # calls are held to the schema by a grammar


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function
    cache_control: fields.Ignored = None

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


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, fields.ONLY_FUNCTION_CHOICES]
Tools = Annotated[
    list[Tool], fields.FAIL_FAST, fields.at_most(fields.MAX_TOOLS), fields.only_functions("function", None)
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class ThinkingSwitch(Body):
    """`thinking`, as several vendors of open models have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None  # not enforced: max_tokens bounds reasoning and text together
    clear_thinking: fields.Ignored = None


class ReasoningSwitch(Body):
    """`reasoning`, as OpenRouter has it."""

    effort: ReasoningEffort | None = None
    enabled: bool | None = None
    max_tokens: int | None = None  # not enforced
    exclude: fields.Ignored = None  # reasoning has a field of its own in any case
    summary: fields.Ignored = None


Messages = Annotated[list[Message], Field(min_length=1), fields.FAIL_FAST, fields.at_most(fields.MAX_MESSAGES)]


class TemplateBody(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    continue_final_message: bool = False
    chat_template_kwargs: fields.TemplateArguments | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None  # None: auto, if there are tools
    parallel_tool_calls: bool | None = None  # False: one call at most
    reasoning_effort: ReasoningEffort | None = None  # an argument of the template
    verbosity: Verbosity | None = None  # so is this
    # Other names for whether, and how much, the model thinks.
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    reasoning: ReasoningSwitch | None = None

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
        """The arguments of the template other than messages and tools."""
        reasoning = self.reasoning or ReasoningSwitch()
        effort = self.reasoning_effort or reasoning.effort
        switches = (
            self.enable_thinking,
            None if self.thinking is None else self.thinking.type != "disabled",
            reasoning.enabled,
            False if effort == "none" else None,
        )
        arguments: dict[str, JsonValue] = {
            "reasoning_effort": effort,
            "verbosity": self.verbosity,
            "enable_thinking": next((switch for switch in switches if switch is not None), None),
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        return {**given, **(self.chat_template_kwargs or {})}


class ConversationBody(SamplingBody):
    """The body of a chat API, which turns itself into messages and the template's arguments."""

    @property
    def system_field(self) -> str:
        """The body's name for what the first system message comes from."""
        return "messages"

    @abstractmethod
    def chat_messages(self) -> list[Message]:
        """The conversation."""

    @abstractmethod
    def template(self) -> TemplateBody:
        """How the messages become a prompt. Raises ValidationError if tools and choice do not fit."""
