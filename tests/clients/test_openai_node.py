"""OpenAI's library for Node, where `node` and the package are there (NODE_PATH names the folder it is in)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tiny import RunningServer

SCRIPT = Path(__file__).parent / "data" / "chat.js"

if shutil.which("node") is None or subprocess.run(("node", "-e", "require('openai')"), capture_output=True).returncode:
    pytest.skip("node or its package openai is not there", allow_module_level=True)


def test_chats_tools_and_responses(server: RunningServer, question: str, answer: str) -> None:
    environment = {**os.environ, "BASE_URL": f"{server.url}/v1", "QUESTION": question}
    done = subprocess.run(("node", str(SCRIPT)), capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for name in ("whole", "streamed", "helper", "response", "response_streamed"):
        assert told[name] == answer, name
    assert list(json.loads(told["call"]["arguments"])) == ["zone"]
    assert told["completion"] == " Paris."
    assert (told["refused"]["status"], told["refused"]["param"]) == (400, "audio")
