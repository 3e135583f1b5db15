"""What the machine does to a server: signals, full disks, no descriptors, no memory, clocks that jump.

It answers again when the fault is over, or ends with one line that says what to change. (Deaths of processes are in
test_processes.py.)
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import mini_sglang
from tests.server.conftest import StartServer
from tests.tiny import Checkpoints, RunningServer, run_server, until

PROMPT = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def tiny_model(checkpoints: Checkpoints) -> str:
    return str(checkpoints.write("qwen3").path)


def canary(server: RunningServer) -> str:
    answer = server.post("/generate", **PROMPT)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


def at_rest(server: RunningServer) -> bool:
    stats = server.get("/server_info").json()["stats"]
    return (stats["num_running"], stats["num_waiting"], stats["num_used_pages"]) == (0, 0, 0)


# -- stop and continue -------------------------------------------------------------------------------------------------


def test_a_stopped_engine_goes_on_where_it_was(start_server: StartServer, tiny_model: str) -> None:
    server = start_server("--model", tiny_model, "--dtype", "float32", "--num-pages", "64")
    fresh = canary(server)
    body = {**PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        os.kill(server.engine_pid, signal.SIGSTOP)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/generate", json=PROMPT, timeout=0.5)  # a client that gives up meanwhile
        os.kill(_engine_of(server), signal.SIGCONT)
        *_, last, done = [line for line in lines if line.startswith("data: ")]
    assert done == "data: [DONE]"
    assert json.loads(last[6:])["usage"]["completion_tokens"] == 40
    assert canary(server) == fresh
    until(lambda: at_rest(server))


def test_a_stopped_server_goes_on_where_it_was(start_server: StartServer, tiny_model: str) -> None:
    server = start_server("--model", tiny_model, "--dtype", "float32", "--num-pages", "64")
    fresh = canary(server)
    engine_pid = server.engine_pid
    server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/generate", json=PROMPT, timeout=1.5)
    assert Path(f"/proc/{engine_pid}").exists(), "the engine took a server that was stopped for a dead one"
    server.process.send_signal(signal.SIGCONT)
    assert canary(server) == fresh
    until(lambda: at_rest(server))


def test_a_stopped_rank_goes_on_where_it_was(start_server: StartServer, tiny_model: str) -> None:
    server = start_server("--model", tiny_model, "--dtype", "float32", "--num-pages", "64", "--tp", "2")
    fresh = canary(server)
    engine_pid = server.engine_pid
    [worker] = map(int, Path(f"/proc/{engine_pid}/task/{engine_pid}/children").read_text().split())
    os.kill(worker, signal.SIGSTOP)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/generate", json=PROMPT, timeout=1)
    os.kill(worker, signal.SIGCONT)
    assert canary(server) == fresh
    until(lambda: at_rest(server))


def _engine_of(server: RunningServer) -> int:
    """The engine's process, without asking the engine."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if "engine_process" in Path(f"/proc/{pid}/cmdline").read_text())


# -- files: a disk that is full, weights that are damaged --------------------------------------------------------------


@contextlib.contextmanager
def limited_server(log: Path, limits: str, *options: str) -> Iterator[RunningServer]:
    """A server whose processes have these limits, as prlimit takes them."""
    with run_server(log, *options) as server:
        for pid in (server.process.pid, server.engine_pid):
            subprocess.run(["prlimit", f"--pid={pid}", limits], check=True)
        yield server


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="sets limits with prlimit")
def test_a_disk_that_fills_up_ends_the_step_log_alone(tiny_model: str, tmp_path: Path) -> None:
    steps, log = tmp_path / "steps.jsonl", tmp_path / "log"
    options = ("--model", tiny_model, "--dtype", "float32", "--num-pages", "64", "--step-log", str(steps))
    with run_server(log, *options) as server:
        fresh = canary(server)
        until(lambda: steps.stat().st_size > 0)
        limit = f"--fsize={steps.stat().st_size + 100}"
        subprocess.run(["prlimit", f"--pid={server.engine_pid}", limit], check=True)
        until(lambda: canary(server) == fresh and f"the step log {steps} ends here" in log.read_text(), 30)
        assert canary(server) == fresh
        assert server.get("/health").status_code == 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")
def test_a_full_disk_under_the_servers_own_log_stops_no_answer(tiny_model: str, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "mini_sglang.server", "--num-threads", "1", "--dtype", "float32")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--model", tiny_model, "--num-pages", "64", "--port", str(port), "--log-contents")
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen((*command, *options), stdout=full, stderr=full)
    server = RunningServer(process, f"http://127.0.0.1:{port}", tmp_path / "log")
    try:
        until(lambda: _is_up(server), 60)
        assert canary(server) == canary(server)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) in (0, 120)  # 120: Python could not flush stdout at the end
    finally:
        process.kill()
        process.wait()


def _is_up(server: RunningServer) -> bool:
    assert server.process.poll() is None
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def start_and_fail(*options: str, **environment: str) -> str:
    """The one line that a server ends with which cannot start."""
    command = (sys.executable, "-m", "mini_sglang.server", "--port", "0", "--num-threads", "1", *options)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}
    )
    assert done.returncode not in (0, None)
    assert done.returncode > 0, f"killed by signal {-done.returncode}"
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


