"""SGLang's router in front of a server."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.fleet.router import routed
from tests.tiny import RunningServer

if importlib.util.find_spec("sglang_router") is None:
    pytest.skip("sglang-router is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def router(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with routed(tmp_path_factory.mktemp("router") / "log", [server]) as url:
        yield url


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
