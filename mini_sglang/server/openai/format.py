"""Writes engine outputs as OpenAI's answers to chats and plain completions. Knows no engine and no HTTP."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator, Sequence

import msgspec

import mini_sglang
from mini_sglang.outputs import FinishReason, RequestOutput, TokenLogprobs, Usage
from mini_sglang.sampling_params import Json
from mini_sglang.server.answering import DONE, AnswerFormat, event
from mini_sglang.server.answers.deltas import CallArguments, CallOpening, Content, Delta, Reasoning
from mini_sglang.server.answers.model_format import AnswerRules
from mini_sglang.server.generation import Job
from mini_sglang.server.openai.bodies import OpenAIBody
from mini_sglang.text.tokenizer import Tokenizer

SYSTEM_FINGERPRINT = f"mini-sglang-{mini_sglang.__version__}"
_MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's stand-in for it


class Envelope:
    """The object around the choices of an answer or a chunk, the same for chats and plain completions."""

    def __init__(self, job: Job, body: OpenAIBody, model: str) -> None:
        self._job = job
        self._model = model
        self._include_usage = body.include_usage
        self.continuous_usage = body.continuous_usage  # chunks carry the usage so far of their choice
        self._created = int(time.time())

    def whole(self, kind: str, choices: list[Json], outputs: Sequence[RequestOutput], reasoning_tokens: int) -> Json:
        """A whole answer; `kind` is OpenAI's name for it."""
        return self._wrap(kind, choices, self._total_usage(outputs, reasoning_tokens))

    def chunk(self, kind: str, choice: Json, usage: Usage) -> bytes:
        """The event of a chunk with one choice and, if it was asked for, the choice's usage so far."""
        return event(self._wrap(kind, [choice], usage if self.continuous_usage else None))

    def closing(self, kind: str, outputs: Sequence[RequestOutput], reasoning_tokens: int) -> Iterator[bytes]:
        """The events that end a stream."""
        if self._include_usage:
            yield event(self._wrap(kind, [], self._total_usage(outputs, reasoning_tokens)))
        yield DONE

    def _wrap(self, kind: str, choices: list[Json], usage: Usage | None) -> Json:
        answer: Json = {
            "id": self._job.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": choices,
        }
        return answer if usage is None else {**answer, "usage": usage_json(usage)}

    def _total_usage(self, outputs: Sequence[RequestOutput], reasoning_tokens: int) -> Usage:
        """The tokens of all choices. A prompt counts once, even if several choices continue it."""
        firsts = outputs[:: self._job.n]
        return Usage(
            prompt_tokens=sum(output.usage.prompt_tokens for output in firsts),
            completion_tokens=sum(output.usage.completion_tokens for output in outputs),
            cached_tokens=sum(output.usage.cached_tokens for output in firsts),
            reasoning_tokens=reasoning_tokens,
        )


