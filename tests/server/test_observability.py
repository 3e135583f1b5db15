"""Metrics, step log, server_info and traces of a real server agree with what its clients saw."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from mini_sglang.bench.step_history import History
from tests.server.conftest import StartServer
from tests.tiny import Checkpoints, RunningServer

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "mini_sglang.json"


@dataclass
class Seen:
    """What a client knows of its request when it is over. `reason` is None if it left."""

    reason: str | None
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@pytest.fixture(scope="module")
def step_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "steps.jsonl"


@pytest.fixture(scope="module")
def server(start_server: StartServer, checkpoints: Checkpoints, step_log: Path) -> Any:
    """A pool of 160 tokens, which a few requests fill."""
    pool = ("--page-size", "4", "--num-pages", "40", "--max-prefill-tokens", "32", "--dtype", "float32")
    where = ("--step-log", str(step_log), "--profile-dir", str(step_log.parent / "traces"), "--api-key", "secret-key")
    return start_server("--model", str(checkpoints.write().path), *pool, *where)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    headers = {"authorization": "Bearer secret-key"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


def metrics(client: httpx.Client) -> dict[str, float]:
    """All metrics by name, and by labels beyond the model's name."""
    text = re.sub(r',?model_name="[^"]*"', "", client.get("/metrics").text).replace("{}", "")
    pairs = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("mini_sglang:"): float(value) for name, _, value in pairs}


def ended(counted: dict[str, float]) -> dict[str, float]:
    reasons = ("stop", "length", "abort", "error", "refused")
    return {reason: counted[f'request_success_total{{finished_reason="{reason}"}}'] for reason in reasons}


def ask(client: httpx.Client, chance: random.Random, leaves: bool) -> Seen:
    """One request of a random kind, plain or streamed, that ends by itself, by /abort, by an error or by leaving."""
    prompt = [chance.randrange(3, 320) for _ in range(chance.choice((1, 5, 30, 60)))]
    request_id = f"request-{chance.getrandbits(60)}"
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": chance.randint(1, 60), "request_id": request_id}
    body |= {"seed": chance.randrange(100), "ignore_eos": chance.random() < 0.5}
    if chance.random() < 0.3:
        body["stop"] = [" the", "a", "1"]
    if not leaves and chance.random() < 0.1:
        body |= {"regex": "(", "ignore_eos": False}
    if not leaves and chance.random() < 0.4:
        response = client.post("/generate", json=body)
        return Seen("refused") if response.status_code == 400 else seen_in([response.json()])
    abort_after = chance.randint(1, 20) if chance.random() < 0.4 else None
    events: list[dict[str, Any]] = []
    with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        if response.status_code == 400:
            return Seen("refused")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == abort_after:
                    if leaves:
                        return Seen(None, sum(len(event["token_ids"]) for event in events))
                    client.post("/abort", json={"request_id": request_id})
    if "error" in events[-1]:
        return Seen("error")
    return seen_in(events)


def seen_in(events: list[dict[str, Any]]) -> Seen:
    usage = events[-1]["usage"]
    assert sum(len(event["token_ids"]) for event in events) == usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Seen(events[-1]["finish_reason"], usage["completion_tokens"], usage["prompt_tokens"], cached)


def ask_many(client: httpx.Client, seed: int, leaves: bool = False) -> list[Seen]:
    chances = [random.Random(f"{seed} {index}") for index in range(24)]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda chance: ask(client, chance, leaves), chances))


@pytest.mark.parametrize("seed", range(2))
def test_metrics_equal_what_clients_saw_whatever_happened_to_their_requests(client: httpx.Client, seed: int) -> None:
    before = metrics(client)
    seen = ask_many(client, seed)
    after = metrics(client)
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    began = [each for each in seen if each.tokens]
    reasons = Counter(each.reason for each in seen)
    assert {reason: count for reason, count in ended(change).items() if count} == reasons
    assert change["generation_tokens_total"] == sum(each.tokens for each in seen)
    assert change["prompt_tokens_total"] == sum(each.prompt_tokens for each in began)
    assert change["prompt_tokens_cached_total"] == sum(each.cached_tokens for each in began)
    assert change["prefix_cache_queries_total"] >= change["prompt_tokens_total"]
    assert change["prefix_cache_hits_total"] >= change["prompt_tokens_cached_total"]
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "request_prompt_tokens"):
        assert change[f"{name}_count"] == len(began)
    for name in ("e2e_request_latency_seconds", "request_generation_tokens"):
        assert change[f"{name}_count"] == len(seen)
    assert change["inter_token_latency_seconds_count"] == sum(each.tokens - 1 for each in began)
    assert change["inter_token_latency_seconds_sum"] == pytest.approx(change["request_decode_time_seconds_sum"])
    assert change["request_generation_tokens_sum"] == change["generation_tokens_total"]
    latencies = ("request_queue_time_seconds", "request_prefill_time_seconds")
    assert sum(change[f"{name}_sum"] for name in latencies) == pytest.approx(change["time_to_first_token_seconds_sum"])
    assert after["num_requests_running"] == after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0


