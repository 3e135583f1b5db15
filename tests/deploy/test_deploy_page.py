"""docs/deploy.md: its commands are understood, its app is one, and the commands that size a fleet are run."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mini_sglang.cli import _build_parser
from tests.fleet.page import PAGE, blocks, commands, section
from tests.tiny import Checkpoints, until


def test_every_command_of_the_package_is_understood() -> None:
    found = [shlex.split(command.rstrip(" &"))[1:] for command in commands(PAGE) if command.startswith("mini-sglang ")]
    assert {words[0] for words in found} == {"serve", "deploy", "simulate", "bench"}
    for words in found:
        _build_parser().parse_args(words)


def test_the_file_of_rays_makes_an_app() -> None:
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed")
    from mini_sglang.deploy import build_app

    [text] = blocks(PAGE, "yaml")
    [application] = yaml.safe_load(text)["applications"]
    arguments = application["args"]
    assert arguments.pop("api_key_file")  # which is not there
    models, _ = build_app(arguments)._bound_deployment.init_args
    assert [names for names, _ in models] == [("MODEL",), ("small", "other")]


def test_the_commands_that_size_a_fleet_find_how_many_replicas(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """As they stand, with a tiny model and its vocabulary, and a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    folder = checkpoints.write("llama", max_position_embeddings=4096).path
    words = {
        "MODEL": f"{folder} --device cpu --num-threads 1",
        "8001": port,
        "--input-length": "--vocab 100:300 --input-length",
        "mini-sglang": f"{sys.executable} -m mini_sglang",
    }
    lines = commands(section("How many replicas"))
    for name, value in words.items():
        lines = [line.replace(name, value) for line in lines]
    serve, *others = lines
    log = tmp_path / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(shlex.split(serve.rstrip(" &")), cwd=tmp_path, stdout=file, stderr=file)
    try:
        until(lambda: "Serving " in log.read_text(), limit_s=60)
        for line in others:
            done = subprocess.run(shlex.split(line), cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    fleet = json.loads((tmp_path / "fleet.json").read_text())
    assert f"{fleet['enough']} replicas are enough" in done.stdout
    met = {tried["fleet"]["replicas"]: tried["result"]["ttft_ms"]["p99"] < 500 for tried in fleet["tried"]}
    assert met[fleet["enough"]]
    assert not met.get(fleet["enough"] - 1, False)
