"""The three ways in: the same requests put to an engine, to an `LLM` around it, and to a server around it.

Each returns when all requests have ended. Knows public interfaces only: methods of `Engine` and `LLM`, routes of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import httpx
import msgspec

from mini_sglang import LLM, Engine, SamplingParams, Tokenizer, TokenLogprobs
from tests import tiny
from tests.feature_matrix import tools
from tests.feature_matrix.requests import Answer, Ask, answer_of

MOST_STEPS = 10_000
_SGLANG_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


def ask_engine(engine: Engine, asks: Sequence[Ask]) -> list[Answer]:
    """Step the engine until it has answered. Raises RuntimeError if it does not."""
    outputs: dict[str, list[tiny.TokenOutput]] = {f"target {index}": [] for index in range(len(asks))}
    for name, ask in zip(outputs, asks, strict=True):
        engine.check_grammar(ask.params)  # as `LLM` and server do: while it is compiled, others would run ahead
        engine.add_request(name, list(ask.prompt), ask.params, cache_salt=ask.salt, priority=ask.priority)
    for _ in range(MOST_STEPS):
        for output in engine.step():
            if output.request_id in outputs:
                outputs[output.request_id].append(output)
        if all(of_request and of_request[-1].finish_reason is not None for of_request in outputs.values()):
            return [answer_of(of_request) for of_request in outputs.values()]
    raise RuntimeError(f"no answer after {MOST_STEPS} steps")


def ask_llm(llm: LLM, asks: Sequence[Ask]) -> list[Answer]:
    """By `generate`."""
    outputs = llm.generate(
        [list(ask.prompt) for ask in asks],
        [ask.params for ask in asks],
        priority=[ask.priority for ask in asks],
        cache_salt=[ask.salt for ask in asks],
        progress=False,
    )
    return [
        Answer(
            output.token_ids,
            output.finish_reason.value if output.finish_reason is not None else "",
            output.logprobs,
            output.prompt_logprobs,
            output.usage.cached_tokens,
            output.text,
        )
        for output in outputs
    ]


def ask_server(url: str, asks: Sequence[Ask], tokenizer: Tokenizer) -> list[Answer]:
    """By POST /generate in SGLang's words, which have a field for everything but tools: these are asked for in a chat.

    The requests are the choices of one.
    """
    first = asks[0]
    if first.params.tool_grammar is not None:
        return [_ask_chat(url, first, tokenizer)]
    body = {
        "input_ids": first.prompt,
        "sampling_params": {**_given(first.params, _SGLANG_NAMES), "n": len(asks)},
        "return_logprob": first.params.logprobs is not None or first.params.prompt_logprobs is not None,
        "logprob_start_len": -1 if first.params.prompt_logprobs is None else 0,
        "top_logprobs_num": first.params.logprobs or first.params.prompt_logprobs or 0,
        "cache_salt": first.salt,
        "priority": first.priority,
    }
    found = msgspec.json.decode(_post(url, "/generate", body), type=_Generated | list[_Generated])
    return [_generated(choice, first.params) for choice in (found if isinstance(found, list) else [found])]


class _Finish(msgspec.Struct):
    type: str


_Triple = tuple[float | None, int, str | None]  # log-probability, token id, text


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    cached_tokens: int
    output_token_logprobs: list[_Triple] = []
    output_top_logprobs: list[list[_Triple] | None] = []
    input_token_logprobs: list[_Triple] = []
    input_top_logprobs: list[list[_Triple] | None] = []


class _Generated(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: _Meta


def _generated(choice: _Generated, params: SamplingParams) -> Answer:
    meta = choice.meta_info
    output = _entries(meta.output_token_logprobs, meta.output_top_logprobs)
    prompt = _entries(meta.input_token_logprobs[1:], meta.input_top_logprobs[1:])  # the first token has none
    return Answer(
        choice.output_ids,
        meta.finish_reason.type,
        None if params.logprobs is None else output,
        None if params.prompt_logprobs is None else prompt,
        meta.cached_tokens,
        choice.text,
    )


def _entries(own: Sequence[_Triple], top: Sequence[list[_Triple] | None]) -> list[TokenLogprobs]:
    rows = [[mine, *(others or ())] for mine, others in zip(own, top or [None] * len(own), strict=True)]
    return [TokenLogprobs([entry[1] for entry in row], [entry[0] or 0.0 for entry in row]) for row in rows]


class _Token(msgspec.Struct):
    bytes: list[int]


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    tool_calls: list[_Call]


class _Choice(msgspec.Struct):
    message: _Message
    logprobs: _Logprobs
    finish_reason: str


class _Details(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details


class _Chat(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


def _ask_chat(url: str, ask: Ask, tokenizer: Tokenizer) -> Answer:
    """Its text is that of the call that the server has read in the answer; its tokens are known by their bytes."""
    body = {**tools.CHAT, **_given(ask.params, {}), "logprobs": True, "cache_salt": ask.salt, "priority": ask.priority}
    del body["tool_grammar"]
    chat = msgspec.json.decode(_post(url, "/v1/chat/completions", body), type=_Chat)
    [choice] = chat.choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", tools.NAME)
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return Answer(
        [ids[bytes(token.bytes)] for token in choice.logprobs.content],
        "stop",
        num_cached=chat.usage.prompt_tokens_details.cached_tokens,
        text=tools.as_text(call.function.arguments),
    )


def _post(url: str, route: str, body: Mapping[str, object]) -> bytes:
    response = httpx.post(url + route, json=body, timeout=60, verify=False)  # loading certificates would take longest
    assert response.status_code == 200, response.text
    return response.content


def _given(params: SamplingParams, names: Mapping[str, str]) -> dict[str, object]:
    """The parameters that are not at their defaults, by the server's `names` where it has others."""
    default = SamplingParams()
    given = {name: getattr(params, name) for name in params.__struct_fields__ if "logprobs" not in name}
    return {names.get(name, name): value for name, value in given.items() if value != getattr(default, name)}
