"""How the served model writes reasoning and tool calls: what its prompt must say, and how its answers are read.

The server has one `ModelFormat`, which options name or the chat template shows. A request has `AnswerRules`: what its
answers may consist of. An `AnswerParser` reads one answer. Knows no HTTP and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mini_sglang.config import ServerConfig
from mini_sglang.errors import FieldError
from mini_sglang.grammar.compiler import tool_call_grammar
from mini_sglang.outputs import RequestOutput
from mini_sglang.sampling_params import MAX_GRAMMAR_LENGTH, Json, SamplingParams
from mini_sglang.server.answers.deltas import Answer, Content, Delta
from mini_sglang.server.answers.reasoning import (
    MISTRAL_THINK,
    REASONING_PARSERS,
    THINK,
    Markers,
    ReasoningParser,
    opens_reasoning,
)
from mini_sglang.server.answers.tool_calls import (
    HERMES,
    LLAMA3,
    MISTRAL,
    TOOL_CALL_PARSERS,
    CallNotation,
    ToolCallParser,
)
from mini_sglang.server.chat import Message, TemplateBody, Tool
from mini_sglang.text.call_syntax import syntax_of
from mini_sglang.text.tokenizer import Tokenizer
from mini_sglang.text.tool_prompt import render_chat

_TAIL_TOKENS = 16  # of a prompt, among which a template puts the opening marker of reasoning


class ModelFormat:
    """The format of one model. `notation` and `markers` are None for a model without tool calls or reasoning."""

    def __init__(self, tokenizer: Tokenizer, notation: CallNotation | None, markers: Markers | None) -> None:
        self.tokenizer = tokenizer
        self.notation = notation  # of tool calls
        self.markers = markers  # of reasoning

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ServerConfig) -> ModelFormat:
        """The format that the options name or, where they say auto, the chat template shows."""
        template, tool_calls, reasoning = tokenizer.chat_template, config.tool_call_parser, config.reasoning_parser
        return cls(
            tokenizer,
            _notation_of(template) if tool_calls == "auto" else TOOL_CALL_PARSERS.get(tool_calls),
            _markers_of(template) if reasoning == "auto" else REASONING_PARSERS.get(reasoning),
        )

    def render(self, messages: Sequence[Message], body: TemplateBody) -> list[int]:
        """The prompt's token ids: the conversation and the offered tools, as the model's chat template writes them.

        Raises FieldError if the template or the model does not take them.
        """
        if body.offered_tools and self.notation is None:
            raise FieldError(
                "tools",
                "cannot be used: how this model writes calls is not known, or switched off; "
                "see the server's option --tool-call-parser",
            )
        return render_chat(
            self.tokenizer,
            [message.for_template() for message in messages],
            [tool.for_template() for tool in body.offered_tools],
            None if self.notation is None else self.notation.syntax,
            continue_final_message=body.continue_final_message,
            add_generation_prompt=body.adds_generation_prompt,
            **body.template_arguments,
        )

    def rules(self, body: TemplateBody, messages: Sequence[Message], prompt_ids: Sequence[int]) -> AnswerRules:
        """The rules for answers to a prompt that `render` made."""
        in_reasoning = False
        if self.markers is not None and body.continue_final_message:
            in_reasoning = opens_reasoning(messages[-1].content or "", self.markers)
        elif self.markers is not None:
            tail = self.tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
            in_reasoning = tail.rstrip().endswith(self.markers.opening)
        return AnswerRules(self, body, in_reasoning)


@dataclass(frozen=True)
class AnswerRules:
    """What the answers to one request may consist of."""

    model_format: ModelFormat
    body: TemplateBody
    in_reasoning: bool  # the prompt has opened the reasoning, which answers go on with

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """Let markers be shown as text, and hold calls to a grammar if the request wants that.

        Where both tools and the form of the answer are given, the model calls, or answers in that form; if it must
        call, it calls. Raises FieldError.
        """
        texts = self._notation.markers if self._notation is not None else ()
        reasoning = self.model_format.markers
        texts += (reasoning.opening, reasoning.closing) if reasoning is not None else ()
        ids = map(self.model_format.tokenizer.special_token_id, texts)
        params = msgspec.structs.replace(params, shown_special_ids=[i for i in ids if i is not None])
        if self._notation is not None and (self._has_grammar or params.is_constrained):
            params = self._with_calls(params, self._notation)
        if params.is_constrained and self.in_reasoning and self.model_format.markers is not None:
            params = msgspec.structs.replace(params, grammar_after=self.model_format.markers.closing)
        return params

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        markers = self.model_format.markers
        reasoning = None if markers is None else ReasoningParser(markers, inside=self.in_reasoning)
        if self._notation is None:
            return AnswerParser(reasoning, None)
        names = [tool.function.name for tool in self._callable]
        max_calls = 1 if self.body.parallel_tool_calls is False else None
        return AnswerParser(
            reasoning, ToolCallParser(self._notation, names, max_calls=max_calls, eager=self._has_grammar)
        )

    @property
    def _notation(self) -> CallNotation | None:
        return self.model_format.notation if self.body.offered_tools else None

    @property
    def _callable(self) -> list[Tool]:
        named = self.body.named_tool
        return [tool for tool in self.body.offered_tools if named in (None, tool.function.name)]

    @property
    def _must_call(self) -> bool:
        return self.body.named_tool is not None or self.body.tool_choice == "required"

    @property
    def _has_grammar(self) -> bool:
        """Whether a grammar holds calls to the notation. It can do so within free text only behind a marker."""
        has_marker = self._notation is not None and self._notation.opening is not None
        return self._must_call or (has_marker and any(tool.function.strict for tool in self._callable))

    def _with_calls(self, params: SamplingParams, notation: CallNotation) -> SamplingParams:
        """The same parameters with a grammar of calls, and of what the answer may be instead."""
        if (size := sum(len(json.dumps(tool.for_template())) for tool in self._callable)) > MAX_GRAMMAR_LENGTH:
            raise FieldError("tools", f"may take at most {MAX_GRAMMAR_LENGTH} bytes as JSON, got {size}")
        answer = params if params.is_constrained and not self._must_call else None
        grammar = tool_call_grammar(
            {tool.function.name: self._schema(tool) for tool in self._callable},
            notation.syntax,
            self.model_format.tokenizer,
            parallel=self.body.parallel_tool_calls is not False,
            free_text=not self._must_call and answer is None,
            strict=[tool.function.name for tool in self._callable if tool.function.strict],
            answer=answer,
        )
        no_other = dict.fromkeys(("response_format", "regex", "ebnf", "choice"))
        return msgspec.structs.replace(params, tool_grammar=grammar, **no_other)

    def _schema(self, tool: Tool) -> Json | None:
        """The schema of a tool's arguments. It refuses undeclared properties, unless the tool allows them itself."""
        if not self._must_call and not tool.function.strict:
            return None
        schema = tool.function.parameters or {"type": "object", "properties": {}}
        return {"additionalProperties": False, **schema} if "properties" in schema else schema


