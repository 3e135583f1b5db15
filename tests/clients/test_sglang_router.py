"""SGLang's router in front of a server."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.tiny import RunningServer

if importlib.util.find_spec("sglang_router") is None:
    pytest.skip("sglang-router is not installed", allow_module_level=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def router(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, metrics_port = free_port(), free_port()
    log: Path = tmp_path_factory.mktemp("router") / "log"
    options = ("--port", str(port), "--prometheus-port", str(metrics_port), "--worker-urls", server.url)
    with log.open("wb") as file:
        command = (sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", *options)
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _serves(url):
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _serves(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/v1/models").json().get("data"))
    except (httpx.HTTPError, ValueError):
        return False


def test_it_knows_the_model(router: str) -> None:
    assert [model["id"] for model in httpx.get(f"{router}/v1/models").json()["data"]] == ["smollm2-135m"]


def test_a_chat_and_a_completion_go_through(router: str, question: str, answer: str) -> None:
    client = openai.OpenAI(base_url=f"{router}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": question}]
    asked: Any = {"model": "smollm2-135m", "messages": messages, "max_tokens": 8, "temperature": 0}
    assert client.chat.completions.create(**asked).choices[0].message.content == answer
    stream = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer
    prompt: Any = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    assert client.completions.create(**prompt).choices[0].text == " Paris."
    assert client.responses.create(model="smollm2-135m", input=question, max_output_tokens=8, store=False).output


def test_sglangs_own_route_goes_through(router: str) -> None:
    body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    assert httpx.post(f"{router}/generate", json=body, timeout=60).json()["text"] == " Paris."
