"""The JDK's own HTTP client, which offers an upgrade to HTTP/2 with each plain request; a JDK from 17 on does."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.asks import chat_bodies, check_answers
from tests.tiny import RunningServer

SOURCE = Path(__file__).parent / "data" / "Ask.java"


def _version_of_jdk() -> int:
    if shutil.which("java") is None or shutil.which("javac") is None:
        return 0
    told = subprocess.run(("javac", "-version"), capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+", told)
    return int(found[0]) if found else 0


if _version_of_jdk() < 17:
    pytest.skip("no JDK of version 17 or later is there", allow_module_level=True)


def test_chat_stream_and_tool_call(server: RunningServer, question: str, answer: str, tmp_path: Path) -> None:
    files = []
    for index, body in enumerate(chat_bodies(question)):
        files.append(tmp_path / f"{index}.json")
        files[-1].write_text(json.dumps(body), encoding="utf-8")
    command = ("java", str(SOURCE), f"{server.url}/v1/chat/completions", *map(str, files))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = [line.split() for line in done.stdout.splitlines()]
    assert [told[:2] for told in answers] == [["HTTP_1_1", "200"]] * 3
    check_answers([base64.b64decode(told[2]).decode() for told in answers], answer)