def test_clients_that_leave_count_as_aborted_with_what_they_got(client: httpx.Client) -> None:
    before = metrics(client)
    seen = ask_many(client, 99, leaves=True)
    while metrics(client)["num_requests_running"]:
        pass
    after = metrics(client)
    left = sum(each.reason is None for each in seen)
    assert left > 0
    changed = {reason: after_count - ended(before)[reason] for reason, after_count in ended(after).items()}
    known = Counter(each.reason for each in seen if each.reason is not None)
    # who left after the last token, before the server said that it was the last, may have been answered in full
    assert known["stop"] + known["length"] <= changed["stop"] + changed["length"]
    assert sum(changed.values()) == len(seen)
    generated = after["generation_tokens_total"] - before["generation_tokens_total"]
    assert generated >= sum(each.tokens for each in seen)


def test_the_step_log_agrees_with_the_metrics(client: httpx.Client, step_log: Path) -> None:
    for seed in range(7, 27):  # how many run at once is a matter of time: until somebody had to make room
        ask_many(client, seed)
        if metrics(client)["num_preemptions_total"]:
            break
    counted, stats = metrics(client), client.get("/server_info").json()["stats"]
    history = History(step_log)
    assert counted["num_preemptions_total"] > 0
    assert sum(len(life.preempted_us) for life in history.lives) == counted["num_preemptions_total"]
    assert len(history.steps) == counted["engine_steps_total"]
    admitted = [life for life in history.lives if life.started_us is not None]
    assert sum(life.prompt_tokens for life in admitted) == counted["prefix_cache_queries_total"]
    assert sum(life.cached_tokens for life in admitted) == counted["prefix_cache_hits_total"]
    assert Counter(life.reason in ("stop", "length") for life in history.lives) == {
        True: stats["num_finished"],
        False: stats["num_aborted"],
    }
    assert sum(life.tokens for life in history.lives) == stats["num_generated_tokens"]


def test_server_info_shows_settings_and_no_secrets(client: httpx.Client, step_log: Path) -> None:
    info = client.get("/server_info").json()
    config = info["engine"]["config"]
    assert (config["num_pages"], config["max_prefill_tokens"], config["step_log"]) == (40, 32, str(step_log))
    assert config["device"] in ("cpu", "cuda")
    assert info["server"]["max_waiting_requests"] == 4096
    assert info["stats"]["num_running"] == 0
    assert info["requests"] == []
    assert "secret-key" not in json.dumps(info)


@pytest.mark.parametrize("body", [None, {"num_steps": 2}])
def test_a_trace_of_a_running_server(client: httpx.Client, body: dict[str, int] | None) -> None:
    assert client.post("/stop_profile").status_code == 400
    assert client.post("/start_profile", json=body).json() == {"profiling": True}
    assert "already" in client.post("/start_profile").json()["error"]["message"]
    client.post("/generate", json={"prompt": [5, 6], "max_tokens": 5, "ignore_eos": True})
    path = Path(client.post("/stop_profile").json()["trace"])
    names = [str(event["name"]) for event in json.loads(path.read_text())["traceEvents"]]
    launched = [name for name in names if name.startswith("launch ")]
    assert len(launched) == (5 if body is None else 2)
    assert any(name.startswith("aten::") for name in names)


@pytest.mark.parametrize("body", [{"num_steps": 0}, {"num_steps": 1 << 68}, {"num_steps": "x"}, {"output_dir": "/tmp"}])
def test_a_trace_takes_a_number_of_steps_and_no_path(client: httpx.Client, body: dict[str, Any]) -> None:
    response = client.post("/start_profile", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(body))


def test_the_dashboard_asks_for_metrics_that_there_are(client: httpx.Client) -> None:
    there = set(re.findall(r"^(mini_sglang:\w+)", client.get("/metrics").text, re.MULTILINE))
    asked = set(re.findall(r"mini_sglang:\w+", DASHBOARD.read_text()))
    assert len(asked) > 20
    assert asked <= there


def test_a_prompt_that_is_only_echoed_generates_nothing(serve: Callable[..., str]) -> None:
    url = serve()
    httpx.post(f"{url}/v1/completions", json={"prompt": [1], "max_tokens": 0, "echo": True})
    httpx.post(f"{url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 4})
    text = httpx.get(f"{url}/metrics").text
    assert 'generation_tokens_total{model_name="scripted"} 4.0' in text
    assert 'prompt_tokens_total{model_name="scripted"} 3.0' in text
