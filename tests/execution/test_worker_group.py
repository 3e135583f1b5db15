"""Ranks as processes: whatever happens to one of them ends all, soon, with an error that names it. Nothing stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mini_sglang
from mini_sglang.config import EngineConfig
from mini_sglang.execution import node
from mini_sglang.parallel.tensor_parallel import RankError
from mini_sglang.sampling_params import SamplingParams
from tests.tiny import Checkpoints, TinyCheckpoint, generate_ids, greedy_ids, make_ragged_prompts, until

LIMIT_S = 15.0
OUT_OF_MEMORY = """
import sys
if "mini_sglang.execution.worker_main" in sys.orig_argv:
    import torch
    from mini_sglang.weights import load
    def fail(*arguments, **settings):
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")
    load.fill_slots = fail
"""
SCRIPT = """
import sys, mini_sglang
def main():
    engine = mini_sglang.Engine(mini_sglang.EngineConfig(model=sys.argv[1], dtype="float32", num_threads=1, tp=2))
    print("ready", flush=True)
    sys.stdin.read()
main()
"""
SLOW = """
import sys, time, mini_sglang
from mini_sglang.execution import worker_group
from mini_sglang.parallel.tensor_parallel import RankError
engine = mini_sglang.Engine(mini_sglang.EngineConfig(model=sys.argv[1], dtype="float32", num_threads=1, tp=2))
worker_group._GRACE_S = 0.5
compute = engine.executor._runner.run
def slowly(batch):
    time.sleep(2)
    return compute(batch)
engine.executor._runner.run = slowly
engine.add_request("a", [5, 6], mini_sglang.SamplingParams(max_tokens=2, ignore_eos=True))
print("ready", flush=True)
try:
    while engine.has_work:
        engine.step()
except RankError as error:
    print(error)
