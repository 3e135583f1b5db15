"""Anthropic's library for Node, where `node` and the package are there (NODE_PATH names the folder it is in)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tiny import RunningServer

SCRIPT = Path(__file__).parent / "data" / "messages.js"
REQUIRED = "require('@anthropic-ai/sdk')"

if shutil.which("node") is None or subprocess.run(("node", "-e", REQUIRED), capture_output=True).returncode:
    pytest.skip("node or its package @anthropic-ai/sdk is not there", allow_module_level=True)


def test_message_stream_and_tool_call(server: RunningServer, question: str, answer: str) -> None:
    environment = {**os.environ, "BASE_URL": server.url, "QUESTION": question}
    done = subprocess.run(("node", str(SCRIPT)), capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["whole"] == told["streamed"] == answer
    assert list(told["call"]) == ["zone"]
