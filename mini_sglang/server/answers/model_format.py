"""How the served model writes reasoning and tool calls: what its prompt must say, and how its answers are read.

The server has one `ModelFormat`, which options name or the chat template shows. A request has `AnswerRules`: what its
answers may consist of. An `AnswerParser` reads one answer. Knows no HTTP and no engine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mini_sglang.errors import FieldError
from mini_sglang.grammar.calls import tool_call_grammar
from mini_sglang.outputs import RequestOutput
from mini_sglang.sampling_params import MAX_GRAMMAR_LENGTH, Json, SamplingParams
from mini_sglang.server.answers.deltas import Answer, Delta
from mini_sglang.server.answers.reader import AnswerReader
from mini_sglang.server.chat import Message, TemplateBody, Tool
from mini_sglang.server.config import ServerConfig
from mini_sglang.text.notation import Notation, Thoughts
from mini_sglang.text.notations import REASONING_PARSERS, TOOL_CALL_PARSERS
from mini_sglang.text.template_format import TemplateFormat, format_of
from mini_sglang.text.tokenizer import Tokenizer
from mini_sglang.text.tool_prompt import render_chat

_TAIL_TOKENS = 16  # of a prompt, among which a template puts the mark that answers go on from


class ModelFormat:
    """The format of one model. `notation` and `thoughts` are None for a model without tool calls or reasoning."""

    def __init__(self, tokenizer: Tokenizer, form: TemplateFormat) -> None:
        self.tokenizer = tokenizer
        self.form = form

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ServerConfig) -> ModelFormat:
        """The format that the options name or, where they say auto, the chat template shows."""
        form, calls, reasoning = format_of(tokenizer), config.tool_call_parser, config.reasoning_parser
        if calls != "auto":
            form = dataclasses.replace(form, notation=TOOL_CALL_PARSERS.get(calls))
        if reasoning != "auto":
            form = dataclasses.replace(form, thoughts=REASONING_PARSERS.get(reasoning))
        return cls(tokenizer, form)

    @property
    def notation(self) -> Notation | None:
        """Of tool calls."""
        return self.form.notation

    @property
    def thoughts(self) -> Thoughts | None:
        """The markers of reasoning."""
        return self.form.thoughts

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
            self.form,
            continue_final_message=body.continue_final_message,
            add_generation_prompt=body.adds_generation_prompt,
            **body.template_arguments,
        )

    def rules(self, body: TemplateBody, messages: Sequence[Message], prompt_ids: Sequence[int]) -> AnswerRules:
        """The rules for answers to a prompt that `render` made."""
        thoughts = self.thoughts
        if thoughts is None:
            return AnswerRules(self, body, prompt_end="", may_think=False)
        if body.continue_final_message:
            is_open = thoughts.is_open_in(messages[-1].content or "")
            return AnswerRules(self, body, thoughts.opening.strip() if is_open else "", may_think=False)
        tail = self.tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        may_think = not tail.endswith(tuple(filter(None, (thoughts.opening.strip(), *thoughts.closings))))
        return AnswerRules(self, body, thoughts.prompt_end(tail), may_think)

    @functools.cached_property
    def _special_ids(self) -> tuple[list[int], list[int]]:
        """The special tokens among the marks of answers without tools, and of those with tools."""
        of_thoughts = self.thoughts.markers if self.thoughts is not None else ()
        of_calls = self.notation.markers if self.notation is not None else ()
        without, both = (
            sorted({i for i in map(self.tokenizer.special_token_id, marks) if i is not None})
            for marks in (of_thoughts, of_thoughts + of_calls)
        )
        return without, both

    def shown_special_ids(self, with_tools: bool) -> list[int]:
        """The ids of special tokens that are shown as text, so that an answer's marks can be found in it."""
        return self._special_ids[with_tools]


