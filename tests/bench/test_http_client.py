"""The client reuses connections, times every piece, and says what went wrong instead of raising."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mini_sglang.bench.http_client import Exchange, HttpClient

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(handle: Handler) -> Any:
    """The address of a server that hands each connection to `handle`, and the connections so far."""
    connections: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await handle(reader, writer)

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", connections
        for writer in connections:
            writer.close()


def answering(*pieces: bytes, close: bool = False) -> Handler:
    """Answers each request with `pieces`, one after the other."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await read_request(reader):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.02)
            if close:
                writer.close()
                return

    return handle


async def read_request(reader: asyncio.StreamReader) -> bytes:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head + await reader.readexactly(length)


def post_to(handle: Handler, times: int = 1, timeout_s: float = 10.0) -> tuple[list[Exchange], int]:
    """What came of posts one after another, and on how many connections."""

    async def run() -> tuple[list[Exchange], int]:
        async with server(handle) as (url, connections):
            async with HttpClient(url, timeout_s=timeout_s) as client:
                exchanges = [await client.post("/route", b"{}") for _ in range(times)]
            return exchanges, len(connections)

    return asyncio.run(run())


def test_one_connection_serves_requests_one_after_another() -> None:
    exchanges, num_connections = post_to(answering(WHOLE), times=3)
    assert [exchange.body for exchange in exchanges] == [b"ok"] * 3
    assert num_connections == 1


def test_requests_under_way_at_once_have_connections_of_their_own() -> None:
    async def run() -> int:
        async with server(answering(WHOLE)) as (url, connections):
            async with HttpClient(url) as client:
                exchanges = await asyncio.gather(*(client.post("/", b"{}") for _ in range(150)))
            assert [exchange.error for exchange in exchanges] == [None] * 150
            return len(connections)

    assert asyncio.run(run()) == 150


def test_a_request_is_sent_again_where_the_server_closed_the_connection_meanwhile() -> None:
    async def one_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(WHOLE)
        await read_request(reader)  # whatever it asks, nothing of an answer
        writer.close()

    exchanges, num_connections = post_to(one_answer, times=3)
    assert [(exchange.error, exchange.body) for exchange in exchanges] == [(None, b"ok")] * 3
    assert num_connections == 3


def test_a_connection_that_the_server_means_to_close_is_not_used_again() -> None:
    closing = WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert post_to(answering(closing), times=2)[1] == 2


def test_the_request_is_what_was_asked_for() -> None:
    async def run() -> tuple[str, bytes]:
        seen: list[bytes] = []

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await read_request(reader))
            writer.write(WHOLE)

        async with server(handle) as (url, _), HttpClient(f"{url}/prefix/", {"authorization": "Bearer x"}) as client:
            await client.post("/route", b'{"a": 1}')
        return url, seen[0]

    url, request = asyncio.run(run())
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    assert first == "POST /prefix/route HTTP/1.1"
    assert {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)} == {
        "host": url.removeprefix("http://"),
        "accept": "*/*",
        "authorization": "Bearer x",
        "content-type": "application/json",
        "content-length": "8",
    }
    assert body == b'{"a": 1}'


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nok",
    ],
)
def test_an_answer_is_neither_followed_nor_decoded(answer: bytes) -> None:
    [exchange], _ = post_to(answering(answer))
    assert (exchange.status, exchange.body) == (int(answer.split()[1]), b"ok")


def test_each_piece_has_the_time_it_came() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    [exchange], _ = post_to(answering(head + b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"))
    (first, _), (second, _) = exchange.chunks
    assert exchange.body == b"ab"
    assert exchange.started < first < second < exchange.ended


def test_an_answer_may_end_with_the_connection() -> None:
    [exchange], _ = post_to(answering(b"HTTP/1.1 200 OK\r\n\r\nall", close=True))
    assert (exchange.body, exchange.error) == (b"all", None)


@pytest.mark.parametrize(
    ("handle", "error"),
    [
        (answering(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", close=True), "disconnected"),
        (answering(close=True), "disconnected"),
        (answering(b"nonsense\r\n\r\n"), "bad HTTP: "),
        (answering(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"), "timeout"),
    ],
)
def test_what_goes_wrong_is_named(handle: Handler, error: str) -> None:
    [exchange], _ = post_to(handle, timeout_s=0.3)
    assert exchange.error is not None
    assert exchange.error.startswith(error)


def test_a_refused_connection_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    async def run() -> Exchange:
        async with HttpClient(f"http://127.0.0.1:{port}") as client:
            return await client.post("/", b"")

    assert asyncio.run(run()).error == "connect: Connection refused"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url must be like"):
        HttpClient(url)
