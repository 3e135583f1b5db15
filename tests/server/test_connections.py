"""Connections over raw sockets: what is offered, cut short, left half done or never sent. The server is a process."""

from __future__ import annotations

import contextlib
import gzip
import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_sglang.weights.hub import ModelSource
from tests.server.conftest import StartServer
from tests.tiny import RunningServer, run_server, until

H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = (
    b"connection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: Zm9vYmFyYmF6cXV4cXV1eA==\r\n"
)
OFFERS = [H2C, WEBSOCKET, b"connection: upgrade\r\nupgrade: TLS/1.0\r\n", b"upgrade: h2c\r\n"]
TIMES = ("--head-timeout-s", "1", "--body-timeout-s", "1", "--idle-timeout-s", "1")
PROMPT = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(start_server: StartServer, builtin_model: ModelSource) -> RunningServer:
    return start_server("--model", str(builtin_model.path), *TIMES, "--max-body-bytes", "65536")


def request(
    body: Any = PROMPT,
    headers: bytes = b"",
    *,
    version: str = "1.1",
    path: str = "/v1/completions",
    chunked: bool = False,
) -> tuple[bytes, bytes]:
    """Head and body of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(data)
    head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
    if chunked:
        data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    return head + headers + length + b"\r\n\r\n", data


@contextlib.contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        yield connection


def rest(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def exchange(server: RunningServer, *parts: bytes) -> bytes:
    """What the server answers, to parts that are sent a moment apart, until it closes the connection."""
    with connected(server) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.05)
        return rest(connection)


def text_of(answer: bytes) -> str:
    """The completion in a plain answer with status 200."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    return str(json.loads(body)["choices"][0]["text"])


@pytest.fixture(scope="module")
def text(server: RunningServer) -> str:
    return str(server.post("/v1/completions", **PROMPT).json()["choices"][0]["text"])


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("form", ["whole", "apart", "chunked", "chunked apart"])
def test_an_offered_upgrade_is_passed_over(server: RunningServer, text: str, offer: bytes, form: str) -> None:
    head, body = request(headers=offer, chunked="chunked" in form)
    assert text_of(exchange(server, *((head, body) if "apart" in form else (head + body,)))) == text


@pytest.mark.parametrize("offer", OFFERS)
def test_a_connection_goes_on_after_an_offer(server: RunningServer, text: str, offer: bytes) -> None:
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n"
    answer = exchange(server, get + b"".join(request(headers=offer)) + get)
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert json.dumps(text).encode()[1:-1] in answer