def usage_json(usage: Usage) -> Json:
    """Token counts under OpenAI's names."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


_CHUNK = "chat.completion.chunk"


class ChatFormat(AnswerFormat):
    """Answers of /v1/chat/completions."""

    def __init__(self, job: Job, envelope: Envelope, rules: AnswerRules, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._parsers = [rules.parser() for _ in range(job.num_choices)]

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = [self._whole_choice(index, output) for index, output in enumerate(outputs)]
        return self._envelope.whole("chat.completion", choices, outputs, self._reasoning_tokens(outputs))

    def opening(self, choice: int, first: RequestOutput) -> Iterator[bytes]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        part: Json = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        nothing_yet = msgspec.structs.replace(first.usage, completion_tokens=0)
        yield self._envelope.chunk(_CHUNK, part, nothing_yet)

    def delta(self, choice: int, output: RequestOutput) -> Iterator[bytes]:
        parser = self._parsers[choice]
        delta = _chat_delta(parser.push(output))
        logprobs = self._logprobs(output.new_logprobs)
        if not delta and logprobs is None and not output.finished:
            return
        part = {"index": choice, "delta": delta, "logprobs": logprobs, **_ending(output, parser.has_calls)}
        usage = output.usage
        if self._envelope.continuous_usage:
            usage = msgspec.structs.replace(usage, reasoning_tokens=parser.reasoning_tokens(output))
        yield self._envelope.chunk(_CHUNK, part, usage)

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        return self._envelope.closing(_CHUNK, outputs, self._reasoning_tokens(outputs))

    def _whole_choice(self, index: int, output: RequestOutput) -> Json:
        parser = self._parsers[index]
        answer = parser.whole(output)
        message: Json = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message |= _reasoning(answer.reasoning)
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
                for call in answer.calls
            ]
        logprobs = self._logprobs(output.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, **_ending(output, parser.has_calls)}

    def _reasoning_tokens(self, outputs: Sequence[RequestOutput]) -> int:
        return sum(parser.reasoning_tokens(last) for parser, last in zip(self._parsers, outputs, strict=True))

    def _logprobs(self, logprobs: list[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        return {"content": logprob_entries(self._tokenizer, logprobs), "refusal": None}


def _chat_delta(deltas: Sequence[Delta]) -> Json:
    """The delta of one chunk, which joins deltas of one kind."""
    content = reasoning = ""
    calls: dict[int, Json] = {}
    for part in deltas:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallOpening(number, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[number] = {"index": number, "id": call_id, "type": "function", "function": function}
            case CallArguments(number, text):
                call = calls.setdefault(number, {"index": number, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    delta: Json = _reasoning(reasoning) if reasoning else {}
    if content:
        delta["content"] = content
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _reasoning(text: str) -> Json:
    """Reasoning under both of the names that clients know."""
    return {"reasoning_content": text, "reasoning": text}


_COMPLETION = "text_completion"  # and of its chunks


class CompletionFormat(AnswerFormat):
    """Answers of /v1/completions. Keeps for each choice how far its tokens reach into the text.

    With `echoes`, the texts of the prompts, every choice begins with its prompt.
    """

    def __init__(self, job: Job, envelope: Envelope, tokenizer: Tokenizer, echoes: Sequence[str] = ()) -> None:
        self._job = job
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._offsets: dict[int, _TextOffset] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = [self._choice(i, output, output.text, output.logprobs) for i, output in enumerate(outputs)]
        return self._envelope.whole(_COMPLETION, choices, outputs, reasoning_tokens=0)

    def delta(self, choice: int, output: RequestOutput) -> Iterator[bytes]:
        part = self._choice(choice, output, output.text_delta, output.new_logprobs)
        yield self._envelope.chunk(_COMPLETION, part, output.usage)

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        return self._envelope.closing(_COMPLETION, outputs, reasoning_tokens=0)

    def _choice(self, index: int, output: RequestOutput, text: str, entries: list[TokenLogprobs] | None) -> Json:
        logprobs: Json | None = None
        echo = self._echoes[index // self._job.n] if self._echoes and index not in self._offsets else None
        offset = self._offsets.setdefault(index, _TextOffset())
        if entries is not None:
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if echo is not None:
            text = echo + text
            if logprobs is not None:
                self._add_prompt(logprobs, offset, echo, self._job.prompt_of(index), output.prompt_logprobs)
        if logprobs is not None:
            for entry in entries or ():
                self._add(logprobs, offset, entry)
        return {"index": index, "text": text, "logprobs": logprobs, **_ending(output)}

    def _add_prompt(
        self, logprobs: Json, offset: _TextOffset, text: str, token_ids: list[int], known: list[TokenLogprobs] | None
    ) -> None:
        """Add the prompt's tokens, with the log-probabilities in `known`: of all tokens but the first."""
        entries = [None] * len(token_ids) if known is None else [None, *known]
        for token_id, entry in zip(token_ids, entries, strict=True):
            # special tokens that the tokenizer has added (a begin token) are not in the text
            is_hidden = token_id in self._tokenizer.special_token_ids and not offset.is_next(
                self._tokenizer.token_bytes(token_id), text
            )
            self._add(logprobs, offset, entry or TokenLogprobs([token_id], []), is_hidden)

    def _add(self, logprobs: Json, offset: _TextOffset, entry: TokenLogprobs, is_hidden: bool = False) -> None:
        token, *others = (self._tokenizer.token_bytes(token_id) for token_id in entry.token_ids)
        token_logprob, *other_logprobs = map(finite, entry.logprobs or [0.0])
        top = dict(zip(map(token_text, others), other_logprobs, strict=True))
        logprobs["tokens"].append(token_text(token))
        logprobs["token_logprobs"].append(token_logprob if entry.logprobs else None)
        logprobs["top_logprobs"].append(top if entry.logprobs else None)
        logprobs["text_offset"].append(offset.advance(b"" if is_hidden else token))


class _TextOffset:
    """Counts the characters of successive tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def is_next(self, token: bytes, text: str) -> bool:
        """Whether this token comes next in `text`."""
        return text.startswith(token.decode(errors="replace"), self._characters)

    def advance(self, token: bytes) -> int:
        """Move past a token; returns where its text begins."""
        start = self._characters
        self._characters += len(self._decoder.decode(token))
        return start


def logprob_entries(tokenizer: Tokenizer, logprobs: list[TokenLogprobs]) -> list[Json]:
    """The log-probabilities of tokens as chats write them, one entry per token with its alternatives."""

    def alternative(token_id: int, logprob: float) -> Json:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}

    answer = []
    for entry in logprobs:
        first, *others = map(alternative, entry.token_ids, entry.logprobs)
        answer.append({**first, "top_logprobs": others})
    return answer


def token_text(data: bytes) -> str:
    """A token as plain completions write it: its text or, if that is part of a character, its bytes (as at OpenAI)."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _ending(output: RequestOutput, has_calls: bool = False) -> Json:
    if output.finish_reason is None:
        return {"finish_reason": None}
    reason = "tool_calls" if has_calls and output.finish_reason is FinishReason.STOP else output.finish_reason.value
    return {"finish_reason": reason, "stop_reason": output.stop_reason}


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, _MIN_LOGPROB)