class AnswerParser:
    """Reads one answer: first the reasoning, then text and calls. A part without a parser counts as text."""

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._reasoning_tokens: int | None = None  # of reasoning that is over

    def push(self, output: RequestOutput) -> list[Delta]:
        """The deltas that `output` makes certain; with the last output, all that are left."""
        return self._push(output.text_delta, output.finished)

    def whole(self, output: RequestOutput) -> Answer:
        """A complete answer: the deltas that `push` would give, joined."""
        return Answer.of(self._push(output.text, True))

    def reasoning_tokens(self, output: RequestOutput) -> int:
        """The number of reasoning tokens, markers included. `output`: the latest that was read."""
        if self._reasoning is None or not self._reasoning.reasoning_characters:
            return 0
        if self._reasoning.in_reasoning:
            return output.usage.completion_tokens
        if self._reasoning_tokens is None:  # once: it takes time in proportion to the reasoning
            self._reasoning_tokens = output.num_tokens_of_text(self._reasoning.reasoning_characters)
        return self._reasoning_tokens

    @property
    def has_calls(self) -> bool:
        """Whether the answer has called a tool so far."""
        return self._calls is not None and self._calls.num_calls > 0

    def _push(self, text: str, final: bool) -> list[Delta]:
        deltas: list[Delta] = [Content(text)] if text else []
        if self._reasoning is not None:
            deltas = self._reasoning.push(text, final=final)
        if self._calls is None:
            return deltas
        content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        reasoning = [delta for delta in deltas if not isinstance(delta, Content)]
        return reasoning + self._calls.push(content, final=final)


def _notation_of(template: str) -> CallNotation | None:
    syntax = syntax_of(template)
    return next((notation for notation in (HERMES, LLAMA3, MISTRAL) if notation.syntax == syntax), None)


def _markers_of(template: str) -> Markers | None:
    return THINK if THINK.closing in template else MISTRAL_THINK if MISTRAL_THINK.opening in template else None
