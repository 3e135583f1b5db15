"""Replicas behind Ray Serve: streams, prefixes, load, lost engines and replicas, and a new version under load."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.conversations import Saved, run
from tests.fleet.ray_cluster import (
    COMMAND,
    ENGINE,
    Deployment,
    deployed,
    free_port,
    is_alive,
    kill,
    parent_of,
    wait_for_greeting,
)
from tests.tiny import Checkpoints, run_server, until

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray Serve is not installed", allow_module_level=True)

NAME = "smollm2-135m"  # what the tiny model is called here
PAGES = 720  # of a replica; twice as many hold all conversations
LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> tuple[str, ...]:
    """Options for a model that computes a step in a millisecond."""
    folder = checkpoints.write("llama", max_position_embeddings=4096).path
    return ("--model", str(folder), "--served-model-name", NAME)


@pytest.fixture(scope="module")
def pair(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two replicas with prefix affinity."""
    log = tmp_path_factory.mktemp("ray") / "log"
    with deployed(log, *model, "--replicas", "2", "--num-pages", str(PAGES)) as deployment:
        yield deployment


def converse(deployment: Deployment) -> tuple[Saved, list[int]]:
    """All conversations, and how many requests of them each replica ended."""
    before = deployment.ended()
    saved = run(deployment.url, [], rotated=True)
    after = deployment.ended()
    return saved, sorted(after[replica] - before[replica] for replica in after)


