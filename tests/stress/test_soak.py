"""Some seconds of soak against a tiny model, and that it notices what it is there for.

Takes SOAK_SECONDS (8); with 600 it is the long form of this test. `make soak` takes hours.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stress import processes, soak, traffic
from tests.stress.processes import Held

SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))
TINY = ("--dtype", "float32", "--num-threads", "1")
CHAT = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "x"}}], "usage": {}}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(SECONDS * 2 + 300)
def test_mixed_traffic_violates_nothing(tmp_path: Path) -> None:
    server = ["--model", str(soak.tiny_model(tmp_path)), *TINY]
    run = asyncio.run(soak.soak(tmp_path, server, seconds=SECONDS, round_s=max(SECONDS / 10, 4), concurrency=8))
    assert run.violations == []
    summary = run.summary()
    assert summary["requests"] > 50
    assert {"mini_sglang", "engine_process"} <= set(summary["processes"])
    assert summary["by_kind"]["flood"]["429"] > 0
    assert summary["by_kind"]["canary"]["200"] > 0


def ask_scripted(kind: traffic.Kind, answer: Callable[[httpx.Request], httpx.Response]) -> traffic.Client:
    """Send a request of this kind to a server that answers so."""

    async def scenario() -> traffic.Client:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test") as http:
            client = traffic.Client(http, longest=100, queue=4, canaries={"Hi": [1, 2]})
            await kind(client, random.Random(0))
            return client

    return asyncio.run(scenario())


def stream(*events: Any) -> httpx.Response:
    lines = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    return httpx.Response(200, text=lines)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (traffic.canary, httpx.Response(200, json={"token_ids": [1, 3]})),
        (traffic.bad_request, httpx.Response(200, json={})),
        (traffic.bad_request, httpx.Response(500, json={"error": {"message": "x"}})),
        (traffic.bad_request, httpx.Response(429, json={"error": {"message": "x"}}, headers={"retry-after": "1"})),
        (traffic.bad_grammar, httpx.Response(200, json={})),
        (traffic.bad_grammar, httpx.Response(400, json={"error": {"message": "x", "param": "messages"}})),
        (traffic.long_prompt, httpx.Response(503, json={})),
        (traffic.long_prompt, httpx.Response(200, json={"usage": {"completion_tokens": 3}})),
        (traffic.choices, httpx.Response(200, json={"choices": [{"index": 0}]})),
        (traffic.flood, httpx.Response(200, json={"token_ids": [1, 2, 3]})),
        (traffic.flood, httpx.Response(500, json={"error": {"message": "x"}})),
        (traffic.flood, httpx.Response(429, json={})),
        (traffic.flood, httpx.Response(429, json={}, headers={"retry-after": "1"})),
        (traffic.structured, httpx.Response(200, json={**CHAT, "usage": {"completion_tokens": 1}})),
        (traffic.slow_reader, stream({"token_ids": [1]}, "[DONE]")),
        (traffic.slow_reader, stream({"token_ids": [1] * 20})),
        (traffic.slow_reader, stream({"error": {"message": "x"}}, "[DONE]")),
        (traffic.slow_reader, stream("[DONE]", "[DONE]")),
    ],
)
def test_a_wrong_answer_is_a_violation(kind: traffic.Kind, answer: httpx.Response) -> None:
    with pytest.raises(traffic.Violation):
        ask_scripted(kind, lambda _: answer)


@pytest.mark.parametrize("num_refused", [0, 7])
def test_a_flood_may_be_answered_whole_or_in_part(num_refused: int) -> None:
    refused = [httpx.Response(429, json={}, headers={"retry-after": "1"}) for _ in range(num_refused)]
    served = httpx.Response(200, json={"token_ids": [1] * traffic.FLOOD_TOKENS})
    client = ask_scripted(traffic.flood, lambda _: refused.pop() if refused else served)
    assert client.ended == Counter({("flood", "200"): 8 - num_refused, ("flood", "429"): num_refused})


def test_a_refused_request_is_sent_again_after_the_time_that_it_was_told() -> None:
    answers = [httpx.Response(429, headers={"retry-after": "1"}), httpx.Response(200, json={"token_ids": [1, 2]})]
    client = ask_scripted(traffic.canary, lambda _: answers.pop(0))
    assert dict(client.ended) == {("canary", "429"): 1, ("canary", "200"): 1}
    assert client.begun == {"canary": 2}
    assert client.choices == {"answered": 1}


def test_growth_after_warm_up_is_a_violation() -> None:
    start = Held(resident_mb=1000, descriptors=20, threads=9)
    assert processes.growth("engine", []) == []
    assert processes.growth("engine", [start, Held(2000, 90, 90), Held(1049, 28, 17)]) == []
    assert processes.growth("engine", [start, Held(1051, 29, 18)]) == [
        "engine: memory grew from 1000 to 1051 MB",
        "engine: descriptors grew from 20 to 29",
        "engine: threads grew from 9 to 18",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_this_process_holds() -> None:
    before = processes.held(os.getpid())
    with open(os.devnull), open(os.devnull):
        now = processes.held(os.getpid())
    assert now.descriptors == before.descriptors + 2
    assert before.resident_mb > 10
    assert before.threads >= 1
    assert next(processes.tree(os.getpid())) == os.getpid()
