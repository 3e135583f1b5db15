"""Which model a request is for."""

from __future__ import annotations

import pytest

from mini_sglang.ray_serve.in_process import HttpRequest
from mini_sglang.ray_serve.model_choice import model_asked_for


def asked_for(method: str, path: str, body: bytes = b"") -> str | None:
    return model_asked_for(
        HttpRequest(method=method, path=path, query=b"", headers=(), client=None, body=body),
    )


def test_a_body_names_its_model_wherever_in_it() -> None:
    for body in (b'{"model": "a/b", "messages": []}', b'{"messages": [{"model": "no"}], "model": "a/b"}'):
        assert asked_for("POST", "/v1/chat/completions", body) == "a/b"


def test_a_card_is_of_the_model_in_its_path() -> None:
    assert asked_for("GET", "/v1/models/a/b") == "a/b"
    assert asked_for("GET", "/v1/models") is None


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"model": null}', b'{"model": 3}', b'{"model": "\xff"}', b"{", b"[" * 100_000]
)
def test_a_body_that_names_none_is_for_a_replica_to_judge(body: bytes) -> None:
    assert asked_for("POST", "/v1/completions", body) is None
