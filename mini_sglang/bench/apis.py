"""Requests and streamed answers of four APIs: OpenAI's two routes, and /generate in this project's and SGLang's form.

Every answer is streamed; the time of a token is that of the piece of the stream that completes its event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from mini_sglang.bench.http_client import Exchange

ApiName = Literal["completions", "chat", "generate", "sglang"]
Message = dict[str, str]  # role and content
Prompt = list[int] | str | list[Message]
Json = dict[str, Any]


@dataclass(frozen=True)
class Sampling:
    """What is the same for all requests of a run."""

    model: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields of the body


@dataclass(frozen=True)
class Api:
    """A route, and how a prompt is put into its body."""

    name: ApiName
    path: str

    def encode(self, prompt: Prompt, output_length: int, sampling: Sampling) -> bytes:
        """The JSON body of a request that streams `output_length` tokens."""
        how: Json = {"temperature": sampling.temperature}
        if sampling.ignore_eos:  # not every server knows it
            how["ignore_eos"] = True
        body: Json
        if self.name == "sglang":
            plain = _plain(prompt)
            name = "text" if isinstance(plain, str) else "input_ids"
            body = {name: plain, "sampling_params": {"max_new_tokens": output_length, **how}}
        elif self.name == "chat":
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            body = {"messages": messages, "max_tokens": output_length, **how}
        else:
            body = {"prompt": _plain(prompt), "max_tokens": output_length, **how}
        if self.path.startswith("/v1/"):
            body["stream_options"] = {"include_usage": True}
            if sampling.model is not None:
                body["model"] = sampling.model
        return msgspec.json.encode({**body, "stream": True, **sampling.extra})


def _plain(prompt: Prompt) -> Prompt:
    """A prompt for a route without messages: their texts, one under the other."""
    texts = [part["content"] for part in prompt if isinstance(part, dict)]
    return "\n".join(texts) if texts else prompt


APIS: dict[ApiName, Api] = {
    api.name: api
    for api in (
        Api("completions", "/v1/completions"),
        Api("chat", "/v1/chat/completions"),
        Api("generate", "/generate"),
        Api("sglang", "/generate"),
    )
}


@dataclass(slots=True)
class Answer:
    """What came of a request. `times` has the arrival of each event that brought tokens, `counts` how many it brought.

    Counts are the server's where it says them with each event, else 1.
    """

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    input_tokens: int | None = None  # None: the server does not say
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None  # its kind, in a few words
    detail: str = ""  # what the server said of it


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # SGLang's meta_info
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """An event of any of the APIs."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    output_ids: list[int] | None = None
    meta_info: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def read_answer(exchange: Exchange) -> Answer:
    """The tokens and counts of a streamed answer, or the kind of error it ended with."""
    answer = Answer(error=exchange.error)
    if answer.error is None and exchange.status != 200:
        answer.error, answer.detail = f"HTTP {exchange.status}", exchange.body.decode(errors="replace")
    if answer.error is not None:
        return answer
    is_whole = False
    for when, data in _events(exchange.chunks):
        if data == b"[DONE]":
            is_whole = True
            break
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            answer.error, answer.detail = "malformed event", f"{error}: {data[:200]!r}"
            return answer
        if event.error is not None:
            answer.error, answer.detail = "error in the stream", msgspec.json.encode(event.error).decode()
            return answer
        _add(answer, when, event)
        is_whole = is_whole or any(choice.finish_reason for choice in event.choices)
    if not answer.times:
        answer.error = "no tokens"
    elif not is_whole:
        answer.error = "ended early"
    return answer


def _events(chunks: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """When each line of data of a stream of server-sent events was complete, and what it says."""
    rest = b""
    for when, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield when, line[5:].strip()


def _add(answer: Answer, when: float, event: _Event) -> None:
    """Count what `event` brought."""
    usage = event.usage or event.meta_info
    before = answer.output_tokens
    if usage is not None:
        answer.input_tokens = usage.prompt_tokens
        details = usage.prompt_tokens_details
        cached = usage.cached_tokens if details is None else details.cached_tokens
        answer.cached_tokens = answer.cached_tokens if cached is None else cached
        answer.output_tokens = usage.completion_tokens or before
    token_ids = event.token_ids or event.output_ids
    if token_ids or event.text or any(map(_has_tokens, event.choices)):
        said = 0 if usage is None else answer.output_tokens - before
        count = len(token_ids) if token_ids else max(said, 1)
        answer.output_tokens = max(answer.output_tokens, before + count)
        answer.times.append(when)
        answer.counts.append(count)


def _has_tokens(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
