"""What a model's chat template refuses is an error of the request, in the template's own words, in every API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mini_sglang.text.tokenizer import Tokenizer

NO_SYSTEM = """\
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}{{ message.content }}
{%- endfor %}"""
USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def ask(serve: Callable[..., str], with_template: Callable[[str], Tokenizer]) -> Callable[..., Any]:
    """`ask(route, **fields)` → the error of the answer, which must have status 400."""
    url = serve(tokenizer=with_template(NO_SYSTEM))

    def ask(route: str, **fields: Any) -> Any:
        response = httpx.post(f"{url}{route}", json={"model": "scripted", **fields})
        assert response.status_code == 400, response.text
        return response.json()["error"]

    return ask


def test_chat_completions(ask: Callable[..., Any]) -> None:
    error = ask("/v1/chat/completions", messages=[{"role": "system", "content": "Be brief."}, USER])
    assert error["message"] == "messages are not accepted by the model's chat template: System role not supported"
    assert error["param"] == "messages"
    error = ask("/v1/chat/completions", messages=[USER, USER], stream=True)
    assert error["message"].endswith("template: Conversation roles must alternate user/assistant/user/assistant/...")


def test_responses(ask: Callable[..., Any]) -> None:
    error = ask("/v1/responses", input="Hi", instructions="Be brief.")
    assert error["message"].endswith("not accepted by the model's chat template: System role not supported")


def test_messages(ask: Callable[..., Any]) -> None:
    error = ask("/v1/messages", messages=[USER], system="Be brief.", max_tokens=4)
    assert error["message"].endswith("not accepted by the model's chat template: System role not supported")
    assert error["type"] == "invalid_request_error"
