"""What orchestrators and routers ask: alive, ready, generating, how loaded; and a server that takes no new work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from mini_sglang.server.native import probes
from tests.server.conftest import NUM_PAGES, PAGE_SIZE, ScriptedEngine, StartServer
from tests.tiny import Checkpoints, until

OPEN = ("/health", "/ready", "/health_generate", "/get_load", "/v1/loads", "/metrics")
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    "/generate": {"prompt": "Hi"},
}


def asker(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize("route", OPEN)
def test_probes_need_no_key(make_app: Callable[..., FastAPI], route: str) -> None:
    assert TestClient(make_app(api_key=("secret",))).get(route).status_code == 200


def test_a_drain_needs_the_key(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(api_key=("secret",)))
    assert client.post("/drain").status_code == 401
    assert client.get("/ready").status_code == 200
    assert client.post("/drain", headers={"authorization": "Bearer secret"}).status_code == 200
    assert client.get("/ready").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", GENERATING)
def test_a_draining_server_takes_no_new_work_and_ends_what_runs(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine, route: str, stream: bool
) -> None:
    engine.pause_after = 3
    body = {**GENERATING[route], "stream": stream}

    async def scenario() -> None:
        app = make_app()
        context = app.state.context
        async with asyncio.timeout(20), asker(app) as client:
            running = asyncio.create_task(client.post(route, json=body))
            while not engine.running:
                await asyncio.sleep(0.001)
            assert (await client.post("/drain")).json() == {"draining": True, "requests": 1}
            assert (await client.post("/drain")).json() == {"draining": True, "requests": 1}
            refused = await client.post(route, json=body)
            assert refused.status_code == 503
            assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
            assert "draining" in refused.json()["error"]["message"]
            for probe, status in (("/health", 200), ("/ready", 503), ("/health_generate", 503), ("/metrics", 200)):
                assert (await client.get(probe)).status_code == status
            assert not context.drained.is_set()
            [request_id] = engine.request_ids
            engine.abort(request_id)
            assert (await running).status_code == 200
            assert context.drained.is_set()
            assert len(engine.calls) == 1

    asyncio.run(scenario())


def test_readiness_follows_the_engine(client: TestClient, engine: ScriptedEngine) -> None:
    assert client.get("/ready").json() == {"status": "ok"}
    engine.error = TimeoutError("the engine did not answer within 5 s")
    for route in ("/ready", "/get_load", "/v1/loads"):
        assert client.get(route).json()["error"]["code"] == "engine_stuck"


def test_health_generate_generates_one_token_and_is_no_request_of_a_client(
    client: TestClient, engine: ScriptedEngine
) -> None:
    assert client.get("/health_generate").json() == {"status": "ok"}
    [call] = engine.calls
    assert call.params.max_tokens == 1
    assert 'generation_tokens_total{model_name="scripted"} 0.0' in client.get("/metrics").text
    engine.fail_after = 0
    failed = client.get("/health_generate")
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_failed")


def test_callers_of_health_generate_share_a_generation_that_ends_in_time(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.pause_after = 0
    monkeypatch.setattr(probes, "GENERATE_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with asyncio.timeout(10), asker(make_app()) as client:
            answers = await asyncio.gather(*(client.get("/health_generate") for _ in range(20)))
            assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {
                (503, "engine_stuck")
            }
            assert len(engine.calls) == 1
            assert engine.running == {}
            engine.pause_after = None
            assert (await client.get("/health_generate")).status_code == 200

    asyncio.run(scenario())


def test_a_busy_engine_is_healthy_though_the_probe_itself_waits(
    make_app: Callable[..., FastAPI], engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = engine.generate

    async def slow(*args: Any, request_id: str, **kwargs: Any) -> Any:
        """Others get a token every 10 ms for as long as they like; the probe gets none."""
        async for output in generate(*args, request_id=request_id, **kwargs):
            await asyncio.sleep(30 if request_id.startswith("health") else 0.01)
            yield output

    monkeypatch.setattr(engine, "generate", slow)

    async def scenario() -> None:
        async with asyncio.timeout(10), asker(make_app()) as client:
            body = {"prompt": "Hi", "max_tokens": 100, "ignore_eos": True}
            other = asyncio.create_task(client.post("/generate", json=body))
            assert (await client.get("/health_generate")).status_code == 200
            other.cancel()

    asyncio.run(scenario())


def test_the_load_of_a_full_server(start_server: StartServer, checkpoints: Checkpoints) -> None:
    model, pool = str(checkpoints.write().path), ("--page-size", "16", "--num-pages", "40", "--dtype", "float32")
    server = start_server("--model", model, *pool, "--max-running-requests", "2")
    assert server.get("/health_generate").status_code == 200
    idle = server.get("/v1/loads?include=core").json()
    assert idle["aggregate"]["total_tokens"] == idle["aggregate"]["total_reqs"] == 0
    [load] = server.get("/get_load").json()
    assert (load["num_reqs"], load["num_tokens"]) == (0, 0)

    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {"max_tokens": 200, "ignore_eos": True}
            prompts = [[3 + index] * 40 for index in range(5)]
            sent = [asyncio.create_task(client.post("/generate", json={"prompt": p, **body})) for p in prompts]
            load: dict[str, Any] = {}
            while (load.get("num_running_reqs"), load.get("num_waiting_reqs")) != (2, 3):
                [load] = (await client.get("/v1/loads")).json()["loads"]
            assert load["num_total_reqs"] == 5
            assert load["num_total_tokens"] - load["num_used_tokens"] == 3 * 40
            assert 2 * 40 <= load["num_used_tokens"] <= load["max_total_num_tokens"] == 640
            assert load["token_usage"] == load["num_used_tokens"] / 640
            assert load["max_running_requests"] == 2
            [old] = (await client.get("/get_load")).json()
            assert (old["dp_rank"], old["num_reqs"], old["num_waiting_reqs"]) == (0, 5, 3)
            assert old["num_pending_tokens"] == 3 * 40
            assert old["num_tokens"] >= load["num_total_tokens"]
            assert all(response.status_code == 200 for response in await asyncio.gather(*sent))

    asyncio.run(scenario())
    until(lambda: server.get("/get_load").json()[0]["num_reqs"] == 0)


def test_the_load_counts_tokens_by_pages(client: TestClient) -> None:
    [load] = client.get("/v1/loads").json()["loads"]
    assert load["max_total_num_tokens"] == NUM_PAGES * PAGE_SIZE
