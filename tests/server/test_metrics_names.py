"""Metrics under vLLM's names: what endpoint pickers and routers read, and what vLLM's dashboards ask for.

The names are facts, written down from vLLM's examples/observability and docs/usage/metrics.md, from the model server
protocol of the Gateway API inference extension (docs/proposals/003-model-server-protocol) and from the routers' sources
in November 2026.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.server.conftest import NUM_PAGES, PAGE_SIZE, ScriptedEngine, StartServer
from tests.tiny import Checkpoints, RunningServer

PAGE_OF_METRICS = Path(__file__).parents[2] / "docs" / "observability.md"
PAGE = 4  # tokens
PAGES = 50

# vllm-project/vllm: examples/observability/prometheus_grafana/grafana.json
REFERENCE_DASHBOARD = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count
vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:inter_token_latency_seconds_bucket vllm:inter_token_latency_seconds_sum vllm:inter_token_latency_seconds_count
vllm:num_requests_running vllm:num_requests_waiting
vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum vllm:time_to_first_token_seconds_count
vllm:kv_cache_usage_perc vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_success_total vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
vllm:request_decode_time_seconds_sum vllm:request_max_num_generation_tokens_sum
"""

# The same project: examples/observability/dashboards/grafana/ vllm_overview.json, vllm_instances.json,
# vllm_service_status.json, vllm_kv_cache.json, performance_statistics.json and query_statistics.json, but for panels of
# what an engine may lack (KV connectors, several modalities, speculation, sleep, weight updates, estimated FLOPS).
OTHER_DASHBOARDS = """
vllm:num_preemptions_total vllm:prefix_cache_hits_total vllm:prefix_cache_queries_total vllm:prompt_tokens_cached_total
vllm:request_time_per_output_token_seconds_bucket vllm:request_time_per_output_token_seconds_sum
vllm:request_time_per_output_token_seconds_count vllm:request_queue_time_seconds_bucket
vllm:request_queue_time_seconds_count vllm:request_prefill_time_seconds_count vllm:request_decode_time_seconds_count
vllm:request_prompt_tokens_sum vllm:request_prompt_tokens_count vllm:request_generation_tokens_sum
vllm:request_generation_tokens_count vllm:request_prefill_kv_computed_tokens_sum
vllm:request_prefill_kv_computed_tokens_count vllm:cache_config_info vllm:lora_requests_info
vllm:iteration_tokens_total_bucket vllm:iteration_tokens_total_sum vllm:iteration_tokens_total_count
http_requests_total http_request_duration_seconds_sum http_request_duration_seconds_count
process_start_time_seconds process_cpu_seconds_total process_resident_memory_bytes process_open_fds process_max_fds
"""
SELECTED: list[tuple[str, dict[str, str]]] = [  # of which these dashboards want one series
    ("vllm:num_requests_waiting_by_reason", {"reason": "capacity"}),
    ("vllm:num_requests_waiting_by_reason", {"reason": "deferred"}),
    ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
    ("vllm:prompt_tokens_by_source_total", {"source": "local_cache_hit"}),
    ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}),
    ("vllm:engine_sleep_state", {"sleep_state": "awake"}),
    ("vllm:engine_sleep_state", {"sleep_state": "discard_all"}),
    ("vllm:request_success_total", {"finished_reason": "error"}),
    ("http_requests_total", {"status": "2xx", "handler": "/v1/completions"}),
    *(("vllm:time_to_first_token_seconds_bucket", {"le": bound}) for bound in ("0.25", "0.5", "1.0", "2.5", "5.0")),
    *(("vllm:request_time_per_output_token_seconds_bucket", {"le": b}) for b in ("0.025", "0.05", "0.075", "0.2")),
]

# What vLLM's docs/usage/metrics.md names besides, of requests and of the cache.
DOCUMENTED = """
vllm:request_inference_time_seconds_sum vllm:request_params_n_sum vllm:request_params_max_tokens_sum
"""

# vllm-project/production-stack: src/vllm_router/stats/engine_stats.py and observability/vllm-dashboard.json
PRODUCTION_STACK = """
vllm:num_requests_running vllm:num_requests_waiting vllm:gpu_prefix_cache_hits_total
vllm:gpu_prefix_cache_queries_total vllm:gpu_cache_usage_perc vllm:time_per_output_token_seconds_sum
"""