@dataclass(frozen=True)
class AnswerRules:
    """What the answers to one request may consist of."""

    model_format: ModelFormat
    body: TemplateBody
    prompt_end: str  # the mark that the prompt ends with, from which answers go on
    may_think: bool  # the prompt has neither opened nor closed the reasoning

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """Let markers be shown as text, and hold calls to a grammar if the request wants that.

        Where both tools and the form of the answer are given, the model calls, or answers in that form; if it must
        call, it calls. Raises FieldError.
        """
        thoughts = self.model_format.thoughts
        shown = self.model_format.shown_special_ids(with_tools=self._notation is not None)
        params = msgspec.structs.replace(params, shown_special_ids=shown)
        if self._notation is not None and (self._has_grammar or params.is_constrained):
            params = self._with_calls(params, self._notation)
        if params.is_constrained and self._is_thinking and thoughts is not None:
            params = msgspec.structs.replace(params, grammar_after=thoughts.closings[0])
        return params

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        return AnswerParser(self._reader(eager=True), self._reader(eager=self._has_grammar))

    def _reader(self, *, eager: bool) -> AnswerReader:
        return AnswerReader(
            self.model_format.thoughts,
            self._notation,
            {tool.function.name: tool.function.parameters for tool in self._callable},
            prompt_end=self.prompt_end,
            eager=eager,
            careful=not self._has_grammar,
            max_calls=1 if self.body.parallel_tool_calls is False else None,
        )

    @property
    def _is_thinking(self) -> bool:
        """Whether the prompt has opened the reasoning, which answers go on with."""
        thoughts = self.model_format.thoughts
        return thoughts is not None and bool(self.prompt_end) and self.prompt_end == thoughts.opening.strip()

    @property
    def _notation(self) -> Notation | None:
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
        has_marker = self._notation is not None and not self._notation.leading
        return self._must_call or (has_marker and any(tool.function.strict for tool in self._callable))

    def _with_calls(self, params: SamplingParams, notation: Notation) -> SamplingParams:
        """The same parameters with a grammar of calls, and of what the answer may be instead."""
        if (size := sum(len(json.dumps(tool.for_template())) for tool in self._callable)) > MAX_GRAMMAR_LENGTH:
            raise FieldError("tools", f"may take at most {MAX_GRAMMAR_LENGTH} bytes as JSON, got {size}")
        answer = params if params.is_constrained and not self._must_call else None
        grammar = tool_call_grammar(
            {tool.function.name: self._schema(tool) for tool in self._callable},
            notation,
            self.model_format.tokenizer,
            parallel=self.body.parallel_tool_calls is not False,
            free_text=not self._must_call and answer is None,
            strict=[tool.function.name for tool in self._callable if tool.function.strict],
            answer=answer,
            prompt_end=self.prompt_end,
            thoughts=self.model_format.thoughts if self.may_think else None,
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
    """Reads one answer, either in parts with `push` or as a `whole`."""

    def __init__(self, stream: AnswerReader, whole: AnswerReader) -> None:
        self._reader = stream
        self._whole = whole
        self._counted: list[int] = []  # tokens of each of the thoughts that are over

    def push(self, output: RequestOutput) -> list[Delta]:
        """The deltas that `output` makes certain; with the last output, all that are left."""
        return self._reader.push(output.text_delta, final=output.finished)

    def whole(self, output: RequestOutput) -> Answer:
        """A complete answer. A call that breaks off is text here; in a stream, its beginning has been given out."""
        self._reader = self._whole
        return Answer.of(self._reader.push(output.text, final=True))

    def reasoning_tokens(self, output: RequestOutput) -> int:
        """The number of reasoning tokens, markers included. `output`: the latest that was read."""
        spans = self._reader.reasoning_spans
        over = spans[:-1] if self._reader.in_reasoning else spans
        for start, end in over[len(self._counted) :]:  # once: it takes time in proportion to the text
            self._counted.append(output.num_tokens_of_text(end) - output.num_tokens_of_text(start))
        current = 0
        if self._reader.in_reasoning and spans:
            current = output.usage.completion_tokens - output.num_tokens_of_text(spans[-1][0])
        return sum(self._counted) + current

    @property
    def has_calls(self) -> bool:
        """Whether the answer has called a tool so far."""
        return self._reader.num_calls > 0
