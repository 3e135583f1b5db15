"""An app that answers in this process: parts as they are made, and a client that leaves."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from mini_sglang.ray_serve.in_process import HttpRequest, answer, read_request

REQUEST = HttpRequest(
    method="POST", path="/there", query=b"a=1", headers=((b"x-word", b"yes"),), client=("10.0.0.1", 7), body=b"body"
)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    body = await request.body()
    assert request.client is not None
    said = [request.method, request.url.path, request.query_params["a"], request.headers["x-word"], body.decode()]
    await JSONResponse([*said, request.client.host])(scope, receive, send)


def test_an_app_sees_the_request_as_it_came() -> None:
    async def run() -> bytes:
        return b"".join([message.get("body", b"") async for batch in answer(echo, REQUEST) for message in batch])

    assert asyncio.run(run()) == b'["POST","/there","1","yes","body","10.0.0.1"]'


def test_parts_come_while_the_app_still_runs() -> None:
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    async def run() -> list[str]:
        kinds = []
        async for batch in answer(app, REQUEST):
            kinds += [message["type"] for message in batch]
            go_on.set()
        return kinds

    assert asyncio.run(run()) == ["http.response.start", "http.response.body"]


def test_who_closes_the_answer_has_left_as_a_client_does() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append((await receive())["type"])

    async def run() -> None:
        async with aclosing(answer(app, REQUEST)) as batches:
            await anext(batches)

    asyncio.run(run())
    assert seen == ["http.request", "http.disconnect"]


def test_an_app_that_raises_ends_the_answer() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("broken")

    async def run() -> list[list[Message]]:
        return [batch async for batch in answer(app, REQUEST)]

    assert asyncio.run(run()) == []


def test_a_body_is_read_to_its_end_but_not_far_beyond_the_limit() -> None:
    parts = [b"1234"] * 10

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    scope = {**REQUEST.scope(), "headers": list(REQUEST.headers)}
    request = asyncio.run(read_request(scope, receive, 10))
    assert request is not None
    assert request.body == b"123412341234"
    request = asyncio.run(read_request(scope, receive, 1000))
    assert request is not None
    assert request.body == b"1234" * 7
    assert request.headers == REQUEST.headers


def test_a_client_that_leaves_while_it_sends_asks_for_nothing() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    assert asyncio.run(read_request(REQUEST.scope(), receive, 10)) is None
