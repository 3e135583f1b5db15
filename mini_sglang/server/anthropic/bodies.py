"""The bodies of Anthropic's API: /v1/messages and /v1/messages/count_tokens, with this server's sampling fields.

The bodies turn themselves into the messages, tools and `SamplingParams` of a chat. They refuse a field of Anthropic's
that this server does not support, unless its value switches it off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mini_sglang.errors import FieldError
from mini_sglang.sampling_params import Json
from mini_sglang.server import chat, fields
from mini_sglang.server.bodies import SAMPLING_FIELDS, Body

CacheControl = Json  # a hint: prefixes are cached anyway


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: fields.OffIfEmpty = None


class ThinkingBlock(Body):
    """Reasoning of an earlier answer; the chat template decides whether the model sees it again."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    cache_control: CacheControl | None = None


class ToolResultBlock(Body):
    """The result of a call. A chat has no field for an error, so the text says that the call failed."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: fields.Content = ""
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    def for_chat(self) -> chat.Message:
        content = f"Error: {self.content}" if self.is_error else self.content
        return chat.Message(role="tool", content=content, tool_call_id=self.tool_use_id)


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


BlockList = Annotated[
    list[Block],
    fields.FAIL_FAST,
    fields.at_most(fields.MAX_MESSAGES),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]


class Turn(Body):
    """One message. Consecutive messages of one role become one turn."""

    role: Literal["user", "assistant"]
    content: BlockList

    def blocks(self, kind: type[Body]) -> Iterator[Any]:
        return (block for block in self.content if isinstance(block, kind))

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks(TextBlock))


class ToolDefinition(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: chat.ToolName
    description: str | None = None
    input_schema: chat.ParameterSchema
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def for_chat(self) -> chat.Tool:
        function = chat.Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
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
    type: Literal["adaptive", "disabled"]  # the server enforces no budget, so none is accepted
    display: Literal["summarized"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: Json = Field(alias="schema")

    def for_chat(self) -> Json:
        return {"type": self.type, "json_schema": {"schema": self.json_schema}}


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: fields.Off = None


class Metadata(Body):
    user_id: str | None = None  # changes no answer


Turns = Annotated[list[Turn], Field(min_length=1), fields.FAIL_FAST, fields.at_most(fields.MAX_MESSAGES)]


class PromptBody(Body):
    """The fields that make the prompt, which both routes share."""

    model: str | None = None
    messages: Turns
    system: fields.Content | None = None
    tools: Annotated[list[ToolDefinition], fields.FAIL_FAST, fields.at_most(fields.MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: fields.TemplateArguments | None = None  # as for a chat
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    speed: Annotated[None, fields.must_be_off("standard")] = None

    def chat_messages(self) -> list[chat.Message]:
        """The conversation as a chat has it: the system prompt first, results of tools before the user's text."""
        system = [] if self.system is None else [chat.Message(role="system", content=self.system)]
        messages = (message for turn in self.messages for message in _chat_messages_of(turn))
        return system + chat.join_runs(messages, ("user", "assistant"))

    def template(self) -> chat.TemplateBody:
        """How the messages become a prompt. If the assistant has the last message, the answer continues it.

        Raises ValidationError if tools and choice do not fit.
        """
        thinks = self.thinking is not None and self.thinking.type == "adaptive"
        last = self.messages[-1]
        choice = self.tool_choice
        if choice is not None and choice.type == "any" and not self.tools:
            raise FieldError("tool_choice", "any needs tools to choose from")
        return chat.TemplateBody(
            continue_final_message=last.role == "assistant" and not any(last.blocks(ToolUseBlock)),
            chat_template_kwargs={"enable_thinking": thinks, **(self.chat_template_kwargs or {})},
            tools=None if not self.tools else [tool.for_chat() for tool in self.tools],
            tool_choice=None if choice is None else choice.for_chat(),
            parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        )


def _chat_messages_of(turn: Turn) -> Iterator[chat.Message]:
    if turn.role == "assistant":
        calls = [
            chat.MessageCall(id=block.id, function=chat.CalledFunction(name=block.name, arguments=block.input))
            for block in turn.blocks(ToolUseBlock)
        ]
        reasoning = "".join(block.thinking for block in turn.blocks(ThinkingBlock)) or None
        yield chat.Message(role="assistant", content=turn.text, tool_calls=calls or None, reasoning_content=reasoning)
        return
    for block in turn.blocks(ToolResultBlock):
        yield block.for_chat()
    if any(turn.blocks(TextBlock)) or not turn.content:
        yield chat.Message(role="user", content=turn.text)


class MessagesBody(PromptBody, chat.ConversationBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: fields.StopStrings | None = None
    stop: fields.Off = None  # the other APIs' name of stop_sequences
    metadata: Metadata | None = None
    service_tier: Annotated[None, fields.must_be_off("auto", "standard_only")] = None
    container: fields.Off = None
    diagnostics: fields.Off = None
    inference_geo: fields.Off = None
    mcp_servers: fields.OffIfEmpty = None
    context_management: fields.Off = None

    @property
    def field_names(self) -> Mapping[str, str]:
        return {"prompt": "messages", "response_format": "output_config.format", "stop": "stop_sequences"}

    def sampling_fields(self) -> Json:
        wanted = None if self.output_config is None else self.output_config.format
        return {
            **self.model_dump(include=SAMPLING_FIELDS),
            "stop": self.stop_sequences,
            "response_format": None if wanted is None else wanted.for_chat(),
        }


class CountTokensBody(PromptBody):
    """POST /v1/messages/count_tokens."""
