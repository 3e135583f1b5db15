"""A real Prometheus scrapes a server, and what vLLM's dashboards compute of it has values.

The queries say what the panels of the dashboards named in test_metrics_names.py show: rates, quantiles, means, shares.
"""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.conftest import StartServer
from tests.tiny import Checkpoints, RunningServer, until

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs the program prometheus")

CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - {{job_name: vllm, static_configs: [{{targets: ["{target}"]}}]}}
"""
OF = '{model_name="tiny"}'
SELECTED = '{job=~"vllm", model_name=~"tiny", instance=~".+", engine=~".+"}'
LATENCIES = (
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "time_to_first_token_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
)
QUERIES = [
    *(
        f"histogram_quantile({share}, sum by (le) (rate(vllm:{name}_bucket{SELECTED}[10s])))"
        for name in LATENCIES
        for share in (0.5, 0.9, 0.95, 0.99)
    ),
    *(f"rate(vllm:{name}_sum{OF}[10s]) / rate(vllm:{name}_count{OF}[10s])" for name in LATENCIES),
    *(f"sum by (le) (increase(vllm:request_{kind}_tokens_bucket{OF}[10s]))" for kind in ("prompt", "generation")),
    *(f"rate(vllm:request_{part}_time_seconds_sum{OF}[10s])" for part in ("queue", "prefill", "decode")),
    *(f"rate(vllm:{name}_total{OF}[10s])" for name in ("prompt_tokens", "generation_tokens", "num_preemptions")),
    *(f"vllm:{name}{OF}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")),
    f"sum by (finished_reason) (increase(vllm:request_success_total{OF}[10s]))",
    f"rate(vllm:request_max_num_generation_tokens_sum{OF}[10s])",
    f"sum(rate(vllm:prefix_cache_hits_total{OF}[10s])) / (sum(rate(vllm:prefix_cache_queries_total{OF}[10s])) > 0)",
    f"sum(rate(vllm:prompt_tokens_cached_total{OF}[10s])) / (sum(rate(vllm:prompt_tokens_total{OF}[10s])) > 0)",
    'sum(rate(vllm:prompt_tokens_by_source_total{source="local_compute"}[10s]))',
    'sum(rate(vllm:time_to_first_token_seconds_bucket{le="0.5"}[10s]))',
    'sum(vllm:num_requests_waiting_by_reason{reason="capacity"})',
    '(2 - (max(vllm:engine_sleep_state{sleep_state="awake"}) == bool 0))',
    'vllm:cache_config_info{engine=~".+"}',
    "topk by (job, instance) (1, vllm:lora_requests_info)",
    '(sum(rate(http_requests_total{status="5xx"}[10s])) or vector(0)) / (sum(rate(http_requests_total[10s])) > 0)',
    "sum by (handler) (rate(http_request_duration_seconds_sum[10s]))",
    "time() - process_start_time_seconds",
    "sum by (instance) (process_open_fds) / sum by (instance) (process_max_fds)",
]


@pytest.fixture(scope="module")
def server(start_server: StartServer, checkpoints: Checkpoints) -> RunningServer:
    model, pool = str(checkpoints.write().path), ("--page-size", "4", "--num-pages", "100", "--dtype", "float32")
    return start_server("--model", model, *pool, "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def prometheus(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Has scraped the server while it answered."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "config.yml").write_text(CONFIG.format(target=server.url.removeprefix("http://")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [str(PROMETHEUS), f"--config.file={folder / 'config.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}") as client:
            until(lambda: is_ready(client), limit_s=30)
            serve_for(server, seconds=8)
            yield client
    finally:
        process.kill()
        process.wait()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.HTTPError:
        return False


def serve_for(server: RunningServer, seconds: float) -> None:
    end = time.monotonic() + seconds

    def ask(index: int) -> None:
        while time.monotonic() < end:
            body = {"prompt": [5 + index, *range(20, 40)], "max_tokens": 12, "ignore_eos": True}
            assert server.post("/v1/completions", **body).status_code == 200

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, range(3)))


def test_every_query_has_values(prometheus: httpx.Client) -> None:
    empty = []
    for query in QUERIES:
        answer = prometheus.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (query, answer)
        values = [float(series["value"][1]) for series in answer["data"]["result"]]
        if not values or any(math.isnan(value) for value in values):
            empty.append((query, values))
    assert empty == []


def test_prometheus_own_linter_can_read_the_page(server: RunningServer) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool")
    page = server.get("/metrics").content
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
    complaints = [line for line in checked.stderr.decode().splitlines() if "should" not in line]
    assert complaints == []  # what it would name otherwise are vLLM's names
    assert checked.returncode in (0, 3)
