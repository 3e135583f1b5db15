"""What a prompt is, for the router, and Ray's app made from arguments. Needs Ray, but starts none."""

from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed")

from mini_sglang.deploy import build_app
from mini_sglang.ray_serve.in_process import HttpRequest
from mini_sglang.ray_serve.router import prompt_of


def request(body: object, method: str = "POST") -> HttpRequest:
    text = json.dumps(body).encode()
    return HttpRequest(method=method, path="/v1/any", query=b"", headers=(), client=None, body=text)


def test_a_later_turn_begins_as_the_one_before() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    later = [*messages, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]
    earlier, longer = (prompt_of([request({"messages": turns, "model": "m"})]) for turns in (messages, later))
    assert isinstance(earlier, str)
    assert isinstance(longer, str)
    assert longer.startswith(earlier.rstrip("]"))


@pytest.mark.parametrize("field", ["prompt", "text", "input_ids", "messages", "input", "system", "tools", "cache_salt"])
def test_what_differs_in_the_prompt_differs_for_the_router(field: str) -> None:
    assert prompt_of([request({field: "one"})]) != prompt_of([request({field: "two"})]) != ""


def test_what_is_no_prompt_counts_for_nothing() -> None:
    assert prompt_of([request({"prompt": "one", "temperature": 1})]) == prompt_of([request({"prompt": "one"})])
    for broken in (request([]), request({"messages": 1}, method="GET")):
        assert prompt_of([broken]) == ""
    assert prompt_of([dataclasses.replace(request({}), body=b"\xff{")]) == ""


def test_wrong_arguments_of_an_app_are_refused_by_name() -> None:
    for args, named in (({"replicas": "many"}, "replicas"), ({"page": 1}, "page"), ({"port": 80}, "port")):
        with pytest.raises(ValueError, match=named):
            build_app(args)
