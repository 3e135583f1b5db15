"""Server and engine as processes: signals, deaths, and that nothing is left behind. A tiny random model will do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mini_sglang.weights.hub import ModelSource
from tests.server.conftest import StartServer
from tests.tiny import RunningServer, until

MODEL_OPTIONS = ("--dtype", "float32", "--num-pages", "64")
ENDLESS = {"prompt": "Hello", "ignore_eos": True, "max_tokens": 200, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, builtin_model: ModelSource) -> str:
    return str(builtin_model.path)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Stream(threading.Thread):
    """A stream read in the background."""

    def __init__(self, url: str, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = {**ENDLESS, **body}
        self.events: list[Any] = []
        self.failed = False
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/generate", json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
        except httpx.HTTPError:
            self.failed = True


def test_sigterm_lets_a_stream_end_and_leaves_nothing(start_server: StartServer, model: str) -> None:
    server = start_server("--model", model, *MODEL_OPTIONS)
    engine_pid = server.engine_pid
    stream = Stream(server.url, max_tokens=40)
    until(lambda: len(stream.events) > 2)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    stream.join(5)
    assert stream.events[-1] == "[DONE]"
    assert stream.events[-2]["usage"]["completion_tokens"] == 40
    assert gone(engine_pid)


def test_a_second_signal_stops_at_once(start_server: StartServer, model: str) -> None:
    server = start_server("--model", model, *MODEL_OPTIONS)
    engine_pid = server.engine_pid
    streams = [Stream(server.url, max_tokens=900) for _ in range(4)]
    until(lambda: all(stream.events for stream in streams))
    server.process.send_signal(signal.SIGINT)
    until(lambda: "stopping" in server.log.read_text())
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(5) == 130
    until(lambda: gone(engine_pid))


def test_a_drained_server_ends_its_streams_and_then_itself(start_server: StartServer, model: str) -> None:
    server = start_server("--model", model, *MODEL_OPTIONS, "--shutdown-timeout-s", "0")
    engine_pid = server.engine_pid
    streams = [Stream(server.url, max_tokens=60), Stream(server.url, max_tokens=90)]
    until(lambda: all(len(stream.events) > 2 for stream in streams))
    assert server.post("/drain").json() == {"draining": True, "requests": 2}
    refused = server.post("/generate", prompt="Hello", max_tokens=1)
    assert refused.status_code == 503
    assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
    assert (server.get("/health").status_code, server.get("/ready").status_code) == (200, 503)
    assert server.process.wait(30) == 0
    for stream, tokens in zip(streams, (60, 90), strict=True):
        stream.join(5)
        assert stream.events[-1] == "[DONE]"
        assert stream.events[-2]["usage"]["completion_tokens"] == tokens
    assert gone(engine_pid)
    assert "Traceback" not in server.log.read_text()


def test_an_idle_server_drains_at_once(start_server: StartServer, model: str) -> None:
    server = start_server("--model", model, *MODEL_OPTIONS)
    with httpx.Client(base_url=server.url) as client:  # whose connection stays open
        assert client.post("/drain").json() == {"draining": True, "requests": 0}
        assert server.process.wait(5) == 0


def test_a_signal_cuts_a_drain_short(start_server: StartServer, model: str) -> None:
    server = start_server("--model", model, *MODEL_OPTIONS, "--shutdown-timeout-s", "0.2")
    stream = Stream(server.url, max_tokens=900)
    until(lambda: bool(stream.events))
    server.post("/drain")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    stream.join(5)
    assert stream.events[-1]["error"]["code"] == "engine_dead"


def exchange(server: RunningServer, data: bytes) -> bytes:
    """What the server answers to raw bytes until it closes the connection."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_requests_that_do_not_end_are_cut_after_the_timeout(start_server: StartServer, model: str) -> None:
    server = start_server("--model", model, *MODEL_OPTIONS, "--shutdown-timeout-s", "0.2")
    engine_pid = server.engine_pid
    half = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(server.post, "/generate", **{**ENDLESS, "stream": False, "max_tokens": 900})
        half_sent = pool.submit(exchange, server, half)
        streams = [Stream(server.url, max_tokens=900) for _ in range(3)]
        until(lambda: all(stream.events for stream in streams))
        until(lambda: server.get("/server_info").json()["stats"]["num_running"] == 4)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert gone(engine_pid)
        assert plain.result().status_code == 503
        assert plain.result().json()["error"]["code"] == "engine_dead"
        assert half_sent.result().startswith(b"HTTP/1.1 503 ")
    for stream in streams:
        stream.join(5)
        assert stream.events[-1]["error"]["code"] == "engine_dead"
    assert "Traceback" not in server.log.read_text()