"""
Start = Callable[..., mini_sglang.Engine]


def children(pid: int) -> list[int]:
    """Of a process, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append((int(fields[19]), int(stat.parent.name)))
    return [child for _, child in sorted(found)]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(checkpoint, tp=2, …)` → an engine; afterwards no child process may be left."""
    before = children(os.getpid())
    engines: list[mini_sglang.Engine] = []

    def start(checkpoint: TinyCheckpoint, **settings: Any) -> mini_sglang.Engine:
        config = EngineConfig(model=str(checkpoint.path), dtype="float32", num_threads=1, **settings)
        engines.append(mini_sglang.Engine(config))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
    assert children(os.getpid()) == before


def run_until_it_fails(engine: mini_sglang.Engine) -> tuple[str, float]:
    """The error of an engine that is kept busy, and the seconds until it came."""
    begin = time.monotonic()
    for index in range(1000):
        engine.add_request(str(index), [5, 6, 7], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        while engine.has_work:
            try:
                engine.step()
            except RankError as error:
                return str(error), time.monotonic() - begin
    raise AssertionError("it did not fail")


def test_two_ranks_answer_like_transformers_until_one_is_killed(checkpoints: Checkpoints, start: Start) -> None:
    checkpoint = checkpoints.write("llama")
    prompts = make_ragged_prompts(8, 320)
    engine = start(checkpoint, tp=2)
    assert generate_ids(engine, prompts, arrivals=2) == [greedy_ids(checkpoint.model, prompt) for prompt in prompts]
    os.kill(children(os.getpid())[-1], signal.SIGKILL)
    error, seconds = run_until_it_fails(engine)
    assert error == "rank 1 was killed by SIGKILL"
    assert seconds < LIMIT_S


def test_a_stopped_rank_ends_three(checkpoints: Checkpoints, start: Start) -> None:
    engine = start(checkpoints.write("llama"), tp=3)
    os.kill(children(os.getpid())[-1], signal.SIGSTOP)
    error, seconds = run_until_it_fails(engine)
    assert error.startswith("rank 2 has been silent for 8 s")
    assert seconds < LIMIT_S


def test_an_error_of_rank_0_in_a_step_ends_all(
    checkpoints: Checkpoints, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(checkpoints.write("llama"), tp=2)

    def fail(batch: object) -> None:
        raise ZeroDivisionError("for once")

    monkeypatch.setattr(engine.executor._runner, "run", fail)
    assert run_until_it_fails(engine)[0] == "rank 0 failed: ZeroDivisionError: for once"
    with pytest.raises(RankError, match="rank 0 failed"):
        engine.check_workers()


def test_a_rank_without_memory_for_its_weights(
    checkpoints: Checkpoints, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(RankError, match=r"rank 1 failed: out of GPU memory: .*tried to allocate 80 GiB"):
        start(checkpoints.write("llama"), tp=2)


def test_weights_that_do_not_fit_are_said_as_with_one_rank(checkpoints: Checkpoints, start: Start) -> None:
    checkpoint = checkpoints.write("llama")
    (checkpoint.path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file, or its header is damaged"):
        start(checkpoint, tp=2)


def test_a_killed_parent_leaves_nothing(checkpoints: Checkpoints) -> None:
    command = [sys.executable, "-c", SCRIPT, str(checkpoints.write("llama").path)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    [worker] = children(parent.pid)
    os.kill(worker, signal.SIGSTOP)  # even one that cannot notice
    parent.kill()
    parent.communicate()
    until(
        lambda: not Path(f"/proc/{worker}").exists() or "\nState:\tZ" in Path(f"/proc/{worker}/status").read_text(),
        LIMIT_S,
    )


def test_what_nobody_closes_ends_in_order(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("t")  # the path of a socket in it may have 107 characters
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(checkpoints.write("llama").path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    [worker] = children(process.pid)
    _, log = process.communicate(timeout=LIMIT_S)  # closes its standard input, which the script waits for
    assert process.returncode == 0, log.decode()
    assert not Path(f"/proc/{worker}").exists()
    assert not list(folder.glob("mini-sglang-*"))


def test_a_rank_lost_in_a_long_step_is_an_error_of_that_step(checkpoints: Checkpoints) -> None:
    """Not the end of the process: on a CPU the step comes to its next sum, and that fails."""
    command = [sys.executable, "-c", SLOW, str(checkpoints.write("llama").path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    [worker] = children(process.pid)
    os.kill(worker, signal.SIGKILL)
    assert process.communicate(timeout=LIMIT_S)[0] == b"rank 1 was killed by SIGKILL\n"
    assert process.returncode == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_two_nodes_until_one_is_lost(checkpoints: Checkpoints, start: Start, host: str) -> None:
    checkpoint = checkpoints.write("qwen2")
    prompts = make_ragged_prompts(4, 320)
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            port = probe.getsockname()[1]
    except OSError as error:
        pytest.skip(f"no {host}: {error}")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    command = [sys.executable, "-m", "mini_sglang", "serve", str(checkpoint.path), "--tp", "2", "--nnodes", "2"]
    command += ["--node-rank", "1", "--dist-init-addr", address]
    node = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    engine = start(checkpoint, tp=2, nnodes=2, dist_init_addr=address)
    assert generate_ids(engine, prompts) == [greedy_ids(checkpoint.model, prompt) for prompt in prompts]
    os.kill(children(node.pid)[0], signal.SIGKILL)
    assert run_until_it_fails(engine)[0] == "rank 1 was killed by SIGKILL"
    assert "rank 1 was killed by SIGKILL" in node.communicate(timeout=LIMIT_S)[1]
    assert node.returncode == 1


def test_an_address_that_is_not_ours(checkpoints: Checkpoints, start: Start) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ValueError, match=r"dist_init_addr 127\.0\.0\.1:"),
    ):
        start(checkpoints.write("llama"), tp=2, nnodes=2, dist_init_addr=f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize(
    ("host", "error"),
    [
        ("127.0.0.1", "no rank 0 was found at dist_init_addr 127.0.0.1:{port}: .* timed out after 500ms"),
        ("nowhere.invalid", "dist_init_addr nowhere.invalid:{port} must be an address of node 0: "),
    ],
)
def test_a_node_that_finds_no_rank_0(host: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "MEETING_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = EngineConfig(tp=2, nnodes=2, node_rank=1, dist_init_addr=f"{host}:{port}")
    with pytest.raises((RankError, ValueError), match=error.format(port=port)):
        node.serve_node(config)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"tp": 0}, "tp must be an integer of at least 1, got 0"),
        ({"tp": 3, "nnodes": 2}, "tp must be a multiple of nnodes, got 3 and 2"),
        ({"tp": 2, "nnodes": 2}, "dist_init_addr must be given with nnodes 2"),
        ({"tp": 2, "dist_init_addr": "host:9000"}, "dist_init_addr needs nnodes of at least 2, got 1 and 'host:9000'"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "host"}, "dist_init_addr must be HOST:PORT, got 'host'"),
        ({"tp": 2, "node_rank": 1}, "node_rank must be between 0 and nnodes - 1, 0, got 1"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        EngineConfig(**settings)
