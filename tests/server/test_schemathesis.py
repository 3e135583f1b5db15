"""Requests that schemathesis makes of the API's description, right and wrong ones, to a real server with a tiny model.

Takes FUZZ_SECONDS (20); `make fuzz` takes ten minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import StartServer
from tests.tiny import Checkpoints

pytest.importorskip("schemathesis")

SECONDS = int(os.environ.get("FUZZ_SECONDS", "20"))
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
ANSWER_WITHIN_S = 60  # longer is a hang


def test_no_request_harms_the_server(start_server: StartServer, checkpoints: Checkpoints, tmp_path: Path) -> None:
    server = start_server(
        "--model", str(checkpoints.write("qwen3").path), "--dtype", "float32", "--context-length", "64",
        "--num-pages", "64", "--served-model-name", "tiny",
    )  # fmt: skip

    def canary() -> Any:
        messages = [{"role": "user", "content": "Name three colours."}]
        answer = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=12)
        return answer.json()["choices"][0]["message"]

    fresh = canary()
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
        *("--max-time", str(SECONDS), "--checks", CHECKS, "--request-timeout", str(ANSWER_WITHIN_S)),
        *("--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert canary() == fresh
    gauges = dict(re.findall(r"^mini_sglang:(\w+)(?:\{.*\})? (\S+)$", server.get("/metrics").text, re.MULTILINE))
    for name in ("num_requests_running", "num_requests_waiting", "kv_used_pages"):
        assert float(gauges[name]) == 0
    assert "Traceback" not in server.log.read_text()