def test_damaged_weights_are_one_line_that_names_the_file(checkpoints: Checkpoints) -> None:
    folder, packed = checkpoints.write("llama").path, checkpoints.write_gguf("llama").path
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content, problem in (
        (whole[:-100], "is cut short"),
        (whole[:100], "is cut short: its header ends at byte"),
        (b"", "is no safetensors file, or cut short: it holds 0 bytes"),
        (whole[:8] + b"X" + whole[9:], "is no safetensors file, or its header is damaged"),
        (whole[:40] + b"\x00" + whole[41:], "is cut short or its header is damaged"),
    ):
        weights.write_bytes(content)
        line = start_and_fail("--model", str(folder))
        assert f"{weights} {problem}" in line
        assert "tokenizer" not in line
    whole = packed.read_bytes()
    for content, problem in (
        (whole[:-100], "is cut short: "),
        (whole[:500], "is cut short: its header goes beyond byte 500"),
        (b"XXXX" + whole[4:], "is not a GGUF file"),
    ):
        packed.write_bytes(content)
        line = start_and_fail("--model", str(packed))
        assert f"{packed} {problem}" in line
        assert "tokenizer" not in line


def test_shards_of_two_models_are_told_apart(checkpoints: Checkpoints) -> None:
    ours, other = (checkpoints.write("llama", sharded=True).path for _ in range(2))
    first, second, *_ = sorted(ours.glob("model-*.safetensors"))
    content = second.read_bytes()
    shutil.copy(first, second)  # one of them twice
    line = start_and_fail("--model", str(ours))
    assert f"{second} lacks" in line
    assert "tokenizer" not in line
    second.write_bytes(first.read_bytes())
    first.write_bytes(content)  # under each other's names: nothing is lost, since tensors have names
    with contextlib.ExitStack() as servers:
        texts = []
        for folder in (ours, other):
            log = folder / "log"
            texts.append(canary(servers.enter_context(run_server(log, "--model", str(folder), "--num-pages", "64"))))
    assert texts[0] == texts[1]


def test_a_damaged_config_is_not_the_tokenizers_fault(checkpoints: Checkpoints) -> None:
    folder = checkpoints.write("llama").path
    (folder / "config.json").write_text('{"model_type": ')
    line = start_and_fail("--model", str(folder))
    assert f"{folder / 'config.json'} is not valid JSON" in line
    assert "tokenizer" not in line


# -- descriptors and memory --------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="sets limits with prlimit")
def test_a_server_without_descriptors_recovers(tiny_model: str, tmp_path: Path) -> None:
    with run_server(tmp_path / "log", "--model", tiny_model, "--dtype", "float32", "--num-pages", "64") as server:
        fresh = canary(server)
        engine_pid, pid = server.engine_pid, server.process.pid
        used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        subprocess.run(["prlimit", f"--pid={pid}", f"--nofile={used + 8}"], check=True)
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        held = [socket.create_connection(address) for _ in range(30)]
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{server.url}/health", timeout=1)
        assert server.process.poll() is None
        for connection in held:
            connection.close()
        until(lambda: _is_up(server), 20)
        assert canary(server) == fresh
        assert server.engine_pid == engine_pid
        until(lambda: at_rest(server))


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (("--num-pages", "1000000000"), "num_pages must be at most"),
        (("--kv-cache-bytes", str(1 << 50)), "kv_cache_bytes must be at most this machine's memory"),
        (("--max-running-requests", "2000000000"), "max_running_requests must be at most"),
    ],
)
def test_memory_that_the_machine_does_not_have_is_one_line(tiny_model: str, options: tuple[str], advice: str) -> None:
    line = start_and_fail("--model", tiny_model, *options)
    assert advice in line
    assert line.count("\n") == 0


def test_memory_that_the_system_refuses_names_the_settings(tiny_model: str) -> None:
    """As under `ulimit -v`, or in a container: the machine has it, this process does not get it."""
    limit = 24 << 30
    program = (
        "import resource, sys; from mini_sglang import LLM; from pathlib import Path\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        "limit = pages * resource.getpagesize() + (1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        f"LLM({tiny_model!r}, num_threads=1, kv_cache_bytes={limit}, max_running_requests=64, num_pages=1000000)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: out of memory: the KV cache, the tables or a step do not fit: lower")
    assert "num_pages" in last


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_no_duration_is_measured_on_a_clock_that_jumps() -> None:
    """`time.time` and `datetime.now` say when something was, for people to read; they are in no difference."""
    package = Path(mini_sglang.__file__).parent
    wrong = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.BinOp | ast.Compare | ast.AugAssign):
                calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
                names = {ast.unparse(call.func) for call in calls}
                if names & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}:
                    wrong.append(f"{path.relative_to(package)}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def test_answers_and_metrics_survive_a_clock_that_jumps(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look at the wall clock gives another year, in both processes."""
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, time\n"
        "real, years = time.time, itertools.cycle((0, 40, -40))\n"
        "time.time = lambda: real() + next(years) * 3.2e7\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with run_server(tmp_path / "log", "--model", tiny_model, "--dtype", "float32", "--num-pages", "64") as server:
        start = time.monotonic()
        assert len({canary(server) for _ in range(4)}) == 1
        info = server.get("/server_info").json()
        assert 0 <= info["uptime_s"] < 600
        until(lambda: at_rest(server))
        seconds = time.monotonic() - start
        for line in server.get("/metrics").text.splitlines():
            if "_seconds_sum" in line and not line.startswith("#"):
                assert 0 <= float(line.rpartition(" ")[2]) < 20 * (seconds + 1), line
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
