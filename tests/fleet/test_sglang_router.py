"""SGLang's router before two servers: cached prefixes, a killed and a drained one, keys, streams and refusals."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fleet.conversations import Saved, ended, run
from tests.fleet.router import routed
from tests.tiny import Checkpoints, RunningServer, run_server

if importlib.util.find_spec("sglang_router") is None:
    pytest.skip("sglang-router is not installed", allow_module_level=True)

PAGES = 540  # of a server; twice as many hold all conversations
CHAT: dict[str, Any] = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Tell a story."}]}


@contextlib.contextmanager
def two_servers(folder: Path, *options: str) -> Iterator[list[RunningServer]]:
    with contextlib.ExitStack() as servers:
        yield [servers.enter_context(run_server(folder / name, *options)) for name in ("first", "second")]


def four_streams(client: openai.OpenAI, max_tokens: int) -> list[Any]:
    """Chats of which each has begun to answer."""
    streams = [client.chat.completions.create(**CHAT, max_tokens=max_tokens, stream=True) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    return streams


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> tuple[str, ...]:
    """Options for a model that computes a step in a millisecond."""
    folder = checkpoints.write("llama", max_position_embeddings=4096).path
    return ("--model", str(folder), "--served-model-name", CHAT["model"])


def test_conversations_stay_where_their_prefixes_are(model: tuple[str, ...], tmp_path: Path) -> None:
    def converse(policy: str) -> Saved:
        with (
            two_servers(tmp_path, *model, "--num-pages", str(PAGES)) as servers,
            routed(tmp_path / "log", servers, "--policy", policy) as url,
        ):
            return run(url, servers, rotated=True)

    aware, blind = converse("cache_aware"), converse("round_robin")
    with run_server(tmp_path / "joint", *model, "--num-pages", str(2 * PAGES)) as server:
        joint = run(server.url, [server], rotated=True)
    print(f"\ncache_aware {aware}\nround_robin {blind}\none server {joint}")
    assert aware.computed <= 1.15 * joint.computed
    assert aware.cached >= 1.8 * blind.cached
    assert max(aware.per_server) <= 1.3 * min(aware.per_server)


def test_a_hot_prefix_does_not_overload_a_server(model: tuple[str, ...], tmp_path: Path) -> None:
    hot = "All of these requests begin with the same long paragraph about a robot by the sea. " * 6
    options = ("--policy", "cache_aware", "--balance-abs-threshold", "1", "--balance-rel-threshold", "1.1")

    def ask(number: int) -> None:
        prompt = f"{hot} Question {number}" if number % 5 else f"{number} comes alone " * 20
        body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()

    with two_servers(tmp_path, *model) as servers, routed(tmp_path / "log", servers, *options) as url:
        with ThreadPoolExecutor(16) as threads:
            [*threads.map(ask, range(200))]
        load = [ended(server) for server in servers]
    print(f"\n{load}")
    assert sum(load) >= 200
    assert max(load) <= 1.3 * sum(load) / 2


def test_a_killed_server_takes_only_its_own_streams(tmp_path: Path) -> None:
    with two_servers(tmp_path) as servers, routed(tmp_path / "log", servers, "--policy", "round_robin") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        streams = four_streams(client, max_tokens=200)
        for pid in (servers[0].process.pid, servers[0].engine_pid):
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()

        def rest(stream: Any) -> float | None:
            """How long after the kill the stream broke, or None if it ended well."""
            finish = None
            try:
                for chunk in stream:
                    finish = chunk.choices[0].finish_reason if chunk.choices else finish
            except (openai.APIError, httpx.HTTPError):
                return time.monotonic() - killed
            return None if finish is not None else time.monotonic() - killed

        with ThreadPoolExecutor(4) as threads:
            broke = [*threads.map(rest, streams)]
        assert sum(seconds is not None for seconds in broke) == 2
        assert all(seconds is None or seconds < 5 for seconds in broke)
        for _ in range(6):
            assert client.chat.completions.create(**CHAT, max_tokens=2).choices[0].finish_reason == "length"


def test_a_drained_server_loses_no_stream_and_gets_no_request(tmp_path: Path) -> None:
    with two_servers(tmp_path) as servers, routed(tmp_path / "log", servers, "--policy", "round_robin") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        streams = four_streams(client, max_tokens=60)
        drained = servers[0]
        assert drained.post("/drain").json() == {"draining": True, "requests": 2}
        for _ in range(6):
            assert client.chat.completions.create(**CHAT, max_tokens=2).choices[0].finish_reason == "length"
        ends = [[chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] for stream in streams]
        assert ends == ["length"] * 4
        assert drained.process.wait(20) == 0
        for _ in range(4):
            assert client.chat.completions.create(**CHAT, max_tokens=2).choices[0].finish_reason == "length"


@pytest.mark.parametrize("package", ["sglang_router", "smg", "vllm_router"])
def test_routers_of_its_kind_serve_too(model: tuple[str, ...], tmp_path: Path, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with (
        two_servers(tmp_path, *model) as servers,
        routed(tmp_path / "log", servers, "--policy", "round_robin", package=package) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        body = {**CHAT, "max_tokens": 4, "ignore_eos": True}
        for _ in range(2):
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert [ended(server) for server in servers] == [1, 1]
        prompt = {"model": CHAT["model"], "prompt": "Once", "max_tokens": 4}
        assert client.post("/v1/completions", json=prompt).json()["usage"]["completion_tokens"] == 4
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
            assert "data: [DONE]" in [*stream.iter_lines()]
        too_long = client.post("/v1/completions", json={**prompt, "prompt": "word " * 9000})
        assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "prompt")
        for pid in (servers[0].engine_pid, servers[0].process.pid):
            os.kill(pid, signal.SIGKILL)
        for _ in range(6):
            start = time.monotonic()
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            assert time.monotonic() - start < 5


def test_what_servers_refuse_comes_back_as_it_is_and_counts_against_none(tmp_path: Path) -> None:
    """The router's circuit breaker is off: it takes answers of 400 for failures of the server, ten of them for one."""
    options = ("--api-key", "sesame", "--disable-retries", "--disable-circuit-breaker")
    with (
        two_servers(
            tmp_path, "--api-key", "sesame", "--max-running-requests", "1", "--max-waiting-requests", "1"
        ) as servers,
        routed(tmp_path / "log", servers, "--policy", "round_robin", *options) as url,
        httpx.Client(base_url=url, headers={"authorization": "Bearer sesame"}, timeout=60) as client,
    ):

        def ask(**fields: Any) -> httpx.Response:
            return client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 24, **fields})

        for _ in range(24):
            too_long = ask(messages=[{"role": "user", "content": "word " * 9000}])
            assert too_long.status_code == 400
            assert "8192" in too_long.json()["error"]["message"]
        with ThreadPoolExecutor(12) as threads:
            answers = [*threads.map(lambda _: ask(), range(12))]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in answers if answer.status_code == 429)
        assert [ask().status_code for _ in range(4)] == [200] * 4
        assert httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60).status_code == 401
