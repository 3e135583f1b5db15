"""Inputs that have broken other engines, sent to a real server with the built-in model; each test is one kind of them.

The pool is small, so that pages are reused and requests are preempted. Text is compared at temperature 0 in float32.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from mini_sglang.text.tokenizer import Tokenizer
from tests.server.conftest import StartServer
from tests.tiny import RunningServer

POOL_TOKENS = 1024
CHUNK = 128
MODEL = "smollm2-135m"

Json = dict[str, Any]


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Any:
    pool = ("--page-size", "16", "--num-pages", str(POOL_TOKENS // 16))
    return start_server("--model", MODEL, "--dtype", "float32", "--max-prefill-tokens", str(CHUNK), *pool)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def canary_text(server: RunningServer) -> str:
    return ask(server, "Name three colours.", max_tokens=12)


@pytest.fixture(autouse=True)
def server_is_unharmed(server: RunningServer, canary_text: str) -> Iterator[None]:
    """After every case the server gives the answer it gave when fresh, and holds nothing but its cache."""
    yield
    assert ask(server, "Name three colours.", max_tokens=12) == canary_text
    metrics = gauges(server)
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == metrics["kv_used_pages"] == 0
    assert metrics["kv_free_pages"] + metrics["kv_cached_pages"] == metrics["kv_pages"]


def chat(server: RunningServer, content: str, **fields: Any) -> Json:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
    response = server.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def ask(server: RunningServer, content: str, **fields: Any) -> str:
    return str(chat(server, content, **fields)["choices"][0]["message"]["content"])


def complete(server: RunningServer, prompt: Any, **fields: Any) -> Json:
    response = server.post("/v1/completions", **{"prompt": prompt, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def text_of(server: RunningServer, prompt: Any, **fields: Any) -> str:
    return str(complete(server, prompt, **fields)["choices"][0]["text"])


def stream(server: RunningServer, route: str, body: Json) -> Generator[Json, None, None]:
    """The JSON events of a stream; [DONE] is checked."""
    with httpx.stream("POST", server.url + route, json={**body, "stream": True}, timeout=120) as response:
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        for line in lines:
            if line == "[DONE]":
                break
            yield json.loads(line)
        else:
            pytest.fail("the stream ended without [DONE]")
        assert list(lines) == []


def streamed_text(server: RunningServer, content: str, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
    chunks = stream(server, "/v1/chat/completions", body)
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def gauges(server: RunningServer) -> dict[str, float]:
    """All metrics by name, and by labels beyond the model's name."""
    text = re.sub(r',?model_name="[^"]*"', "", server.get("/metrics").text).replace("{}", "")
    pairs = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("mini_sglang:"): float(value) for name, _, value in pairs}


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of calls made at the same time, in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_the_stock_client_chats_plain_and_streamed(client: openai.OpenAI) -> None:
    fields: Json = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "temperature": 0}
    plain = client.chat.completions.create(**fields, max_tokens=16)
    chunks = list(
        client.chat.completions.create(**fields, max_tokens=16, stream=True, stream_options={"include_usage": True})
    )
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == plain.choices[0].message.content
    [usage] = [chunk.usage for chunk in chunks if chunk.usage]
    assert plain.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (plain.usage.prompt_tokens, plain.usage.completion_tokens)
    assert plain.choices[0].finish_reason in ("stop", "length")


def test_the_stock_client_completes_and_gets_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0, logprobs=3
    )
    choice = answer.choices[0]
    assert choice.text.startswith(" Paris")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, logprob, best in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True
    ):
        assert best[token] == logprob == max(best.values())  # greedy
        assert len(best) == 3


def test_the_stock_client_understands_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match="audio"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], audio={"voice": "x", "format": "wav"}
        )


def test_each_prompt_of_a_list_is_continued_on_its_own(server: RunningServer) -> None:
    prompts = ["1, 2, 3,", "Monday, Tuesday,", "a, b, c, d,"]
    alone = [text_of(server, prompt, max_tokens=6) for prompt in prompts]
    choices = complete(server, prompts, max_tokens=6)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["text"] for choice in choices] == alone
    sampled = complete(server, prompts, max_tokens=6, n=2, temperature=0.3, seed=1)["choices"]
    assert [choice["index"] for choice in sampled] == list(range(6))
    assert all(any(c.isdigit() for c in choice["text"]) for choice in sampled[:2])


