"""Every API's request is put together, and its stream read, as its servers write it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mini_sglang.bench.apis import APIS, Answer, ApiName, Prompt, Sampling, read_answer
from mini_sglang.bench.http_client import Exchange

SAMPLING = Sampling(model="m", temperature=0.5, extra={"top_k": 3})
CHAT: Prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
OPENAI = {"model": "m", "max_tokens": 7, "temperature": 0.5, "ignore_eos": True, "stream": True, "top_k": 3,
          "stream_options": {"include_usage": True}}  # fmt: skip


def body(api: ApiName, prompt: Prompt, sampling: Sampling = SAMPLING) -> Any:
    return msgspec.json.decode(APIS[api].encode(prompt, 7, sampling))


@pytest.mark.parametrize(
    ("api", "prompt", "expected"),
    [
        ("completions", [1, 2], {"prompt": [1, 2], **OPENAI}),
        ("completions", CHAT, {"prompt": "Be brief.\nHi", **OPENAI}),
        ("chat", CHAT, {"messages": CHAT, **OPENAI}),
        ("chat", "Hi", {"messages": [{"role": "user", "content": "Hi"}], **OPENAI}),
        (
            "generate",
            [1, 2],
            {"prompt": [1, 2], "max_tokens": 7, "temperature": 0.5, "ignore_eos": True, "stream": True, "top_k": 3},
        ),
        (
            "sglang",
            [1, 2],
            {
                "input_ids": [1, 2],
                "sampling_params": {"max_new_tokens": 7, "temperature": 0.5, "ignore_eos": True},
                "stream": True,
                "top_k": 3,
            },
        ),
    ],
)
def test_a_body_is_what_the_api_takes(api: ApiName, prompt: Prompt, expected: dict[str, Any]) -> None:
    assert body(api, prompt) == expected


def test_sglang_takes_text_under_another_name() -> None:
    assert body("sglang", "Hi")["text"] == "Hi"


def test_what_a_strict_server_would_refuse_can_be_left_out() -> None:
    sent = body("completions", "Hi", Sampling(ignore_eos=False))
    assert sent.keys() == {"prompt", "max_tokens", "temperature", "stream", "stream_options"}


def streamed(*events: Any, times: list[float] | None = None) -> Answer:
    """The answer read from one piece per event."""
    texts = [event if isinstance(event, str) else msgspec.json.encode(event).decode() for event in events]
    chunks = [f"data: {text}\n\n".encode() for text in texts]
    return read_answer(Exchange(0.0, 9.0, 200, list(zip(times or range(1, 99), chunks, strict=False))))


def text(content: str) -> dict[str, Any]:
    return {"choices": [{"text": content, "finish_reason": None}]}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": None}]}


USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def test_a_completion_counts_events_that_have_text() -> None:
    answer = streamed(text("a"), text(""), text("b"), {"choices": [], "usage": USAGE}, "[DONE]")
    assert answer == Answer([1, 3], [1, 1], input_tokens=5, output_tokens=2, cached_tokens=4)


def test_a_chat_begins_with_its_first_content_of_any_kind() -> None:
    answer = streamed(
        delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(tool_calls=[{"index": 0}]), "[DONE]"
    )
    assert answer.times == [2, 3]


def test_usage_in_every_event_says_how_many_tokens_it_brought() -> None:
    events = [{**text("x"), "usage": {"prompt_tokens": 5, "completion_tokens": total}} for total in (1, 4, 6)]
    answer = streamed(*events, "[DONE]")
    assert (answer.counts, answer.output_tokens, answer.cached_tokens) == ([1, 3, 2], 6, None)


def test_generate_counts_token_ids_even_without_text() -> None:
    answer = streamed({"text": "", "token_ids": [1]}, {"text": "é", "token_ids": [2, 3], "usage": USAGE}, "[DONE]")
    assert (answer.times, answer.counts, answer.output_tokens, answer.cached_tokens) == ([1, 2], [1, 2], 3, 4)


def test_sglang_counts_by_its_meta_info() -> None:
    events = [
        {"text": "ab"[:n], "meta_info": {"prompt_tokens": 5, "completion_tokens": n, "cached_tokens": 1,
                                         "finish_reason": {"type": "length"}}}
        for n in (1, 2)
    ]  # fmt: skip
    answer = streamed(*events, "[DONE]")
    assert answer == Answer([1, 2], [1, 1], input_tokens=5, output_tokens=2, cached_tokens=1)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_may_be_cut_anywhere(size: int) -> None:
    data = b'data: {"choices":[{"text":"a"}]}\r\n\r\n: ping\n\ndata:{"choices":[{"text":"b"}]}\n\ndata: [DONE]\n\n'
    chunks = [(float(start), data[start : start + size]) for start in range(0, len(data), size)]
    answer = read_answer(Exchange(0.0, 9.0, 200, chunks))
    assert answer.error is None
    ends = [data.index(b"\r\n") + 1, data.index(b"\n\ndata: [DONE]")]  # where a line of data is complete
    assert answer.times == [end // size * size for end in ends]


@pytest.mark.parametrize(
    ("exchange", "error"),
    [
        (Exchange(0, 1, 200, [], "timeout"), "timeout"),
        (Exchange(0, 1, 429, [(1.0, b"busy")]), "HTTP 429"),
        (Exchange(0, 1, 200, [(1.0, b'data: {"error": {"message": "no"}}\n\n')]), "error in the stream"),
        (Exchange(0, 1, 200, [(1.0, b"data: {\n\n")]), "malformed event"),
        (Exchange(0, 1, 200, [(1.0, b"data: [DONE]\n\n")]), "no tokens"),
        (Exchange(0, 1, 200, [(1.0, b'{"choices": [{"text": "not a stream"}]}')]), "no tokens"),
        (Exchange(0, 1, 200, [(1.0, b'data: {"choices": [{"text": "a"}]}\n\n')]), "ended early"),
    ],
)
def test_an_answer_that_is_none_names_its_kind_of_error(exchange: Exchange, error: str) -> None:
    assert read_answer(exchange).error == error


def test_a_stream_without_done_is_whole_if_it_says_why_it_ended() -> None:
    assert streamed({"choices": [{"text": "a", "finish_reason": "length"}]}).error is None