ASKED_FOR = sorted({*" ".join((REFERENCE_DASHBOARD, OTHER_DASHBOARDS, DOCUMENTED, PRODUCTION_STACK)).split()})


def parse(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(samples: list[Sample], name: str, **labels: str) -> float:
    """Of the one series with this name and these labels among its own."""
    [found] = [each for each in samples if each.name == name and labels.items() <= each.labels.items()]
    return found.value


@pytest.fixture(scope="module")
def server(start_server: StartServer, checkpoints: Checkpoints) -> RunningServer:
    """Has answered, refused, and generated with a cached prefix and with several choices."""
    model, pool = str(checkpoints.write().path), ("--page-size", str(PAGE), "--num-pages", str(PAGES))
    server = start_server("--model", model, *pool, "--dtype", "float32", "--served-model-name", "tiny")
    for fields in ({}, {}, {"n": 3, "temperature": 1}):
        body = {"prompt": [5, 6, 7, 8, 9, 10, 11, 12, 13], "max_tokens": 6, "ignore_eos": True, **fields}
        assert server.post("/v1/completions", **body).status_code == 200
    assert server.post("/v1/completions", prompt="Hi", max_tokens=0.5).status_code == 400
    assert server.post("/v1/completions", prompt="Hi", regex="(").status_code == 400
    assert server.get("/nowhere").status_code == 404
    return server


@pytest.fixture
def samples(server: RunningServer) -> list[Sample]:
    return parse(server.get("/metrics").text)


def test_an_endpoint_picker_finds_every_gauge(samples: list[Sample]) -> None:
    """As the inference extension's scrapes: by name alone, the size of the cache and adapters from labels."""
    for gauge in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert value(samples, f"vllm:{gauge}") == 0
    [cache] = [each.labels for each in samples if each.name == "vllm:cache_config_info"]
    assert (int(cache["block_size"]), int(cache["num_gpu_blocks"])) == (PAGE, PAGES)
    latest = max((each for each in samples if each.name == "vllm:lora_requests_info"), key=lambda each: each.value)
    assert (int(latest.labels["max_lora"]), latest.labels["running_lora_adapters"]) == (0, "")
    assert latest.labels["waiting_lora_adapters"] == ""


@pytest.mark.parametrize("name", ASKED_FOR)
def test_what_dashboards_and_routers_ask_for_has_data(samples: list[Sample], name: str) -> None:
    found = [each for each in samples if each.name == name]
    assert found
    if name.startswith("vllm:"):
        assert {(each.labels["model_name"], each.labels["engine"]) for each in found} == {("tiny", "0")}
    if name.endswith(("_count", "_bucket")):
        assert max(each.value for each in found) > 0


@pytest.mark.parametrize(("name", "labels"), SELECTED, ids=lambda part: str(part))
def test_the_series_that_dashboards_select_are_there(samples: list[Sample], name: str, labels: dict[str, str]) -> None:
    assert [each for each in samples if each.name == name and labels.items() <= each.labels.items()]


def test_both_names_show_the_same(samples: list[Sample]) -> None:
    def values(prefix: str) -> dict[Any, float]:
        return {
            (each.name.removeprefix(prefix), *sorted({**each.labels, "engine": ""}.items())): each.value
            for each in samples
            if each.name.startswith(prefix)
        }

    ours, vllms = values("mini_sglang:"), values("vllm:")
    shared = ours.keys() & vllms.keys()
    assert len(shared) > 300
    assert {key: ours[key] for key in shared} == {key: vllms[key] for key in shared}
    assert {key[0] for key in ours.keys() - shared} == {
        *("engine_up", "kv_pages", "kv_used_pages", "kv_cached_pages", "kv_free_pages"),
        *("engine_steps_total",),
    }


def test_every_metric_is_on_the_page(samples: list[Sample]) -> None:
    page = PAGE_OF_METRICS.read_text()
    for name in {each.name.partition(":")[2] for each in samples if ":" in each.name}:
        family = re.sub("_(bucket|sum|count|created)$", "", name)
        assert f"{family}`" in page or f"{family}{{" in page or f"{family}_total" in page, family


def test_choices_limits_and_sources_are_counted(samples: list[Sample]) -> None:
    assert value(samples, "vllm:request_params_n_sum") == 1 + 1 + 3 + 1  # the last was refused by the engine
    assert value(samples, "vllm:request_params_n_count") == 4
    assert value(samples, "vllm:request_max_num_generation_tokens_sum") == 3 * 6
    assert value(samples, "vllm:request_generation_tokens_sum") == 5 * 6
    assert value(samples, "vllm:request_params_max_tokens_count") == 6
    cached = value(samples, "vllm:prompt_tokens_cached_total")
    assert cached > 0
    assert value(samples, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == cached
    assert value(samples, "vllm:prompt_tokens_by_source_total", source="local_compute") == 5 * 9 - cached
    assert value(samples, "vllm:request_prefill_kv_computed_tokens_sum") == 5 * 9 - cached
    assert value(samples, "vllm:iteration_tokens_total_count") == value(samples, "mini_sglang:engine_steps_total")
    computed = 5 * 9 - cached + 5 * (6 - 1)  # of an answer's tokens all but the last are computed with
    assert value(samples, "vllm:iteration_tokens_total_sum") == computed
    parts = [value(samples, f"vllm:request_{part}_time_seconds_sum") for part in ("prefill", "decode", "inference")]
    assert parts[0] + parts[1] == pytest.approx(parts[2])


def test_what_a_client_does_wrong_is_no_failure_of_the_worker(samples: list[Sample]) -> None:
    assert value(samples, "vllm:request_success_total", finished_reason="error") == 0
    assert value(samples, "vllm:request_success_total", finished_reason="refused") == 1
    answered = {
        (each.labels["handler"], each.labels["status"]): each.value
        for each in samples
        if each.name == "http_requests_total"
    }
    assert answered == {("/v1/completions", "2xx"): 3, ("/v1/completions", "4xx"): 2, ("none", "4xx"): 1}


def test_what_clients_invent_makes_no_new_series(client: TestClient) -> None:
    for index in range(5):
        client.request(f"ODD{index}", f"/path-{index}")
    found = [each for each in parse(client.get("/metrics").text) if each.name == "http_requests_total"]
    assert [(each.labels["handler"], each.labels["method"], each.value) for each in found] == [("none", "other", 5)]


@pytest.mark.parametrize(
    ("names", "there"), [("both", {"mini_sglang", "vllm"}), ("vllm", {"vllm"}), ("mini_sglang", {"mini_sglang"})]
)
def test_a_set_of_names_can_be_left_out(make_app: Callable[..., FastAPI], names: str, there: set[str]) -> None:
    samples = parse(TestClient(make_app(metrics_names=names)).get("/metrics").text)
    assert {each.name.partition(":")[0] for each in samples if ":" in each.name} == there


def test_an_unknown_set_of_names_is_refused(make_app: Callable[..., FastAPI]) -> None:
    with pytest.raises(ValueError, match="metrics_names must be one of both, mini_sglang, vllm"):
        make_app(metrics_names="sglang")


@pytest.mark.parametrize("name", ['{"model_name="a"}', "line\nnum_requests_running", "back\\slash", "# HELP up"])
def test_a_models_name_changes_nothing_but_its_label(make_app: Callable[..., FastAPI], name: str) -> None:
    samples = parse(TestClient(make_app(served_model_name=(name,))).get("/metrics").text)
    named = [each for each in samples if ":" in each.name]
    assert {each.labels["model_name"] for each in named} == {name}
    assert {each.labels.get("engine") for each in named if each.name.startswith("vllm:")} == {"0"}
    info = next(each.labels for each in named if each.name == "vllm:cache_config_info")
    assert (info["block_size"], info["num_gpu_blocks"]) == (str(PAGE_SIZE), str(NUM_PAGES))


def test_an_engine_that_does_not_answer_leaves_its_figures_out(client: TestClient, engine: ScriptedEngine) -> None:
    engine.error = TimeoutError()
    samples = parse(client.get("/metrics").text)
    assert value(samples, "mini_sglang:engine_up") == 0
    assert not [each for each in samples if each.name == "vllm:num_requests_running"]
