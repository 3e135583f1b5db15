"""Writes engine outputs as Anthropic's answers: a whole message, the events of a stream, and the shape of errors.

Knows no engine and no HTTP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import msgspec

from mini_sglang.outputs import FinishReason, RequestOutput, Usage
from mini_sglang.sampling_params import Json
from mini_sglang.server.answering import AnswerFormat, named_event
from mini_sglang.server.answers.deltas import Answer, Block, Change
from mini_sglang.server.answers.model_format import AnswerParser
from mini_sglang.server.errors import ApiError

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageFormat(AnswerFormat):
    """One answer of /v1/messages. `fits_context`: whether the context has room for `max_tokens`.

    With `omits_thinking` the text of reasoning is left out, but not its block.
    """

    ping = named_event({"type": "ping"})

    def __init__(
        self, message_id: str, model: str, parser: AnswerParser, fits_context: bool, omits_thinking: bool
    ) -> None:
        self._id = message_id
        self._model = model
        self._parser = parser
        self._fits_context = fits_context
        self._omits_thinking = omits_thinking
        self._answer = Answer()

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        [output] = outputs
        blocks = self._parser.whole(output).blocks
        content = [_content_block(dataclasses.replace(b, text="") if self._is_omitted(b) else b) for b in blocks]
        return {**self._message(content, output.usage), **self._ending(output)}

    def opening(self, choice: int, first: RequestOutput) -> Iterator[bytes]:
        nothing_yet = msgspec.structs.replace(first.usage, completion_tokens=0)
        message = {**self._message([], nothing_yet), "stop_reason": None, "stop_sequence": None}
        yield named_event({"type": "message_start", "message": message})

    def delta(self, choice: int, output: RequestOutput) -> Iterator[bytes]:
        for change, block, text in self._answer.push(self._parser.push(output)):
            if change != "grown" or not self._is_omitted(block):
                yield _block_event(change, block, text)

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        [last] = outputs
        for change, block, text in self._answer.close():
            yield _block_event(change, block, text)
        yield named_event({"type": "message_delta", "delta": self._ending(last), "usage": usage_json(last.usage)})
        yield named_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield named_event(error_json(error))

    def _is_omitted(self, block: Block) -> bool:
        return self._omits_thinking and block.kind == "reasoning"

    def _message(self, content: list[Json], usage: Usage) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": usage_json(usage),
        }

    def _ending(self, output: RequestOutput) -> Json:
        stop_sequence = output.stop_reason if isinstance(output.stop_reason, str) else None
        if output.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens" if self._fits_context else "model_context_window_exceeded"
        elif output.finish_reason is FinishReason.ABORT:
            reason = "pause_turn"  # cut off from outside: it could be continued
        elif stop_sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._parser.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop_sequence}


def _block_event(change: Change, block: Block, text: str) -> bytes:
    match change:
        case "opened":
            return named_event(
                {"type": "content_block_start", "index": block.index, "content_block": _content_block(block)}
            )
        case "grown":
            delta = _block_delta(block, text)
            return named_event({"type": "content_block_delta", "index": block.index, "delta": delta})
        case "closed":
            return named_event({"type": "content_block_stop", "index": block.index})


def _content_block(block: Block) -> Json:
    """A block with its text so far."""
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "text":
            return {"type": "text", "text": block.text}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(block.text)}


def _block_delta(block: Block, text: str) -> Json:
    match block.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "text":
            return {"type": "text_delta", "text": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _arguments(text: str) -> Json:
    """The arguments of a call; {} if they are not complete."""
    try:
        return msgspec.json.decode(text, type=Json)
    except msgspec.DecodeError:
        return {}


def usage_json(usage: Usage) -> Json:
    """Token counts under Anthropic's names, which count cached prompt tokens apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def error_json(error: ApiError) -> Json:
    """An error in Anthropic's shape, to which this server adds `param` and `code`."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {**error.body()["error"], "type": kind}}
