"""More than the server can do: whom it refuses and for how long, who is served first, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.server.conftest import ScriptedEngine

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: BODY,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {**BODY, "max_tokens": 5},
    "/v1/responses": {"input": "Hi"},
    "/generate": {"prompt": "Hi"},
}


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_ends_at_its_deadline(make_app: Callable[..., FastAPI], engine: ScriptedEngine, route: str) -> None:
    engine.pause_after = 2

    async def scenario() -> None:
        async with client_of(make_app()) as client:
            for stream in (False, True):
                headers = {"x-request-timeout": "0.2"}
                answer = await client.post(route, json={**ROUTES[route], "stream": stream}, headers=headers)
                assert engine.running == {}
                assert ("timeout_error" if route == "/v1/messages" else "deadline_exceeded") in answer.text
                assert "time that the request allowed" in answer.text
                if not stream:
                    assert answer.status_code == 504
            assert (await client.get("/server_info")).json()["requests"] == []

    asyncio.run(scenario())


def test_a_deadline_ends_all_choices_and_counts_as_an_abort(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine
) -> None:
    engine.pause_after = 1
    with TestClient(make_app()) as client:
        answer = client.post(CHAT, json={**BODY, "n": 3}, headers={"x-request-timeout": "0.1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        counts = client.get("/metrics").text
    assert 'request_success_total{finished_reason="error",model_name="scripted"} 0.0' in counts
    assert 'finished_reason="abort",model_name="scripted"} 0.0' not in counts


def test_a_request_whose_deadline_has_passed_is_not_begun(client: TestClient, engine: ScriptedEngine) -> None:
    answer = client.post(CHAT, json=BODY, headers={"x-request-timeout": "1e-9"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert engine.calls == []


def test_an_answer_in_time_is_whole(client: TestClient) -> None:
    for stream in (False, True):
        answer = client.post(CHAT, json={**BODY, "stream": stream}, headers={"x-request-timeout": "60"})
        assert answer.status_code == 200
        assert "stop" in answer.text
        assert "error" not in answer.text


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_deadline_is_a_number_of_seconds(client: TestClient, value: str) -> None:
    answer = client.post(CHAT, json=BODY, headers={"x-request-timeout": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"


def test_a_key_says_whose_turn_a_request_takes(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> None:
    client = TestClient(make_app(api_key=("one", "two")))
    for headers in ({"authorization": "Bearer one"}, {"x-api-key": "two"}, {"authorization": "Bearer one"}):
        assert client.post(CHAT, json=BODY, headers=headers).status_code == 200
    assert [call.client for call in engine.calls] == ["0", "1", "0"]
    assert TestClient(make_app()).post(CHAT, json=BODY).status_code == 200
    assert engine.calls[-1].client == ""


@pytest.mark.parametrize(("keys", "taken"), [(("one", "two"), 6), (("one",), 12)])
def test_one_key_of_several_leaves_room_in_the_queue(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine, keys: tuple[str, ...], taken: int
) -> None:
    engine.pause_after = 1

    async def scenario() -> None:
        async with client_of(make_app(api_key=keys, max_waiting_requests=8)) as client:  # besides 4 that run

            def send(key: str) -> asyncio.Task[httpx.Response]:
                headers = {"authorization": f"Bearer {key}"}
                return asyncio.create_task(client.post(CHAT, json=BODY, headers=headers))

            flood = [send("one") for _ in range(30)]
            await until(lambda: len(engine.running) == taken and sum(task.done() for task in flood) == 30 - taken)
            assert {task.result().status_code for task in flood if task.done()} == {429}
            others = [send(keys[-1]) for _ in range(2)] if len(keys) > 1 else []
            await until(lambda: len(engine.running) == taken + len(others))
            for request_id in engine.request_ids:
                engine.abort(request_id)
            assert {(await task).status_code for task in others} <= {200}
            await asyncio.gather(*flood)

    asyncio.run(scenario())


def test_a_client_that_waits_as_it_is_told_is_served_before_new_ones(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine
) -> None:
    engine.pause_after = 1

    async def scenario() -> None:
        async with client_of(make_app(max_waiting_requests=4)) as client:

            def send(text: str) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post("/generate", json={"prompt": text}))

            held = [send("held") for _ in range(8)]
            await until(lambda: len(engine.running) == 8)
            refused = await send("again")
            assert refused.status_code == 429
            engine.abort(engine.request_ids[0])
            await until(lambda: len(engine.running) == 7)
            assert (await send("new")).status_code == 429
            await asyncio.sleep(int(refused.headers["retry-after"]))
            again = send("again")
            await until(lambda: len(engine.running) == 8)
            for request_id in engine.request_ids:
                engine.abort(request_id)
            assert (await again).status_code == 200
            await asyncio.gather(*held)

    asyncio.run(scenario())
