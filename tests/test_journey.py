"""The files that one warm `/v1/completions` enters on a CPU, in the server's process and in the engine's.

They are what a reader meets who follows a request; their number is bounded, so that the way stays short.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import mini_sglang
from tests.tiny import run_server, until

MOST_FILES = 38
FOLLOW = """
# Notes which files of the package are entered between two signals, in whichever thread.
import os, signal, sys, threading

entered = set()
armed = False
own = os.sep + "mini_sglang" + os.sep

def note(frame, event, argument):
    if armed and event == "call" and own in frame.f_code.co_filename:
        entered.add(frame.f_code.co_filename)

def begin(*_):
    global armed
    armed = True
    sys.setprofile(note)

def end(*_):
    global armed
    armed = False
    sys.setprofile(None)
    path = os.path.join(os.environ["JOURNEY"], str(os.getpid()))
    with open(path + ".part", "w") as file:
        file.write("\\n".join(entered))
    os.rename(path + ".part", path)

threading.setprofile(note)
signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGUSR2, end)
"""


def test_a_warm_completion_enters_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(FOLLOW)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("JOURNEY", str(tmp_path))
    with run_server(tmp_path / "log", "--dtype", "float32", "--kv-cache-bytes", str(1 << 26)) as server:
        pids = [server.process.pid, server.engine_pid]
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        server.post("/v1/completions", **body)
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        assert server.post("/v1/completions", **body).status_code == 200
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
        files = set().union(*(written(tmp_path / str(pid)) for pid in pids))
    package = Path(mini_sglang.__file__).parent
    names = sorted(str(Path(file).relative_to(package)) for file in files)
    for stage in (
        "server/",
        "ipc/async_engine.py",
        "scheduling/scheduler.py",
        "execution/sampler.py",
        "layers/linear.py",
    ):
        assert any(name.startswith(stage) for name in names), f"{stage} is missing: the request was not followed"
    assert len(names) <= MOST_FILES, "\n".join([f"{len(names)} files:", *names])


def written(path: Path) -> set[str]:
    """The files that a process has noted."""
    until(path.exists, limit_s=60)
    return set(path.read_text().splitlines())