def test_no_parameter_is_taken_and_dropped(server: RunningServer) -> None:
    prompt, fields = "a b a b a b a b a b a b", {"max_tokens": 12, "ignore_eos": True}
    plain = text_of(server, prompt, **fields)
    assert plain == " a b" * 6
    stopped = complete(server, prompt, **fields, stop=["b a"])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == (" a ", "stop", "b a")
    assert text_of(server, prompt, **fields, frequency_penalty=2.0) != plain
    assert text_of(server, prompt, **fields, presence_penalty=2.0) != plain
    assert text_of(server, prompt, **fields, repetition_penalty=1.5) != plain
    assert text_of(server, prompt, **fields, temperature=1.5, seed=1) != plain
    assert len(complete(server, prompt, **fields, n=2)["choices"]) == 2


def test_tokens_can_be_forced_and_forbidden(server: RunningServer, builtin_tokenizer: Tokenizer) -> None:
    [paris] = builtin_tokenizer.encode(" Paris")
    [london] = builtin_tokenizer.encode(" London")
    prompt = "The capital of France is"
    assert text_of(server, prompt, max_tokens=1) == " Paris"
    assert text_of(server, prompt, max_tokens=1, logit_bias={str(paris): -100}) != " Paris"
    assert text_of(server, prompt, max_tokens=2, allowed_token_ids=[london]) == " London London"
    assert text_of(server, prompt, max_tokens=5, stop_token_ids=[paris]) == ""


def test_top_k_zero_minus_one_and_huge_are_off(server: RunningServer) -> None:
    def words(**fields: Any) -> list[str]:
        answer = chat(server, "Give me a random word.", max_tokens=1, n=30, temperature=1.5, seed=1, **fields)
        return [choice["message"]["content"] for choice in answer["choices"]]

    off = words()
    assert len(set(off)) > 10
    for top_k in (0, -1, 10_000_000):
        assert words(top_k=top_k) == off
    assert len(set(words(top_k=1))) == 1


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_seed_fixes_the_text_in_any_company(server: RunningServer, route: str) -> None:
    def sample(seed: int | None) -> str:
        fields = {"temperature": 1, "max_tokens": 16, "seed": seed}
        if route == "chat":
            return ask(server, "Write a random sentence.", **fields)
        return text_of(server, "A random sentence:", **fields)

    alone = sample(7)
    assert sample(7) == alone  # now from the prefix cache
    assert sample(8) != alone
    assert len({sample(None) for _ in range(3)}) > 1
    assert at_once([partial(sample, 7), *[partial(sample, None)] * 5])[0] == alone


def test_text_held_back_for_a_stop_string_comes_out(server: RunningServer) -> None:
    question = "Name five rivers."
    text = ask(server, question, max_tokens=20)
    for stop in ([text[-4:] + "QQQ"], [text[6:9] + "QQQ"], []):
        assert ask(server, question, max_tokens=20, stop=stop) == text
        assert streamed_text(server, question, max_tokens=20, stop=stop) == text


def test_ignore_eos_gives_exactly_the_tokens_asked_for(server: RunningServer) -> None:
    def count(limit: int) -> tuple[int, str]:
        answer = chat(server, "Reply with OK.", max_tokens=limit, ignore_eos=True)
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    limits = [10, 20, 30, 50]
    assert at_once([partial(count, limit) for limit in limits]) == [(limit, "length") for limit in limits]


def test_a_limit_inside_a_character_is_the_same_in_both_modes(server: RunningServer) -> None:
    bias = {"157": 60, "233": 50}  # bytes of which emoji begin: pieces of characters come often
    question = "Answer with ten different emoji only."
    for limit in range(1, 7):
        plain = ask(server, question, max_tokens=limit, logit_bias=bias, ignore_eos=True)
        assert streamed_text(server, question, max_tokens=limit, logit_bias=bias, ignore_eos=True) == plain