def test_no_chunks_to_a_client_of_http_1_0(server: RunningServer, text: str) -> None:
    answer = exchange(server, *request({**PROMPT, "stream": True}, version="1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    events = body.decode().split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]) == text
    assert text_of(exchange(server, *request(version="1.0"))) == text
    assert exchange(server, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def running(server: RunningServer) -> int:
    return int(server.get("/server_info").json()["stats"]["num_running"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_with_requests_waiting_ends_the_first(server: RunningServer, stream: bool) -> None:
    lines = len(server.log.read_text().splitlines())
    with connected(server) as connection:
        connection.sendall(b"".join(request({**LONG, "stream": stream})) * 3)
        until(lambda: running(server) == 1)
    until(lambda: running(server) == 0)
    new = [line for line in server.log.read_text().splitlines()[lines:] if "/server_info" not in line]
    assert [line.split()[-4:-2] for line in new] == [["/v1/completions", "200" if stream else "499"]]


def test_a_client_that_ends_its_side_is_answered(server: RunningServer, text: str) -> None:
    for num_requests in (1, 2):
        with connected(server) as connection:
            connection.sendall(b"".join(request()) * num_requests)
            connection.shutdown(socket.SHUT_WR)
            assert rest(connection).count(b"HTTP/1.1 200 ") == num_requests
    with connected(server) as connection:
        connection.sendall(b"".join(request({**PROMPT, "stream": True})))
        connection.shutdown(socket.SHUT_WR)
        assert rest(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_client_that_ends_its_side_and_waits_long(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"".join(request({**LONG, "max_tokens": 120})))
        connection.shutdown(socket.SHUT_WR)
        interim, _, final = rest(connection).rpartition(b"HTTP/1.1 200 ")
        assert final
        assert interim == b"HTTP/1.1 100 Continue\r\n\r\n" * interim.count(b"100")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_gets_the_whole_answer(server: RunningServer, version: str, stream: bool) -> None:
    with connected(server) as connection:
        connection.sendall(b"".join(request({**LONG, "max_tokens": 60, "stream": stream}, version=version)))
        begun = connection.recv(20) if stream else b""
        connection.shutdown(socket.SHUT_WR)
        answer = begun + rest(connection)
    assert b"HTTP/1.1 200 " in answer
    if stream:
        assert answer.endswith(b"data: [DONE]\n\n" if version == "1.0" else b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert answer.count(b"data: ") > 30
    else:
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_ends_its_side_behind_a_question_without_a_body(server: RunningServer, version: str) -> None:
    with connected(server) as connection:
        connection.sendall(f"GET /health HTTP/{version}\r\nhost: x\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        assert rest(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_whose_reader_ends_its_side_and_leaves_later_is_ended(server: RunningServer, version: str) -> None:
    with connected(server) as connection:
        connection.sendall(b"".join(request({**LONG, "stream": True}, version=version)))
        connection.recv(20)
        connection.shutdown(socket.SHUT_WR)
        for _ in range(3):
            assert connection.recv(65536)
        assert running(server) == 1
    until(lambda: running(server) == 0, limit_s=2)


def test_a_body_of_two_lengths_is_the_last_on_its_connection(server: RunningServer, text: str) -> None:
    """A proxy that counts by the other length would hand the rest of this connection to somebody else."""
    for length in (b"5", b"99999999"):
        head, body = request(headers=b"content-length: " + length + b"\r\n", chunked=True)
        answer = exchange(server, head + body + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"connection: close\r\n" in answer.lower()
        assert json.dumps(text).encode()[1:-1] in answer


def test_a_target_with_the_whole_address(server: RunningServer, text: str) -> None:
    close = b"connection: close\r\n"
    for origin in ("http://x", "HTTP://y.example:8000", "https://x"):
        assert text_of(exchange(server, *request(headers=close, path=f"{origin}/v1/completions"))) == text
    for target in ("http://x/health?a=http://y", "http://x", "http://x/"):
        answer = exchange(server, f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 200 ")
    answer = exchange(server, b"GET http://x/nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"has no route '/nowhere'" in answer


def test_targets_that_are_no_path(server: RunningServer) -> None:
    rest_of_it = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    about_all = exchange(server, b"OPTIONS *" + rest_of_it)
    assert about_all.startswith(b"HTTP/1.1 204 ")
    assert b"allow: GET, HEAD, POST, OPTIONS\r\n" in about_all
    assert exchange(server, b"GET *" + rest_of_it).startswith(b"HTTP/1.1 404 ")
    assert exchange(server, b"CONNECT elsewhere:443" + rest_of_it).startswith(b"HTTP/1.1 501 ")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"".join(request(headers=b"x-request-id: mine\r\n"))[:-4], b"408"),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"414"),
        (b"GET /?" + b"x" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"414"),
        (b"GET /" + b"x" * 100_000, b"414"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 30_000 + b"\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"501"),
    ],
)
def test_what_is_refused_before_a_route_is_looked_for(server: RunningServer, sent: bytes, status: bytes) -> None:
    head, _, body = exchange(server, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status), head
    names = [line.partition(b":")[0].lower() for line in head.splitlines()[1:]]
    assert names.count(b"date") == names.count(b"x-request-id") == names.count(b"connection") == 1
    assert (b"x-request-id: mine" in head) == (b"mine" in sent)
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("part", "status"),
    [
        (b"", None),
        (b"\r\n", None),
        (b"POST /v1/compl", 408),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", 408),
        (b"".join(request())[:-4], 408),
        (b"".join(request(chunked=True))[:-4], 408),
        (b"\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea", 200),
    ],
)
def test_what_is_left_half_done_ends_in_time(server: RunningServer, part: bytes, status: int | None) -> None:
    start = time.monotonic()
    answer = exchange(server, part)
    assert 0.5 < time.monotonic() - start < 10
    assert answer.startswith(b"HTTP/1.1 %d " % status) if status else answer == b""


def test_a_body_that_trickles_ends_in_time(server: RunningServer) -> None:
    head, _ = request(b" " * 1000)
    start = time.monotonic()
    with connected(server) as connection:
        connection.sendall(head)
        while time.monotonic() - start < 20:
            connection.sendall(b" ")
            if select.select([connection], [], [], 0.1)[0]:
                assert connection.recv(20).startswith(b"HTTP/1.1 408 ")
                break
    assert time.monotonic() - start < 6


def test_a_body_that_takes_its_time_but_comes(server: RunningServer, text: str) -> None:
    head, body = request(json.dumps(PROMPT).encode() + b" " * 6000)
    assert text_of(exchange(server, head, *(body[i : i + 160] for i in range(0, len(body), 160)))) == text  # 2 s


def test_half_a_request_is_refused_in_words(server: RunningServer) -> None:
    answer = exchange(server, b"NONSENSE\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in answer
    broken = exchange(server, request(chunked=True)[0] + b"zz\r\n")
    assert broken.startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("declared", [True, False])
def test_a_refusal_reaches_a_client_that_still_sends(server: RunningServer, declared: bool) -> None:
    data = b" " * (16 << 20)
    head, body = request(data, chunked=not declared)
    with connected(server) as connection:
        connection.sendall(head + body)
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"65536" in answer


def test_a_head_without_end_is_refused_while_the_client_sends(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (4 << 20))
        assert rest(connection).startswith(b"HTTP/1.1 400 ")


def test_a_compressed_body(server: RunningServer, text: str) -> None:
    data = json.dumps(PROMPT).encode()
    close = b"connection: close\r\n"
    packed = gzip.compress(data)
    for lines in (
        b"gzip",
        b"x-gzip",
        b"gzip, identity",
        b"identity,GZIP",
        b", gzip",
        b"gzip\r\ncontent-encoding: identity",
    ):
        assert text_of(exchange(server, *request(packed, close + b"content-encoding: " + lines + b"\r\n"))) == text
    for lines in (b"", b"identity", b"identity, ", b"\r\ncontent-encoding: "):
        assert text_of(exchange(server, *request(data, close + b"content-encoding: " + lines + b"\r\n"))) == text
    cases = [
        (gzip.compress(data[:9]) + gzip.compress(data[9:]), b"gzip", b"400"),  # thousands of parts would take long
        (gzip.compress(b" " * (1 << 22)), b"gzip", b"413"),
        (packed[:-3], b"gzip", b"400"),
        (data, b"gzip", b"400"),
        (data, b"br", b"415"),
        (gzip.compress(packed), b"gzip, gzip", b"415"),
        (packed, b"gzip\r\ncontent-encoding: br", b"415"),
    ]
    for body, coding, status in cases:
        answer = exchange(server, *request(body, close + b"content-encoding: " + coding + b"\r\n"))
        assert answer.startswith(b"HTTP/1.1 " + status), answer
        assert (b"accept-encoding: gzip, identity" in answer) == (status == b"415")


def test_a_byte_order_mark_before_the_body(server: RunningServer, text: str) -> None:
    assert text_of(exchange(server, *request(b"\xef\xbb\xbf" + json.dumps(PROMPT).encode()))) == text


def test_a_path_with_a_slash_at_its_end_is_no_redirect(server: RunningServer, text: str) -> None:
    assert text_of(exchange(server, *request(path="/v1/completions/"))) == text
    answer = exchange(server, b"GET /nowhere/ HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"evil" not in answer


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/v1/models", "/health", "/metrics", "/openapi.json", "/playground/main.js"]
)
def test_head_is_get_without_a_body(server: RunningServer, path: str) -> None:
    rest_of_it = f"{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    head, _, body = exchange(server, b"HEAD " + rest_of_it).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b""
    got, _, content = exchange(server, b"GET " + rest_of_it).partition(b"\r\n\r\n")
    assert content
    lengths = [[line for line in text.splitlines() if line.startswith(b"content-length")] for text in (head, got)]
    assert path == "/metrics" or lengths[0] == lengths[1] != []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("POST", "/playground/main.js", "GET, HEAD"),
        ("GET", "/v1/completions", "POST"),
        ("HEAD", "/v1/completions", "POST"),
    ],
)
def test_a_method_that_is_not_allowed_names_those_that_are(
    server: RunningServer, method: str, path: str, allowed: str
) -> None:
    answer = exchange(server, f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert f"allow: {allowed}\r\n".encode() in answer


def test_the_models_folder_stays_untold(server: RunningServer, builtin_model: ModelSource, text: str) -> None:
    told = server.get("/v1/models").json()["data"][0]
    assert told["id"] == told["root"] == builtin_model.path.name
    assert str(builtin_model.path.parent) not in server.get("/metrics").text
    for name in (told["id"], str(builtin_model.path)):
        assert text_of(exchange(server, *request({**PROMPT, "model": name}))) == text
    assert server.post("/v1/completions", **PROMPT, model="other").status_code == 404


def test_health_survives_when_no_descriptor_is_left(tmp_path: Path, builtin_model: ModelSource) -> None:
    options = ("--model", str(builtin_model.path), "--num-pages", "64")
    half = b"".join(request())[:-4]
    with run_server(tmp_path / "log", *options, descriptors=256) as server, contextlib.ExitStack() as open_ones:
        stream = open_ones.enter_context(connected(server))
        stream.sendall(b"".join(request({**LONG, "max_tokens": 500, "stream": True})))
        assert stream.recv(10).startswith(b"HTTP/1.1")
        for index in range(600):
            connection = open_ones.enter_context(connected(server))
            with contextlib.suppress(ConnectionError):
                connection.sendall((b"", half, half[:20])[index % 3])
        for _ in range(3):
            assert server.get("/health").status_code == 200
        for _ in range(3):
            assert stream.recv(65536)  # those at work are left alone
        assert "Traceback" not in server.log.read_text()


def test_more_requests_at_work_than_descriptors(tmp_path: Path, builtin_model: ModelSource) -> None:
    options = ("--model", str(builtin_model.path), "--max-running-requests", "1")
    with run_server(tmp_path / "log", *options, descriptors=160) as server, contextlib.ExitStack() as open_ones:
        for _ in range(34):  # 32 of them have a place
            connection = open_ones.enter_context(connected(server))
            connection.sendall(b"".join(request(LONG)))
        assert b"HTTP/1.1 503 " in connection.recv(65536)
        assert server.get("/health").status_code == 200
