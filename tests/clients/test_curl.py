"""curl in the ways that reach a server's parser by different paths, where it is there."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.clients.asks import chat_bodies, check_answers
from tests.tiny import RunningServer

if shutil.which("curl") is None:
    pytest.skip("curl is not there", allow_module_level=True)


@pytest.mark.parametrize("options", [("--http1.0",), ("--http1.1",), ("--http2",), ("--compressed",)], ids=" ".join)
def test_chat_stream_and_tool_call(server: RunningServer, question: str, answer: str, options: tuple[str, ...]) -> None:
    version = subprocess.run(("curl", "--version"), capture_output=True, text=True, check=True).stdout
    if options == ("--http2",) and "HTTP2" not in version:
        pytest.skip("this curl speaks no HTTP/2")
    texts = []
    for body in chat_bodies(question):
        address = f"{server.url}/v1/chat/completions"
        command = ("curl", "-sS", "--fail", *options, "-H", "content-type: application/json", "-d", "@-", address)
        done = subprocess.run(command, input=json.dumps(body), capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    check_answers(texts, answer)
