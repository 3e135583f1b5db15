"""What a prompt is, for the router, and Ray's app made from arguments. Needs Ray, but starts none."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

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
    for body in (b"\xff{", b'{"prompt":' + b"[" * 100_000):
        assert prompt_of([dataclasses.replace(request({}), body=body)]) == ""


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"replicas": "many"}, "replicas"),
        ({"page": 1}, "page"),
        ({"port": 80}, "port"),
        ({"models": "a"}, "models"),
        ({"models": []}, "models"),
        ({"models": [{"model": "a", "replicas": 0}]}, "replicas"),
        ({"models": [{"model": "a"}, {"model": "b", "served_model_name": "a"}]}, "served_model_name"),
        ({"model": ["a", "b"], "served_model_name": "a"}, "served_model_name"),
    ],
)
def test_wrong_arguments_of_an_app_are_refused_by_name(args: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build_app(args)


def test_models_have_options_of_their_own_besides_the_common_ones() -> None:
    entries = [{"model": "a", "replicas": 2}, {"model": "org/b", "served_model_name": ["c", "d"]}]
    args = build_app({"models": entries, "num_threads": 1})._bound_deployment.init_args
    [(first, of_first), (second, of_second)] = args[0]
    assert (first, second) == (("a",), ("c", "d"))
    deployments = [app._bound_deployment for app in (of_first, of_second)]
    assert [(deployment.name, deployment.num_replicas) for deployment in deployments] == [
        ("replicas", 2),
        ("replicas-c", 1),
    ]
    engines = [deployment.init_args[0] for deployment in deployments]
    assert [(engine.model, engine.num_threads) for engine in engines] == [("a", 1), ("org/b", 1)]
