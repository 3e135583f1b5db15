"""Requests that come at once begin a few at a time, in order, and leave turns of the event loop to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from mini_sglang.server import intake
from mini_sglang.server.config import ServerConfig
from mini_sglang.server.intake import RequestPacer
from tests.server.conftest import ScriptedEngine


def test_a_few_enter_in_each_turn_and_in_order() -> None:
    async def scenario() -> None:
        pacer = RequestPacer(per_turn=3)
        entered: list[int] = []

        async def come(number: int) -> None:
            await pacer.wait()
            entered.append(number)

        tasks = [asyncio.create_task(come(number)) for number in range(10)]
        before = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            assert len(entered) - before <= 3
            before = len(entered)
        assert entered == list(range(10))

    asyncio.run(scenario())


def test_a_caller_that_leaves_the_queue_takes_no_place() -> None:
    async def scenario() -> None:
        pacer = RequestPacer(per_turn=1)
        tasks = [asyncio.create_task(pacer.wait()) for _ in range(5)]
        await asyncio.sleep(0)
        for task in tasks[1:4]:
            task.cancel()
        async with asyncio.timeout(5):
            await tasks[4]
            await pacer.wait()

    asyncio.run(scenario())


@pytest.mark.parametrize("answers", [True, False])
def test_a_client_that_cannot_be_asked_gets_what_comes_in_time(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    """HTTP/1.0 has no interim answer: what has not begun when the time is over is given up."""
    monkeypatch.setattr(intake, "UNASKED_S", 0.3)
    ended: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # the request
        if answers:
            await asyncio.sleep(0.1)
            await PlainTextResponse("late")(scope, receive, send)
        ended.append((await receive())["type"])

    async def scenario() -> None:
        config, state = uvicorn.Config(app, lifespan="off"), uvicorn.server.ServerState()
        uvicorns = {"config": config, "server_state": state, "app_state": {}}
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: intake.Connection(limits=ServerConfig(), most=9, **uvicorns), "127.0.0.1", 0
        )
        async with server, asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            writer.write_eof()
            assert (await reader.read()).endswith(b"late") == answers
            while not ended:
                await asyncio.sleep(0.01)
            writer.close()

    asyncio.run(scenario())
    assert ended == ["http.disconnect"]


def test_the_event_loop_goes_on_while_many_requests_begin(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine
) -> None:
    engine.pause_after = 0
    num_requests = 60

    async def scenario() -> None:
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            tasks = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(num_requests)]
            before = 0
            while len(engine.running) < num_requests:
                await asyncio.sleep(0)
                assert len(engine.running) - before <= 4
                before = len(engine.running)
            for request_id in engine.request_ids:
                engine.abort(request_id)
            assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}

    asyncio.run(scenario())
