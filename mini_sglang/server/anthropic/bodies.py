"""The bodies of Anthropic's API: /v1/messages and /v1/messages/count_tokens, with this server's sampling fields.

The bodies turn themselves into the messages, tools and `SamplingParams` of a chat. They refuse a field of Anthropic's
that this server does not support, unless its value switches it off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mini_sglang.errors import FieldError
from mini_sglang.sampling_params import Json
from mini_sglang.server import chat, fields
from mini_sglang.server.anthropic.history import ToolUseBlock, Turns, chat_messages_of
from mini_sglang.server.bodies import SAMPLING_FIELDS, Body


def _called_directly(callers: list[str]) -> list[str]:
    if "direct" not in callers:
        raise ValueError('must hold "direct": this server runs no code that could call tools')
    return callers


class ToolDefinition(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: chat.ToolName
    description: str | None = None
    input_schema: chat.ParameterSchema
    strict: bool | None = None
    input_examples: list[Json] | None = None  # the model sees them with the description
    # The model knows all tools from the start, and calls them itself.
    allowed_callers: Annotated[list[str], AfterValidator(_called_directly)] | None = None
    defer_loading: fields.Ignored = None
    eager_input_streaming: fields.Ignored = None
    cache_control: fields.Ignored = None

    def for_chat(self) -> chat.Tool:
        description = self.description
        if self.input_examples:
            examples = msgspec.json.encode(self.input_examples).decode()
            description = f"{description or ''}\nExamples of input: {examples}".lstrip()
        function = chat.Function(
            name=self.name, description=description, parameters=self.input_schema, strict=self.strict
        )
        return chat.Tool(type="function", function=function)


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # with type tool
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> Literal["none", "auto", "required"] | chat.NamedTool:
        match self.type:
            case "tool":
                return chat.NamedTool(type="function", function=chat.FunctionName(name=self.name or ""))
            case "any":
                return "required"
            case choice:
                return choice


class Thinking(Body):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=1)  # not enforced: max_tokens bounds all that is generated
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: Json = Field(alias="schema")

    def for_chat(self) -> Json:
        return {"type": self.type, "json_schema": {"schema": self.json_schema}}


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: chat.ReasoningEffort | None = None
    task_budget: fields.Ignored = None


class PromptBody(chat.ConversationBody):
    """The fields of both routes, so that what can be sent can be counted."""

    model: str | None = None
    messages: Turns
    system: Annotated[fields.Content | None, BeforeValidator(fields.without_bookkeeping)] = None
    tools: (
        Annotated[
            list[ToolDefinition],
            fields.FAIL_FAST,
            fields.at_most(fields.MAX_TOOLS),
            fields.only_functions("custom", None),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    stop_sequences: fields.StopStrings | None = None
    stop: fields.Off = None  # the other APIs' name of stop_sequences
    chat_template_kwargs: fields.TemplateArguments | None = None  # as for a chat
    # For Anthropic's books, caches and machines: these change no answer.
    metadata: Json | None = None
    anthropic_beta: fields.Ignored = None
    anthropic_version: fields.Ignored = None
    betas: fields.Ignored = None
    billing_policy: fields.Ignored = None
    cache_control: fields.Ignored = None
    context_management: fields.Ignored = None  # the conversation is taken as it is sent
    diagnostics: fields.Ignored = None
    fallback_credit_token: fields.Ignored = None
    fallbacks: fields.Ignored = None
    service_tier: fields.Ignored = None
    speed: fields.Ignored = None
    user_profile_id: fields.Ignored = None
    workspace_id: fields.Ignored = None
    # Not supported.
    compaction: fields.Off = None
    container: fields.Off = None
    inference_geo: fields.Off = None
    mcp_servers: fields.OffIfEmpty = None
    thread: fields.Off = None

    @model_validator(mode="after")
    def _leaves_room_for_the_answer(self) -> Self:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and self.max_tokens is not None and budget >= self.max_tokens:
            raise FieldError("thinking.budget_tokens", f"must be less than max_tokens, got {budget}", "max_tokens")
        return self

    @property
    def field_names(self) -> Mapping[str, str]:
        return {"prompt": "messages", "response_format": "output_config.format", "stop": "stop_sequences"}

    @property
    def system_field(self) -> str:
        return "messages" if self.system is None else "system"

    @property
    def omits_thinking(self) -> bool:
        """Whether the answer is to leave out the text of reasoning."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def chat_messages(self) -> list[chat.Message]:
        """The conversation as a chat has it: the system prompt first."""
        system = [] if self.system is None else [chat.Message(role="system", content=self.system)]
        return chat.join_runs([*system, *chat_messages_of(self.messages)], ("system", "user", "assistant"))

    def template(self) -> chat.TemplateBody:
        """How the messages become a prompt. If the assistant has the last message, the answer continues it.

        Raises ValidationError if tools and choice do not fit.
        """
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        last = self.messages[-1]
        choice = self.tool_choice
        if choice is not None and choice.type == "any" and not self.tools:
            raise FieldError("tool_choice", "any needs tools to choose from")
        return chat.TemplateBody(
            continue_final_message=last.role == "assistant" and not any(last.blocks(ToolUseBlock)),
            chat_template_kwargs={"enable_thinking": thinks, **(self.chat_template_kwargs or {})},
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
            tools=None if not self.tools else [tool.for_chat() for tool in self.tools],
            tool_choice=None if choice is None else choice.for_chat(),
            parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        )

    def sampling_fields(self) -> Json:
        wanted = self.output_format if self.output_config is None else self.output_config.format or self.output_format
        return {
            **self.model_dump(include=SAMPLING_FIELDS),
            "stop": self.stop_sequences,
            "response_format": None if wanted is None else wanted.for_chat(),
        }


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)


class CountTokensBody(PromptBody):
    """POST /v1/messages/count_tokens."""
