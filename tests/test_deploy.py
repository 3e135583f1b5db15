"""What `deploy` is asked for, before Ray is: settings, and arguments as Ray's own commands give them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from mini_sglang.cli import _build_parser, main
from mini_sglang.deploy import DeployConfig, _as_words, _served_models


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"replicas": 0}, "replicas"),
        ({"min_replicas": 2}, "max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas"),
        ({"max_replicas": 2, "target_requests": 0}, "target_requests"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s"),
        ({"upscale_delay_s": float("inf")}, "upscale_delay_s"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DeployConfig(**fields)


def test_arguments_may_be_strings_or_have_types() -> None:
    typed = {"model": "m", "replicas": 2, "access_log": False, "deterministic": True, "served_model_name": ["a", "b"]}
    words = ["--model=m", "--replicas=2", "--no-access-log", "--deterministic"]
    assert _as_words(typed) == [*words, "--served-model-name=a", "--served-model-name=b"]
    strings = {"model": "m", "replicas": "2", "access_log": "false", "deterministic": "true"}
    assert _as_words(strings) == words


def served(*words: str) -> list[tuple[str, tuple[str, ...], int]]:
    models = _served_models(_build_parser().parse_args(["deploy", *words]))
    return [(model.engine.model, model.server.served_model_name, model.config.replicas) for model in models]


def test_several_models_share_the_options_and_get_a_name_each() -> None:
    assert served() == [("smollm2-135m", (), 1)]
    assert served("a", "--served-model-name", "b", "--served-model-name", "c") == [("a", ("b", "c"), 1)]
    assert served("a", "b", "--replicas", "2") == [("a", (), 2), ("b", (), 2)]
    named = ("--served-model-name", "one", "--served-model-name", "two")
    assert served("--model", "a", "--model", "a", *named) == [("a", ("one",), 1), ("a", ("two",), 1)]
    with pytest.raises(ValueError, match="served_model_name must be given once for each of 2 models, got 1"):
        served("a", "b", "--served-model-name", "one")


def test_without_ray_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert main(["deploy", "--replicas", "2"]) == 2
    assert "mini-sglang[ray]" in capsys.readouterr().err