def test_headers_without_end_are_refused(start_server: StartServer, model: str) -> None:
    server = start_server("--model", model, *MODEL_OPTIONS)
    floods = (b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(100)), b"x: " + b"y" * 100_000)
    for flood in floods:
        answer = exchange(server, b"GET /health HTTP/1.1\r\nhost: x\r\n" + flood)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"65536" in answer
    body = b'{"tokens": [' + b"5, " * 100_000 + b"5]}"
    content = (body[i : i + 10_000] for i in range(0, len(body), 10_000))
    headers = {"content-type": "application/json"}
    assert httpx.post(f"{server.url}/detokenize", content=content, headers=headers).status_code == 200
    assert "Traceback" not in server.log.read_text()


def test_an_engine_that_generates_nothing_is_told_from_one_that_does(start_server: StartServer, model: str) -> None:
    server = start_server("--model", model, *MODEL_OPTIONS)
    assert server.get("/health_generate").status_code == 200
    os.kill(server.engine_pid, signal.SIGSTOP)
    start = time.monotonic()
    response = server.get("/health_generate")
    assert time.monotonic() - start < 15
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_stuck")


def test_an_engine_stopped_and_then_killed(start_server: StartServer, model: str) -> None:
    server = start_server("--model", model, *MODEL_OPTIONS)
    engine_pid = server.engine_pid
    stream = Stream(server.url, max_tokens=900)
    until(lambda: bool(stream.events))
    os.kill(engine_pid, signal.SIGSTOP)
    response = server.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_stuck"
    os.kill(engine_pid, signal.SIGCONT)
    assert server.get("/health").status_code == 200
    os.kill(engine_pid, signal.SIGKILL)
    assert server.process.wait(10) == 1
    stream.join(5)
    assert stream.events[-1]["error"]["code"] == "engine_dead"


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_server_takes_its_engine_along(start_server: StartServer, model: str, busy: bool) -> None:
    server = start_server("--model", model, *MODEL_OPTIONS)
    engine_pid = server.engine_pid
    if busy:
        stream = Stream(server.url, max_tokens=900)
        until(lambda: bool(stream.events))
    server.process.kill()
    until(lambda: gone(engine_pid), limit_s=3)


def test_a_lost_rank_ends_an_idle_server(start_server: StartServer, model: str) -> None:
    server = start_server("--model", model, *MODEL_OPTIONS, "--tp", "2", "--num-threads", "1")
    engine_pid = server.engine_pid
    answer = server.post("/generate", prompt="The capital of France is", max_tokens=4, temperature=0)
    assert answer.status_code == 200
    [worker] = map(int, Path(f"/proc/{engine_pid}/task/{engine_pid}/children").read_text().split())
    os.kill(worker, signal.SIGKILL)
    assert server.process.wait(15) == 1
    assert "rank 1 was killed by SIGKILL" in server.log.read_text()
    assert gone(engine_pid)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_what_keeps_a_server_from_starting_is_one_line(taken_port: int, tmp_path: Path, model: str) -> None:
    for options, word in [
        (
            ("--port", str(taken_port)),
            f"cannot listen at 127.0.0.1:{taken_port}: Address already in use; choose another --port (0: a free one)",
        ),
        (("--host", "2001:db8::1"), "cannot listen at [2001:db8::1]:0: "),
        (("--host", "nowhere.invalid"), "; --host must be an address of this machine"),
        (("--model", str(tmp_path / "nowhere")), "nowhere"),
        (("--port", "99999"), "99999"),
    ]:
        command = (sys.executable, "-m", "mini_sglang.server", "--model", model, "--port", "0", *options)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        assert word in done.stderr
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_while_the_model_loads_is_refused_too(model: str) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))  # both may hold the address until one of them listens
        port = str(other.getsockname()[1])
        command = (sys.executable, "-m", "mini_sglang.server", "--model", model, "--port", port, *MODEL_OPTIONS)
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            until(lambda: Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text() != "", limit_s=60)
            other.listen()
            out, err = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 2
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use; choose another --port" in err
    assert "Serving" not in out