def test_equal_prompts_at_once(server: RunningServer) -> None:
    prompt = "red blue " * 120
    alone = text_of(server, prompt, max_tokens=8)
    server.post("/flush_cache")
    assert at_once([partial(text_of, server, prompt, max_tokens=8)] * 13) == [alone] * 13


def test_pages_of_running_requests_are_never_reused(server: RunningServer) -> None:
    shared = "The quick brown fox jumps over the lazy dog. " * 20
    tails = ["Now tell me about ships:", "Now tell me about trees:"]
    alone = [text_of(server, shared + tail, max_tokens=24, ignore_eos=True) for tail in tails]
    server.post("/flush_cache")
    short = [f"Number {index} of the list of things:" for index in range(8)]
    alone_short = [text_of(server, prompt, max_tokens=6) for prompt in short]
    server.post("/flush_cache")
    calls = [partial(text_of, server, shared + tail, max_tokens=24, ignore_eos=True) for tail in tails]
    calls += [partial(text_of, server, prompt, max_tokens=6) for prompt in short]
    assert at_once(calls) == alone + alone_short


def test_a_pool_too_small_for_all_preempts_and_loses_nothing(server: RunningServer) -> None:
    complete(server, "Hi", n=64, max_tokens=1, temperature=1)  # short answers make the next admissions bold
    prompts = [[500 + index, *range(100, 239)] for index in range(6)]  # 6 x (140 + 48) tokens, more than the pool
    preemptions = gauges(server)["num_preemptions_total"]
    fields: Json = {"max_tokens": 48, "ignore_eos": True}
    calls = [partial(text_of, server, prompt, **fields) for prompt in prompts]
    undisturbed = [text for start in (0, 2, 4) for text in at_once(calls[start : start + 2])]
    assert at_once(calls) == undisturbed
    assert gauges(server)["num_preemptions_total"] > preemptions


def test_a_request_that_outgrows_the_pool_ends_with_length(server: RunningServer) -> None:
    prompt = [(index % 50) + 300 for index in range(POOL_TOKENS - 40)]
    short: Json = {"max_tokens": 10}
    lone = text_of(server, "1, 2, 3,", **short)
    big, small = at_once(
        [
            partial(complete, server, prompt, max_tokens=2000, ignore_eos=True),
            partial(text_of, server, "1, 2, 3,", **short),
        ]
    )
    assert big["choices"][0]["finish_reason"] == "length"
    assert 40 <= big["usage"]["completion_tokens"] <= 41  # what is sampled last needs no place in the pool
    assert small == lone
    refused = server.post("/v1/completions", prompt=[5] * (POOL_TOKENS + 1))
    assert refused.status_code == 400
    assert str(POOL_TOKENS + 1) in refused.json()["error"]["message"]
    assert str(POOL_TOKENS) in refused.json()["error"]["message"]


def test_a_stream_goes_on_while_long_prompts_are_computed(server: RunningServer) -> None:
    num_chunks = 4
    prompt = [(7 * index) % 1000 + 300 for index in range(num_chunks * CHUNK)]
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    lone = text_of(server, **body)
    texts, during = [], 0
    with ThreadPoolExecutor(1) as pool:
        long = None
        for chunk in stream(server, "/v1/completions", body):
            texts.append(chunk["choices"][0]["text"])
            if len(texts) == 10:
                long = pool.submit(complete, server, prompt, max_tokens=1)
            during += long is not None and not long.done()
    assert "".join(texts) == lone
    assert during >= num_chunks - 1  # one token for each chunk


def test_text_parts_are_the_string_they_make(server: RunningServer) -> None:
    def prompt_tokens(content: Any) -> int:
        return int(chat(server, content, max_tokens=1)["usage"]["prompt_tokens"])

    parts: Any = [{"type": "text", "text": "Name the capital"}, {"type": "text", "text": " of Peru."}]
    assert prompt_tokens(parts) == prompt_tokens("Name the capital of Peru.")