def complete(url: str, prompt: str, max_tokens: int = 2, **more: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


class Stream:
    """A long completion, read by a thread: which replica had it, and how it ended."""

    def __init__(self, threads: ThreadPoolExecutor, url: str, number: int) -> None:
        self.replica = ""
        self.last = ""
        self.num_events = 0
        self.ended = 0.0
        self._reading = threads.submit(self._read, url, number)

    def _read(self, url: str, number: int) -> None:
        body = {"prompt": f"{number} is the number of this stream", **LONG}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
                self.replica = answer.headers["x-replica"]
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.last = line.removeprefix("data: ")
                        self.num_events += 1
        finally:
            self.ended = time.monotonic()

    def wait(self) -> None:
        """Until it has ended. Raises httpx.RemoteProtocolError if its connection broke."""
        self._reading.result()


def test_a_stream_passes_through_as_it_is_made(pair: Deployment) -> None:
    with httpx.stream("POST", f"{pair.url}/v1/completions", json={"prompt": "abc", **LONG}, timeout=60) as answer:
        start = time.monotonic()
        lines = answer.iter_lines()
        next(lines)
        first = time.monotonic() - start
        assert [*lines][-2:] == ["data: [DONE]", ""]
        assert first < (time.monotonic() - start) / 4
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(answer.headers.get_list("x-request-id")) == 1


def test_what_a_replica_refuses_comes_back_as_it_is(pair: Deployment) -> None:
    answer = complete(pair.url, "abc", max_tokens=-1)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"
    assert httpx.get(f"{pair.url}/nowhere").status_code == 404
    assert httpx.post(f"{pair.url}/v1/completions", json={"prompt": "x" * (5 << 20)}).status_code == 413


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_request_along(pair: Deployment, stream: bool) -> None:
    def aborted() -> float:
        lines = httpx.get(f"{pair.url}/metrics").text.splitlines()
        ended = [line for line in lines if line.startswith("mini_sglang:request_success_total{")]
        return sum(float(line.split()[-1]) for line in ended if 'finished_reason="abort"' in line)

    before = aborted()
    body = {"prompt": "abc", **LONG, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{pair.url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{pair.url}/v1/completions", json=body, timeout=0.7)
    until(lambda: aborted() == before + 1)


def test_conversations_stay_where_their_prefixes_are(pair: Deployment, model: tuple[str, ...], tmp_path: Path) -> None:
    assert httpx.post(f"{pair.url}/flush_cache").status_code == 200
    aware, load = converse(pair)
    blind_options = (*model, "--replicas", "2", "--num-pages", str(PAGES), "--routing", "round_robin")
    with deployed(tmp_path / "blind", *blind_options) as deployment:
        blind, _ = converse(deployment)
    with run_server(tmp_path / "joint", *model, "--num-pages", str(2 * PAGES)) as server:
        joint = run(server.url, [server], rotated=True)
    print(f"\nprefix {aware}, {load}\nround robin {blind}\none server {joint}")
    assert aware.computed <= 1.15 * joint.computed
    assert aware.cached >= 1.8 * blind.cached
    assert len(load) == 2
    assert load[1] <= 1.3 * load[0]


def test_a_hot_prefix_does_not_overload_a_replica(pair: Deployment) -> None:
    hot = "All of these requests begin with the same long paragraph about a robot by the sea. " * 6

    def ask(number: int) -> str:
        prompt = f"{hot} Question {number}" if number % 5 else f"{number} comes alone " * 20
        return complete(pair.url, prompt, max_tokens=40, ignore_eos=True).headers["x-replica"]

    with ThreadPoolExecutor(16) as threads:
        load = Counter(threads.map(ask, range(200)))
    print(f"\n{load}")
    assert len(load) == 2
    assert max(load.values()) <= 1.3 * min(load.values())


@pytest.mark.parametrize("victim", ["engine", "replica"])
def test_what_is_killed_takes_only_its_own_streams(pair: Deployment, victim: str) -> None:
    until(lambda: len(pair.ended()) == 2, limit_s=90)
    with ThreadPoolExecutor(8) as threads:
        streams = [Stream(threads, pair.url, number) for number in range(8)]
        until(lambda: all(stream.num_events > 3 for stream in streams), limit_s=30)
        doomed, engine = next(iter(pair.engine_pids().items()))
        kill(engine if victim == "engine" else parent_of(engine))
        killed = time.monotonic()
        for number in range(10):
            start = time.monotonic()
            answer = complete(pair.url, f"new {number}")
            assert answer.status_code == 200
            assert answer.headers["x-replica"] != doomed
            assert time.monotonic() - start < 5
        for stream in streams:
            stream.wait()
    lost = [stream for stream in streams if stream.replica == doomed]
    assert 0 < len(lost) < 8
    for stream in lost:
        assert stream.ended - killed < 5
        assert json.loads(stream.last)["error"]["code"] in ("engine_dead", "replica_lost")
    assert all(stream.last == "[DONE]" for stream in streams if stream not in lost)
    until(lambda: not is_alive(engine))
    until(lambda: len(pair.ended()) == 2, limit_s=90)  # it comes back
    assert doomed not in pair.ended()


@pytest.mark.parametrize(("victim", "waits"), [("ServeReplica:mini-sglang:ingress", True), ("ProxyActor", False)])
def test_a_lost_entrance_breaks_its_streams_and_is_there_again(pair: Deployment, victim: str, waits: bool) -> None:
    """What comes to Ray's proxy meanwhile waits for the ingress; while the proxy is away its port is closed."""
    with ThreadPoolExecutor(10) as threads:
        streams = [Stream(threads, pair.url, number) for number in range(4)]
        until(lambda: all(stream.num_events > 3 for stream in streams), limit_s=30)
        kill(pair.ray_pid(victim))
        killed = time.monotonic()
        new = [threads.submit(complete, pair.url, f"{number}") for number in range(4)]
        for stream in streams:
            with pytest.raises(httpx.RemoteProtocolError):
                stream.wait()
            assert stream.ended - killed < 5
        if waits:
            assert [answer.result().status_code for answer in new] == [200] * 4
        else:
            assert all(isinstance(answer.exception(), httpx.TransportError) for answer in new)
        until(lambda: answers(pair.url), limit_s=30)
    print(f"\n{victim}: back after {time.monotonic() - killed:.1f} s")


def answers(url: str) -> bool:
    try:
        return complete(url, "again").status_code == 200
    except httpx.TransportError:
        return False


def test_models_behind_one_address_are_told_apart_by_name(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folders = [str(checkpoints.write("llama", seed=seed).path) for seed in (1, 2)]
    names = ("--served-model-name", "one", "--served-model-name", "two", "--api-key", "sesame")
    with (
        deployed(tmp_path / "log", *names, *folders) as deployment,
        httpx.Client(base_url=deployment.url, headers={"authorization": "Bearer sesame"}, timeout=60) as client,
    ):
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["one", "two"]
        assert client.get("/v1/models/two").json()["id"] == "two"
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answers = {name: client.post("/v1/completions", json={**body, "model": name}) for name in ("one", "two")}
        texts = {name: answer.json()["choices"][0]["text"] for name, answer in answers.items()}
        assert [answer.json()["model"] for answer in answers.values()] == ["one", "two"]
        assert texts["one"] != texts["two"]
        assert answers["one"].headers["x-replica"] != answers["two"].headers["x-replica"]
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == texts["one"]
        with client.stream("POST", "/v1/completions", json={**body, "model": "two", "stream": True}) as stream:
            assert [*stream.iter_lines()][-2:] == ["data: [DONE]", ""]
        assert [client.get(path).json() for path in ("/health", "/ready")] == [{"status": "ok"}] * 2
        assert {line.split('model_name="')[1].split('"')[0] for line in samples(client)} == {"one", "two"}

        refused = client.post("/v1/completions", json={**body, "model": "three"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert refused.json()["error"]["message"] == "model 'three' does not exist; this server serves 'one', 'two'"
        assert client.get("/v1/models/three").status_code == 404
        message = {"model": "three", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
        assert client.post("/v1/messages", json=message).json()["type"] == "error"
        for path in ("/v1/models", "/v1/models/three"):
            assert httpx.get(f"{deployment.url}{path}").status_code == 401
        assert httpx.post(f"{deployment.url}/v1/completions", json={**body, "model": "three"}).status_code == 401


def samples(client: httpx.Client) -> list[str]:
    """Lines of /metrics that say how many requests there were."""
    lines = client.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith("mini_sglang:request_success_total{")]


def test_a_new_version_loses_no_stream(model: tuple[str, ...], tmp_path: Path) -> None:
    """The same command once more, with other options, on a cluster that is there: Ray replaces one after another."""
    address, port = f"127.0.0.1:{free_port()}", free_port()
    ray = Path(sys.executable).with_name("ray")
    start = (
        *(ray, "start", "--head", f"--port={address.split(':')[1]}", "--num-cpus=4", "--include-dashboard=false"),
        *("--object-store-memory=100000000", "--disable-usage-stats", f"--temp-dir={short_folder()}"),
        "--block",
    )
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    head = subprocess.Popen(start, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def deploy(log: Path, *options: str) -> None:
            command = (*COMMAND, "--ray-address", address, "--port", str(port), "--replicas", "2", *ENGINE, *model)
            with log.open("wb") as file:
                process = subprocess.Popen([*command, *options], env=environment, stdout=file, stderr=file)
            wait_for_greeting(process, log)
            assert process.wait(60) == 0

        until(lambda: _listens(address), limit_s=60)
        deploy(tmp_path / "old", "--num-pages", "1000")
        deployment = Deployment(head, f"http://127.0.0.1:{port}", tmp_path / "old")
        old = set(deployment.engine_pids())
        assert len(old) == 2
        with ThreadPoolExecutor(9) as threads:
            streams = [Stream(threads, deployment.url, number) for number in range(6)]
            until(lambda: all(stream.num_events > 3 for stream in streams), limit_s=30)
            updating = threads.submit(deploy, tmp_path / "new", "--num-pages", "1001")
            while not updating.done():
                assert complete(deployment.url, f"{time.monotonic()}").status_code == 200
            updating.result()
            for stream in streams:
                stream.wait()
        assert [stream.last for stream in streams] == ["[DONE]"] * 6
        assert {stream.replica for stream in streams} == old
        until(lambda: not old & set(deployment.engine_pids()), limit_s=60)
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(60)


def short_folder() -> str:
    """Ray's sockets lie in it, whose paths may have about a hundred characters."""
    return tempfile.mkdtemp(prefix="ray-")


def _listens(address: str) -> bool:
    try:
        httpx.get(f"http://{address}", timeout=1)
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        return True
    return True
