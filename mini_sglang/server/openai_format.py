"""OpenAI's answers, made from engine outputs: pure functions and one small class per kind of answer.

A format makes one choice of a whole answer and one choice of a stream chunk; everything around the choices is the same
for chat and plain completions. Knows no engine and no HTTP.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Any, Protocol

import mini_sglang
from mini_sglang.request import RequestOutput, TokenLogprobs, Usage
from mini_sglang.tokenizer import Tokenizer

Json = dict[str, Any]

SYSTEM_FINGERPRINT = f"mini-sglang-{mini_sglang.__version__}"
_MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's stand-in for it


@dataclass(frozen=True)
class Envelope:
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str

    def wrap(self, kind: str, choices: list[Json], usage: Usage | None = None) -> Json:
        """A whole answer or a chunk; `kind` is OpenAI's name of it."""
        answer: Json = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": choices,
        }
        return answer if usage is None else {**answer, "usage": usage_json(usage)}


def usage_json(usage: Usage) -> Json:
    """Token counts under OpenAI's names."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class AnswerFormat(Protocol):
    """What chat and plain completions do differently."""

    whole_kind: str
    chunk_kind: str

    def whole(self, index: int, output: RequestOutput) -> Json:
        """The choice of an answer that is complete."""
        ...

    def opening(self, index: int) -> Json | None:
        """The choice of a chunk that comes before a stream's first text, if there is one."""
        ...

    def delta(self, index: int, output: RequestOutput) -> Json:
        """The choice of a chunk: what `output` added."""
        ...


class ChatFormat:
    """Choices of /v1/chat/completions."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def whole(self, index: int, output: RequestOutput) -> Json:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(output.logprobs), **_ending(output)}

    def opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, output: RequestOutput) -> Json:
        delta = {"content": output.text_delta} if output.text_delta or not output.finished else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(output.new_logprobs), **_ending(output)}

    def _logprobs(self, logprobs: list[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        return {"content": [self._token(entry) for entry in logprobs], "refusal": None}

    def _token(self, entry: TokenLogprobs) -> Json:
        first, *others = (
            self._alternative(token_id, logprob)
            for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True)
        )
        return {**first, "top_logprobs": others}

    def _alternative(self, token_id: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


class CompletionFormat:
    """Choices of /v1/completions. Keeps, for each choice, how far its tokens reach into the text."""

    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offsets: dict[int, _TextOffset] = {}

    def whole(self, index: int, output: RequestOutput) -> Json:
        logprobs = self._logprobs(index, output.logprobs)
        return {"index": index, "text": output.text, "logprobs": logprobs, **_ending(output)}

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, output: RequestOutput) -> Json:
        logprobs = self._logprobs(index, output.new_logprobs)
        return {"index": index, "text": output.text_delta, "logprobs": logprobs, **_ending(output)}

    def _logprobs(self, index: int, logprobs: list[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        offset = self._offsets.setdefault(index, _TextOffset())
        answer: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in logprobs:
            token, *others = (self._tokenizer.token_bytes(token_id) for token_id in entry.token_ids)
            token_logprob, *other_logprobs = (finite(logprob) for logprob in entry.logprobs)
            answer["tokens"].append(token_text(token))
            answer["token_logprobs"].append(token_logprob)
            answer["top_logprobs"].append(dict(zip(map(token_text, others), other_logprobs, strict=True)))
            answer["text_offset"].append(offset.advance(token))
        return answer


class _TextOffset:
    """Counts the characters that a row of tokens makes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def advance(self, token: bytes) -> int:
        """Where this token's text begins."""
        start = self._characters
        self._characters += len(self._decoder.decode(token))
        return start


def token_text(data: bytes) -> str:
    """A token as plain completions write it: its text or, for a piece of a character, its bytes (as OpenAI does)."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _ending(output: RequestOutput) -> Json:
    if output.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": output.finish_reason.value, "stop_reason": output.stop_reason}


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, _MIN_LOGPROB)
