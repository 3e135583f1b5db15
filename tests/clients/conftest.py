"""One server with the built-in model for all clients. `make test-clients` installs them; what is missing is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiny import RunningServer, run_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A RunningServer in float32, so that greedy answers are the same each time."""
    with run_server(
        tmp_path_factory.mktemp("server") / "log", "--model", "smollm2-135m", "--dtype", "float32"
    ) as server:
        yield server


@pytest.fixture(scope="session")
def question() -> str:
    return "Name a colour."


@pytest.fixture(scope="session")
def answer(server: RunningServer, question: str) -> str:
    """The first eight tokens of the greedy answer to `question`, asked for without any client."""
    messages = [{"role": "user", "content": question}]
    response = server.post("/v1/chat/completions", messages=messages, max_tokens=8, temperature=0)
    return str(response.json()["choices"][0]["message"]["content"])
