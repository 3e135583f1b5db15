"""Writes engine outputs as answers of /v1/responses: as a whole response or as the events of a stream.

An answer is a list of items: reasoning, a message, calls. Knows no engine and no HTTP.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from mini_sglang.outputs import FinishReason, RequestOutput, TokenLogprobs
from mini_sglang.sampling_params import Json
from mini_sglang.server.answering import AnswerFormat, named_event
from mini_sglang.server.answers.deltas import Answer, Block, Change
from mini_sglang.server.answers.model_format import AnswerParser
from mini_sglang.server.errors import ApiError
from mini_sglang.server.openai.format import logprob_entries
from mini_sglang.server.responses.bodies import ResponsesBody
from mini_sglang.text.tokenizer import Tokenizer

_STATUS: dict[FinishReason | None, str] = {FinishReason.LENGTH: "incomplete", FinishReason.ABORT: "cancelled"}
_ID_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_TEXT_EVENTS = {  # of what a block's text adds up to
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class ResponseFormat(AnswerFormat):
    """One answer. For a stream it keeps the items and the number of events so far."""

    def __init__(
        self, response_id: str, model: str, body: ResponsesBody, parser: AnswerParser, tokenizer: Tokenizer
    ) -> None:
        self._id = response_id
        self._model = model
        self._body = body
        self._parser = parser
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._answer = Answer()
        self._logprobs: dict[int, list[Json]] = {}  # of the texts, by index
        self._pending: list[TokenLogprobs] = []  # of tokens that belong to no block yet
        self._num_events = 0

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        [output] = outputs
        # Step by step if there are log-probabilities, so that each text gets those that a stream would give it.
        steps = [dataclasses.replace(output, text_delta=output.text)] if output.logprobs is None else _steps(output)
        for step in steps:
            for _ in self._changes(step):
                pass
        self._take_logprobs()
        return self._complete(output)

    def opening(self, choice: int, first: RequestOutput) -> Iterator[bytes]:
        begun = self._response("in_progress")
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def delta(self, choice: int, output: RequestOutput) -> Iterator[bytes]:
        for change, block, text, logprobs in self._changes(output):
            yield from self._block_events(change, block, text, logprobs)

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        [last] = outputs
        if late := self._take_logprobs():
            yield from self._block_events("grown", self._answer.blocks[-1], "", late)
        response = self._complete(last)
        for change, block, text in self._answer.close():
            yield from self._block_events(change, block, text, [], response["output"][-1]["status"])
        kind = "response.completed" if response["status"] == "completed" else "response.incomplete"
        yield self._event(kind, response=response)

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield self._event("error", code=error.code, message=error.message, param=error.param)
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        yield self._event("response.failed", response=response)

    # -- items --------------------------------------------------------------------------------------------------------

    def _changes(self, output: RequestOutput) -> Iterator[tuple[Change, Block, str, list[Json]]]:
        """Yield what `output` changes. Text that grows gets the log-probabilities of all tokens since the last change.

        Those of reasoning, its markers included, and of calls are left out.
        """
        self._pending += output.new_logprobs or []
        changes = self._answer.push(self._parser.push(output))
        if self._pending:
            num_reasoning = self._parser.reasoning_tokens(output)
            del self._pending[: max(0, num_reasoning - (output.usage.completion_tokens - len(self._pending)))]
        for change, block, text in changes:
            yield change, block, text, self._take_logprobs() if change == "grown" else []

    def _take_logprobs(self) -> list[Json]:
        """Give the tokens that belong to no block yet to the last block; returns their entries if it is a text."""
        pending, self._pending = self._pending, []
        if not pending or not self._answer.blocks or self._answer.blocks[-1].kind != "text":
            return []
        entries = logprob_entries(self._tokenizer, pending)
        self._logprobs.setdefault(self._answer.blocks[-1].index, []).extend(entries)
        return entries

    def _block_events(
        self, change: Change, block: Block, text: str, logprobs: list[Json], end_status: str = "completed"
    ) -> Iterator[bytes]:
        kind = _TEXT_EVENTS[block.kind]
        at: Json = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            at["content_index"] = 0
        match change, block.kind:
            case "opened", _:
                item = self._item(block, "in_progress")
                if block.kind != "call":
                    item["content"] = []
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind == "text":
                    yield self._event("response.content_part.added", **at, part=_text_part("", []))
            case "grown", "text":
                yield self._event(f"{kind}.delta", **at, delta=text, logprobs=logprobs)
            case "grown", _:
                yield self._event(f"{kind}.delta", **at, delta=text)
            case "closed", _:
                item = self._item(block, end_status)
                match block.kind:
                    case "reasoning":
                        yield self._event(f"{kind}.done", **at, text=block.text)
                    case "text":
                        [part] = item["content"]
                        yield self._event(f"{kind}.done", **at, text=block.text, logprobs=part["logprobs"])
                        yield self._event("response.content_part.done", **at, part=part)
                    case "call":
                        yield self._event(f"{kind}.done", **at, name=block.name, arguments=block.text)
                yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _item(self, block: Block, status: str) -> Json:
        item: Json = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "reasoning":
                content = [{"type": "reasoning_text", "text": block.text}]
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case "text":
                part = _text_part(block.text, self._logprobs.get(block.index, []))
                return {**item, "type": "message", "role": "assistant", "content": [part]}
            case "call":
                call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return {**item, "type": "function_call", **call}

    def _item_id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}{self._id.removeprefix('resp_')}_{block.index}"

    # -- the response around them -------------------------------------------------------------------------------------

    def _complete(self, output: RequestOutput) -> Json:
        status = _STATUS.get(output.finish_reason, "completed")
        items = [self._item(block, "completed") for block in self._answer.blocks]
        if items and status != "completed":
            items[-1]["status"] = "incomplete"
        response = {**self._response(status), "output": items, "usage": self._usage(output)}
        if status == "completed":
            response["completed_at"] = int(time.time())
        elif output.finish_reason is FinishReason.LENGTH:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _usage(self, output: RequestOutput) -> Json:
        usage = output.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens(output)},
            "total_tokens": usage.total_tokens,
        }

    def _response(self, status: str) -> Json:
        """The response without an answer. It repeats the settings of the body."""
        asked = self._body.model_dump(include=_REPEATED, mode="json", by_alias=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "background": False,
            "model": self._model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **_DEFAULTS,
            **{name: value for name, value in asked.items() if value is not None},
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return named_event({"type": kind, "sequence_number": self._num_events - 1, **fields})


def _steps(output: RequestOutput) -> Iterator[RequestOutput]:
    """The outputs that a stream would have had up to this one, as far as text, tokens and log-probabilities go."""
    num_before = 0
    pieces = zip(output.generated.text_pieces, output.generated.num_tokens_at_piece, strict=True)
    for count, (text, num_tokens) in enumerate(pieces, start=1):
        yield dataclasses.replace(
            output,
            usage=msgspec.structs.replace(output.usage, completion_tokens=num_tokens),
            text_delta=text,
            num_new_tokens=num_tokens - num_before,
            finish_reason=output.finish_reason if count == output.num_text_pieces else None,
            num_text_pieces=count,
        )
        num_before = num_tokens


_DEFAULTS: Json = {  # the settings that a response repeats, where the body left them out
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "user": None,
}
_REPEATED = set(_DEFAULTS)


def _text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
