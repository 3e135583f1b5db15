"""The kinds of requests that a soak sends, and what each answer must be. A wrong answer raises Violation.

Every kind takes a `Client` and a source of chance, sends one request (a flood: many) and reads its answer, or leaves.
Knows the HTTP API alone: no process, no memory, no time of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

Json = dict[str, Any]

ANSWER_WITHIN_S = 900.0  # longer is a hang
MOST_RETRIES = 100
FLOOD_TOKENS = 48
SHARED = "You are a helpful assistant who answers briefly. "
_PLAIN = "river stone lantern quiet seven orange window table winter engine paper green mountain letter garden violin"
WORDS = [*_PLAIN.split(), "café", "🙂", "中文", "cloud.", "bridge;", "planet:", "(market)", "42", "{x}", "\n", "def"]
COLOURS = ["red", "green", "blue"]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": COLOURS}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
TOOL = {"name": "paint", "description": "Paints things in a colour.", "parameters": SCHEMA}


class Violation(Exception):
    """An answer that is not what it has to be."""


@dataclass
class Client:
    """Sends requests and counts what became of each: exactly one outcome for every request that began."""

    http: httpx.AsyncClient
    longest: int  # words of a long prompt, which must leave room for an answer
    queue: int  # requests that the server takes at once
    canaries: dict[str, list[int]] = field(default_factory=dict)  # greedy tokens by prompt
    begun: Counter[str] = field(default_factory=Counter)  # requests by kind
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind, and status or "left"
    choices: Counter[str] = field(default_factory=Counter)  # "answered": to their end; "left": perhaps not

    @contextlib.asynccontextmanager
    async def send(self, kind: str, route: str, body: Any, choices: int = 1) -> AsyncIterator[httpx.Response]:
        """One request, whose body may be read in the block. Leaving it with data unread is leaving."""
        outcome = "left"
        self.begun[kind] += 1
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        try:
            async with self.http.stream("POST", route, content=content, headers=headers) as response:
                try:
                    yield response
                finally:
                    if response.is_closed:
                        outcome = str(response.status_code)
        finally:
            self.ended[kind, outcome] += 1
            if outcome in ("200", "left"):
                self.choices["answered" if outcome == "200" else "left"] += choices

    @contextlib.asynccontextmanager
    async def accepted(
        self, kind: str, route: str, body: Any, choices: int = 1, status: int = 200
    ) -> AsyncIterator[httpx.Response]:
        """Like `send`, but a 429 is sent again after the time that it says, and any other status is wrong."""
        for _ in range(MOST_RETRIES):
            async with self.send(kind, route, body, choices) as response:
                if response.status_code == status:
                    yield response
                    return
                error = (await response.aread()).decode()
                expect(response.status_code == 429, f"status {response.status_code}: {error}", body)
            await asyncio.sleep(retry_after(response))
        raise Violation(f"refused {MOST_RETRIES} times: {shown(body)}")

    async def ask(self, kind: str, route: str, body: Json, choices: int = 1) -> Json:
        """The JSON of a plain answer."""
        async with self.accepted(kind, route, body, choices) as response:
            answer: Json = json.loads(await response.aread())
            return answer

    async def events(self, kind: str, route: str, body: Json, choices: int = 1) -> list[Json]:
        """All events of a stream that ends as it should."""
        async with self.accepted(kind, route, {**body, "stream": True}, choices) as response:
            return [event async for event in read_events(response)]


Kind = Callable[[Client, random.Random], Awaitable[None]]


def expect(holds: bool, what: str, about: object) -> None:
    if not holds:
        raise Violation(f"{what}: {shown(about)}")


def shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) < 400 else f"{text[:300]}… ({len(text)} characters)"


def retry_after(response: httpx.Response) -> float:
    given = response.headers.get("retry-after", "")
    expect(given.isdecimal() and int(given) > 0, "a 429 without a Retry-After of whole seconds", given)
    return float(given)


async def read_events(response: httpx.Response) -> AsyncIterator[Json]:
    """The events of a stream that ends with exactly one [DONE]."""
    done = 0
    async for line in response.aiter_lines():
        expect(not done or not line, "data after the end of a stream", line)
        if line == "data: [DONE]":
            done += 1
        elif line.startswith("data: "):
            event: Json = json.loads(line[6:])
            expect("error" not in event, "an error in a stream", line)
            yield event
    expect(done == 1, "a stream without its end", str(response.url))


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def sampling(chance: random.Random, most: int = 40) -> Json:
    return {
        "max_tokens": chance.randint(1, most),
        "temperature": chance.choice([0, 0.7, 1.0]),
        "top_p": chance.choice([1.0, 0.9]),
        "seed": chance.randint(0, 1000),
    }


def user(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


def check_choices(chunks: list[Json], count: int, about: Json) -> None:
    """In the chunks of a stream each choice ends exactly once."""
    reasons = [(choice["index"], choice["finish_reason"]) for chunk in chunks for choice in chunk["choices"]]
    ended = sorted(index for index, reason in reasons if reason)
    expect(ended == list(range(count)), f"choices that ended: {ended}", about)


async def chat(client: Client, chance: random.Random) -> None:
    """Two turns of a conversation, the first plain, the second streamed."""
    opening = [{"role": "system", "content": SHARED * chance.randint(1, 4)}] if chance.random() < 0.5 else []
    body: Json = {"messages": [*opening, *user(words(chance, chance.randint(1, 60)))], **sampling(chance)}
    answer = await client.ask("chat", "/v1/chat/completions", body)
    [choice] = answer["choices"]
    expect(choice["finish_reason"] in ("stop", "length"), "a finish reason", answer)
    expect(answer["usage"]["completion_tokens"] <= body["max_tokens"], "more tokens than asked for", answer)
    reply = {"role": "assistant", "content": choice["message"]["content"] or "…"}
    body = {**body, "messages": [*body["messages"], reply, *user(words(chance, 5))]}
    check_choices(await client.events("chat", "/v1/chat/completions", body), 1, body)


async def completion(client: Client, chance: random.Random) -> None:
    prompts = [words(chance, chance.randint(1, 20)) for _ in range(chance.randint(1, 2))]
    body = {"prompt": prompts, "echo": chance.random() < 0.3, "stop": [" the"], **sampling(chance)}
    answer = await client.ask("completion", "/v1/completions", body, len(prompts))
    expect([choice["index"] for choice in answer["choices"]] == list(range(len(prompts))), "choices", answer)
    if body["echo"]:
        texts = [choice["text"] for choice in answer["choices"]]
        expect(all(map(str.startswith, texts, prompts)), "an echo that is not the prompt", answer)


async def long_prompt(client: Client, chance: random.Random) -> None:
    text = words(chance, chance.randint(client.longest // 8, client.longest))
    body = {"messages": user(text), "max_tokens": 4, "ignore_eos": True}
    answer = await client.ask("long prompt", "/v1/chat/completions", body)
    expect(answer["usage"]["completion_tokens"] == 4, "not 4 tokens", answer["usage"])


async def choices(client: Client, chance: random.Random) -> None:
    count = chance.randint(2, 4)
    body = {"messages": user(words(chance, 8)), "n": count, **sampling(chance, 20)}
    if chance.random() < 0.5:
        check_choices(await client.events("n > 1", "/v1/chat/completions", body, count), count, body)
        return
    answer = await client.ask("n > 1", "/v1/chat/completions", body, count)
    expect([choice["index"] for choice in answer["choices"]] == list(range(count)), f"not {count} choices", answer)


async def logprobs(client: Client, chance: random.Random) -> None:
    body = {
        "messages": user(words(chance, 8)),
        "logprobs": True,
        "top_logprobs": 3,
        "ignore_eos": True,
        **sampling(chance),
    }
    answer = await client.ask("log-probabilities", "/v1/chat/completions", body)
    entries = answer["choices"][0]["logprobs"]["content"]
    expect(len(entries) == answer["usage"]["completion_tokens"], "not one log-probability a token", answer)
    for entry in entries:
        best = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        expect(best == sorted(best, reverse=True) and len(best) == 3, "alternatives out of order", entry)
        expect(entry["logprob"] <= best[0] <= 0, "a log-probability above the best", entry)


async def structured(client: Client, chance: random.Random) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    body = {"messages": user(words(chance, 8)), "response_format": form, **sampling(chance), "max_tokens": 200}
    answer = await client.ask("structured", "/v1/chat/completions", body)
    [choice] = answer["choices"]
    if choice["finish_reason"] == "stop":
        check_painting(choice["message"]["content"], answer)
    else:
        expect(answer["usage"]["completion_tokens"] == 200, "cut off before its limit", answer)


async def tools(client: Client, chance: random.Random) -> None:
    body = {
        "messages": user(words(chance, 8)),
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
        **sampling(chance),
        "max_tokens": 300,
    }
    answer = await client.ask("tools", "/v1/chat/completions", body)
    [choice] = answer["choices"]
    if choice["finish_reason"] == "length":
        return
    expect(choice["finish_reason"] == "tool_calls", "a finish reason", answer)
    for call in choice["message"]["tool_calls"]:
        check_painting(call["function"]["arguments"], answer)


def check_painting(text: str, answer: Json) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        raise Violation(f"no JSON: {shown(answer)}") from None
    right = set(value) == {"colour", "count"} and value["colour"] in COLOURS and value["count"] in range(100)
    expect(right, "not by its schema", answer)


async def anthropic(client: Client, chance: random.Random) -> None:
    body = {"model": None, "messages": user(words(chance, 12)), "max_tokens": chance.randint(1, 30)}
    async with client.accepted("messages", "/v1/messages", {**body, "stream": True}) as response:
        lines = [line async for line in response.aiter_lines()]
    expect(lines.count("event: message_stop") == 1, "not one message_stop", lines)


async def responses(client: Client, chance: random.Random) -> None:
    body = {"input": words(chance, 12), "max_output_tokens": chance.randint(1, 30)}
    answer = await client.ask("responses", "/v1/responses", body)
    expect(answer["status"] in ("completed", "incomplete"), "a status", answer)


async def slow_reader(client: Client, chance: random.Random) -> None:
    """Reads a stream at a pace of its own, and misses nothing."""
    body = {"prompt": words(chance, 5), "max_tokens": chance.randint(20, 60), "ignore_eos": True, "stream": True}
    tokens = 0
    async with client.accepted("slow reader", "/generate", body) as response:
        async for event in read_events(response):
            tokens += len(event["token_ids"])
            await asyncio.sleep(chance.uniform(0, 0.3))
    expect(tokens == body["max_tokens"], f"{tokens} tokens", body)


async def leaver(client: Client, chance: random.Random) -> None:
    """A stream that is left before its first token, in the middle, in the step in which it ends, or at any moment.

    Prompts share beginnings, so that pages are shared when they are given back.
    """
    limit = chance.randint(1, 40)
    body = {
        "prompt": SHARED * chance.randint(0, 4) + f"Question {chance.randint(0, 50)}:",
        "max_tokens": limit,
        "ignore_eos": True,
        "stream": True,
        "seed": chance.randint(0, 1000),
        "stop": chance.choice([[], [" the"]]),
    }
    how = chance.choice(["before", "middle", "last", "timer"])
    leave_after = {"before": 0, "middle": chance.randint(0, limit), "last": limit - 1}.get(how, limit + 1)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(chance.uniform(0, 2.0) if how in ("before", "timer") else None):
            async with client.send("left", "/generate", body) as response:
                seen = 0
                async for line in response.aiter_lines():
                    seen += line.startswith("data: {")
                    if seen >= leave_after:
                        return


async def plain_leaver(client: Client, chance: random.Random) -> None:
    """A request whose client waits for one answer with several choices, and closes the connection instead."""
    body = {"messages": user(words(chance, 200)), "n": 2, "max_tokens": 100, "ignore_eos": True}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(chance.uniform(0, 2.0)):
            async with client.send("left", "/v1/chat/completions", body, 2) as response:
                await response.aread()


async def half_body(client: Client, chance: random.Random) -> None:
    """A connection that is closed in the middle of a head or a body. Nobody waits for an answer."""
    url = client.http.base_url
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(head[: chance.randint(1, len(head))])
    await writer.drain()
    await asyncio.sleep(chance.uniform(0, 0.2))
    writer.close()


BAD: list[tuple[int, str, Any]] = [
    (400, "/v1/chat/completions", b'{"messages": [{"role": "us'),
    (400, "/v1/chat/completions", {}),
    (400, "/v1/chat/completions", {"messages": []}),
    (400, "/v1/chat/completions", {"messages": user("Hi"), "temperature": -1}),
    (400, "/v1/chat/completions", {"messages": user("Hi"), "temperature": "warm"}),
    (400, "/v1/chat/completions", {"messages": user("Hi"), "n": 0}),
    (400, "/v1/chat/completions", {"messages": user("Hi"), "max_tokens": -1}),
    (400, "/v1/chat/completions", {"messages": user("Hi"), "top_logprobs": 99, "logprobs": True}),
    (400, "/v1/chat/completions", {"messages": user("Hi"), "no_such_field": 1}),
    (400, "/v1/chat/completions", {"messages": [{"role": "wizard", "content": "Hi"}]}),
    (400, "/v1/chat/completions", {"messages": user("word " * 30_000)}),
    (404, "/v1/chat/completions", {"messages": user("Hi"), "model": "nobody"}),
    (400, "/v1/completions", {"prompt": [-1]}),
    (400, "/v1/completions", {"prompt": []}),
    (400, "/v1/completions", {"prompt": [10**9], "max_tokens": 1}),
    (400, "/v1/messages", {"messages": user("Hi"), "max_tokens": 0}),
    (400, "/v1/responses", {"input": 5}),
    (400, "/generate", {"prompt": "Hi", "stop": ["x" * 5000]}),
    (404, "/no/such/route", {}),
    (405, "/v1/models", {}),
]


async def bad_request(client: Client, chance: random.Random) -> None:
    """Gets its own status with an error in words, streamed or not."""
    status, route, body = chance.choice(BAD)
    async with client.send("bad", route, body) as response:
        answer = await response.aread()
    expect(
        response.status_code == status, f"status {response.status_code}, not {status}: {shown(answer.decode())}", body
    )
    expect(bool(json.loads(answer)["error"]["message"]), "an error without words", answer.decode())


async def bad_grammar(client: Client, chance: random.Random) -> None:
    """Is compiled when its request has a place, which a full server has not; refused then, streamed or not."""
    body = {"messages": user("Hi"), "regex": "(", "stream": chance.random() < 0.5}
    async with client.accepted("bad grammar", "/v1/chat/completions", body, status=400) as response:
        answer = await response.aread()
    expect(json.loads(answer)["error"]["param"] == "regex", "an error that does not name the field", answer.decode())


async def flood(client: Client, chance: random.Random) -> None:
    """More requests at once than the server takes: it answers some and refuses the others at once, with a 429.

    A server that is fast beside its client answers them all.
    """
    statuses = await asyncio.gather(*(_one_of_flood(client, chance) for _ in range(2 * client.queue)))
    expect(200 in statuses, "a flood of which nothing was answered", dict(Counter(statuses)))


async def _one_of_flood(client: Client, chance: random.Random) -> int:
    # long enough that none has ended when the last one comes, unless the server is far faster than its client
    body = {"prompt": words(chance, 3), "max_tokens": FLOOD_TOKENS, "ignore_eos": True}
    async with client.send("flood", "/generate", body) as response:
        answer = json.loads(await response.aread())
    if response.status_code == 429:
        retry_after(response)
    else:
        is_right = response.status_code == 200 and len(answer["token_ids"]) == FLOOD_TOKENS
        expect(is_right, f"status {response.status_code}, not {FLOOD_TOKENS} tokens", answer)
    return response.status_code


async def canary(client: Client, chance: random.Random) -> None:
    """A greedy request, whatever runs beside it, has the tokens that it had alone."""
    prompt, expected = chance.choice(list(client.canaries.items()))
    await check_canary(client, prompt, expected)


async def check_canary(client: Client, prompt: str, expected: list[int]) -> None:
    tokens = (await client.ask("canary", "/generate", canary_body(prompt, len(expected))))["token_ids"]
    expect(tokens == expected, f"a canary sang {tokens}, not {expected}", prompt)


def canary_body(prompt: str, num_tokens: int) -> Json:
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


async def find_longest(client: Client, context_length: int) -> None:
    """Set how many words make a long prompt: they take at most two thirds of the context."""
    answer = (await client.http.post("/tokenize", json={"prompt": " ".join(WORDS)})).raise_for_status().json()
    client.longest = context_length * len(WORDS) * 2 // (3 * answer["count"] + 3)


async def choose_canaries(client: Client, count: int = 4, num_tokens: int = 8) -> None:
    """Run many prompts alone and keep those whose tokens lead by most: rounding in another batch changes none of them.

    The shortest lead of each must be clear, or comparing tokens would prove nothing.
    """
    chance = random.Random(1)
    prompts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time", "def fibonacci(n):"]
    prompts += [words(chance, length) for length in [5] * 10 + [client.longest // 4] * 4]
    leads, tokens = {}, {}
    for prompt in prompts:
        answer = await client.ask("canary", "/generate", {**canary_body(prompt, num_tokens), "logprobs": 2})
        tokens[prompt] = answer["token_ids"]
        leads[prompt] = min(map(_lead, answer["logprobs"]))
    varied = [prompt for prompt in prompts if len(set(tokens[prompt])) > num_tokens // 2] or prompts
    best = sorted(varied, key=leads.__getitem__)[-count:]
    expect(leads[best[0]] > 0.02, "no prompt has clear greedy tokens", leads)
    client.canaries = {prompt: tokens[prompt] for prompt in best}


def _lead(entry: Json) -> float:
    """By how much the token was likelier than the next one, in nats."""
    others = [other["logprob"] for other in entry["top_logprobs"] if other["token_id"] != entry["token_id"]]
    return float(entry["logprob"] - max(others))


KINDS: dict[Kind, float] = {  # how often each is sent, relative to the others
    chat: 5,
    completion: 3,
    long_prompt: 1,
    choices: 2,
    logprobs: 2,
    structured: 2,
    tools: 1,
    anthropic: 2,
    responses: 2,
    slow_reader: 1,
    leaver: 6,
    plain_leaver: 2,
    half_body: 1,
    bad_request: 4,
    bad_grammar: 0.5,
    canary: 3,
}
