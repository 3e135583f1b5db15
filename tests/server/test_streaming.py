"""Streams as a client sees them on the wire, and clients that leave: spoken to in ASGI, to see every message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from mini_sglang.errors import FieldError
from mini_sglang.server import answering
from tests.server.conftest import ScriptedEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    "/generate": {"prompt": "Hi"},
}


class Connection:
    """One HTTP request over ASGI; `leave` is the client closing its socket."""

    def __init__(self, app: FastAPI, route: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.slow: asyncio.Event | None = None  # while set and not triggered, sending blocks
        self._left = asyncio.Event()
        self._incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": route,
            "raw_path": route.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
            "client": ("test", 1),
            "server": ("test", 80),
            "state": {},
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]

    async def _receive(self) -> Any:
        if self._incoming:
            return self._incoming.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self.slow is not None:
            await self.slow.wait()
        self.sent.append(message)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("route", ROUTES)
def test_every_token_is_sent_when_it_is_there(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine, route: str
) -> None:
    engine.pause_after = 3

    async def scenario() -> None:
        connection = Connection(make_app(), route, {**ROUTES[route], "stream": True})
        opening = 1 if "chat" in route else 0
        await until(lambda: len(connection.bodies) == 3 + opening)
        assert connection.sent[0]["status"] == 200
        assert all(body.startswith(b"data: {") and body.endswith(b"\n\n") for body in connection.bodies)
        connection.leave()
        await connection.task

    asyncio.run(scenario())


COMMENT = b": ping\n\n"
PINGS = {
    CHAT: COMMENT,
    COMPLETIONS: COMMENT,
    "/generate": COMMENT,
    "/v1/responses": COMMENT,
    "/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n',
}
MORE_ROUTES = {
    **ROUTES,
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
}


@pytest.mark.parametrize("pause_after", [0, 2])
@pytest.mark.parametrize("route", PINGS)
def test_a_stream_never_falls_silent(
    make_app: Callable[..., FastAPI],
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    pause_after: int,
) -> None:
    monkeypatch.setattr(answering, "PING_S", 0.02)
    engine.pause_after = pause_after

    async def scenario() -> None:
        connection = Connection(make_app(), route, {**MORE_ROUTES[route], "stream": True})
        await until(lambda: connection.bodies.count(PINGS[route]) >= 3)
        assert (connection.sent[0]["type"], connection.sent[0]["status"]) == ("http.response.start", 200)
        assert connection.bodies[-2:] == [PINGS[route]] * 2
        engine.abort(engine.request_ids[0])
        await connection.task
        assert connection.bodies[-1] == b""
        assert len(connection.bodies) - connection.bodies.count(PINGS[route]) > 1 + pause_after

    asyncio.run(scenario())


@pytest.mark.parametrize("route", PINGS)
def test_an_error_keeps_its_status_unless_a_ping_was_first(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    async def ask(seconds: float) -> Connection:
        async def generate(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(seconds)
            raise FieldError("prompt", "will not do")
            yield

        monkeypatch.setattr(engine, "generate", generate)
        monkeypatch.setattr(answering, "PING_S", 0.1)
        connection = Connection(make_app(), route, {**MORE_ROUTES[route], "stream": True})
        await connection.task
        return connection

    early, late = asyncio.run(ask(0)), asyncio.run(ask(0.15))
    assert early.sent[0]["status"] == 400
    assert late.sent[0]["status"] == 200
    assert late.bodies[0] == PINGS[route]
    assert any(b"will not do" in body for body in late.bodies)
    assert late.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_after", [0, 2])
@pytest.mark.parametrize(("route", "n"), [*((route, 1) for route in ROUTES), (CHAT, 3), (COMPLETIONS, 3)])
def test_a_client_that_leaves_ends_its_requests(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine, route: str, pause_after: int, stream: bool, n: int
) -> None:
    engine.pause_after = pause_after

    async def scenario() -> None:
        app = make_app()
        body = {**ROUTES[route], "stream": stream, **({"n": n} if n > 1 else {})}
        connection = Connection(app, route, body)
        await until(lambda: len(engine.running) == n)
        connection.leave()
        await connection.task
        assert engine.running == {}
        assert len(engine.left_early) == n
        counted = app.state.context.metrics.render(None).decode()
        assert f'request_success_total{{finished_reason="abort",model_name="scripted"}} {n}.0' in counted

    asyncio.run(scenario())


def test_a_slow_reader_holds_its_own_stream_only(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> None:
    async def scenario() -> None:
        app = make_app()
        slow = Connection(app, "/generate", {"prompt": "Hi", "stream": True})
        slow.slow = asyncio.Event()
        quick = Connection(app, "/generate", {"prompt": "Hi", "stream": True})
        await quick.task
        assert quick.bodies[-2] == b"data: [DONE]\n\n"
        assert slow.sent == []
        slow.slow.set()
        await slow.task
        assert slow.bodies[-2] == b"data: [DONE]\n\n"

    asyncio.run(scenario())


def test_cancelling_the_server_side_ends_the_request(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> None:
    engine.pause_after = 1

    async def scenario() -> None:
        connection = Connection(make_app(), "/generate", {"prompt": "Hi", "stream": True})
        await until(lambda: len(connection.bodies) == 1)
        connection.task.cancel()
        await asyncio.wait((connection.task,))
        assert engine.running == {}

    asyncio.run(scenario())