def test_the_prompt_has_what_the_template_writes_and_nothing_twice(
    server: RunningServer, builtin_tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for _ in range(3):
        answer = server.post("/v1/chat/completions", messages=messages, max_tokens=1).json()
        assert answer["usage"]["prompt_tokens"] == len(builtin_tokenizer.apply_chat_template(messages))
        messages += [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go <|im_end|> on."}]


@pytest.mark.parametrize("arguments", ['{"zone": "Lima"}', {"zone": "Lima"}, "", "5", "[1]", "not json"])
def test_a_conversation_with_calls_and_results(server: RunningServer, arguments: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "What time is it in Lima?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "09:30"},
    ]
    parameters = {"type": "object", "properties": {"zone": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "get_time", "parameters": parameters}}]
    answer = server.post("/v1/chat/completions", messages=messages, tools=tools, temperature=0, max_tokens=24)
    assert answer.status_code == 200, answer.text
    if arguments == {"zone": "Lima"}:
        assert "9:30" in answer.json()["choices"][0]["message"]["content"]


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI, choice: Any) -> None:
    fields: Json = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER, CLOCK],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 100,
    }
    [whole] = client.chat.completions.create(**fields).choices
    assert whole.finish_reason == "tool_calls"
    calls: Any = whole.message.tool_calls
    [call] = calls
    arguments = json.loads(call.function.arguments)
    if choice != "required":
        assert call.function.name == "get_weather"
    if call.function.name == "get_weather":
        assert arguments.keys() == {"city", "unit"}
        assert arguments["unit"] in ("C", "F")
    chunks = client.chat.completions.create(**fields, stream=True)
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    texts = [piece.function.arguments or "" for piece in pieces if piece.function]
    assert "".join(texts) == call.function.arguments
    assert len(texts) > 2 or arguments == {}


def deep_schema(depth: int) -> Json:
    return {"type": "object", "properties": {"a": deep_schema(depth - 1)}} if depth else {"type": "string"}


HOSTILE: list[Any] = [
    {"type": "no such type"},
    {"$ref": "#/nowhere"},
    {"type": "string", "pattern": "(a*)*(b|c{1,9999}){1,9999}"},
    {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
    deep_schema(60),
]


@pytest.mark.parametrize("parameters", HOSTILE, ids=range(len(HOSTILE)))
def test_schemas_that_cannot_be_followed(server: RunningServer, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 4}
    start = time.monotonic()
    forced = server.post("/v1/chat/completions", **body, tool_choice="required")
    assert forced.status_code in (200, 400), forced.text
    if forced.status_code == 400:
        assert forced.json()["error"]["param"] in ("tools", "messages")
        assert time.monotonic() - start < 5  # on a busy machine
    assert server.post("/v1/chat/completions", **body).status_code in (200, 400)


def test_a_repeated_conversation_comes_from_the_cache(server: RunningServer) -> None:
    server.post("/flush_cache")
    first = chat(server, "Tell me about the sea, please.", max_tokens=4)["usage"]
    second = chat(server, "Tell me about the sea, please.", max_tokens=4)["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens_details"]["cached_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1
    salted = chat(server, "Tell me about the sea, please.", max_tokens=4, cache_salt="mine")["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_bookkeeping_costs_no_cache(server: RunningServer) -> None:
    def cached(nonce: str) -> int:
        header = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={nonce};"
        system = [{"type": "text", "text": text} for text in (header, "You are an agent that lists files.")]
        messages = [{"role": "user", "content": "Hi"}]
        answer = server.post("/v1/messages", system=system, messages=messages, max_tokens=2).json()
        assert answer["usage"]["input_tokens"] >= 1
        return int(answer["usage"]["cache_read_input_tokens"])

    server.post("/flush_cache")
    assert cached("36ee5") == 0
    assert cached("0aaa9") > 16


def test_counters_return_to_zero_when_all_clients_leave_at_once(server: RunningServer) -> None:
    def ended() -> dict[str, float]:
        return {name: value for name, value in gauges(server).items() if name.startswith("request_success_total")}

    before = ended()
    body: Json = {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True}
    streams = [stream(server, "/generate", body) for _ in range(30)]
    at_once([partial(next, one) for one in streams[:10]])
    for one in streams:
        one.close()  # the other 20 have not begun
    while gauges(server)["num_requests_running"]:
        pass
    after = ended()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed == {'request_success_total{finished_reason="abort"}': 10}
