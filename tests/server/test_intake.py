"""Requests that come at once begin a few at a time, in order, and leave turns of the event loop to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
from fastapi import FastAPI

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
