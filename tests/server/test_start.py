"""How `serve` starts: both processes import at once and no more than they need, and it says once what was chosen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.tiny import Checkpoints, until

# In every process of a server: what is about to be imported can complain, send a signal, or say what runs by then.
WATCH = """
import json, logging, os, signal, sys, warnings
from pathlib import Path

FOLDER = Path(os.environ["WATCHED"])
ORDERS = json.loads(os.environ["ORDERS"])  # module -> what happens before it is imported

def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

class Watch:
    def find_spec(self, name, path=None, target=None):
        order = ORDERS.get(name)
        if order == "complain":
            warnings.warn(f"{name} complains")
            if name.startswith("transformers."):
                logging.getLogger(name).warning("\\n%s complains", name)
        elif order == "children":
            (FOLDER / name).write_text(" ".join(children()))
        elif order == "interrupt":
            os.killpg(0, signal.SIGINT)
        elif order == "die":
            os.kill(os.getpid(), signal.SIGKILL)

def dump(*_):
    part = FOLDER / f"{os.getpid()}.part"
    part.write_text("\\n".join(sys.modules))
    part.rename(FOLDER / str(os.getpid()))

sys.meta_path.insert(0, Watch())
signal.signal(signal.SIGUSR1, dump)
"""
NOISY = dict.fromkeys(["torch.nn", "transformers.tokenization_utils_base", "fastapi.routing"], "complain")
OPTIONS = ("--dtype", "float32", "--num-pages", "64", "--context-length", "256", "--num-threads", "1", "--port", "0")
WEB = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "anyio"}
TEXT = {"transformers", "tokenizers", "huggingface_hub", "jinja2"}
TENSORS = {"torch", "triton", "numba"}


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> str:
    return str(checkpoints.write("qwen3").path)


def start(folder: Path, model: str, orders: dict[str, str]) -> subprocess.Popen[str]:
    """A server in a process group of its own, whose imports are watched."""
    (folder / "sitecustomize.py").write_text(WATCH)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "WATCHED": str(folder), "ORDERS": json.dumps(orders)}
    return subprocess.Popen(
        (sys.executable, "-m", "mini_sglang.server", model, *OPTIONS),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


@dataclass(frozen=True)
class Started:
    """A server that has answered a request, and has ended since."""

    out: str
    err: str
    modules: dict[str, set[str]]  # of the server's process and of the engine's: top-level packages
    children: dict[str, str]  # module -> processes that the server had when it imported it


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, model: str) -> Started:
    folder = tmp_path_factory.mktemp("watched")
    watched = ("fastapi", "uvicorn", "transformers")
    process = start(folder, model, {**NOISY, **dict.fromkeys(watched, "children")})
    try:
        assert process.stdout is not None
        greeting = process.stdout.readline()
        url = greeting.rpartition(" ")[2].strip()
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "The", "max_tokens": 2}, timeout=60)
        assert answer.status_code == 200, answer.text
        pids = {"api": process.pid, "engine": httpx.get(f"{url}/server_info").json()["engine"]["pid"]}
        for pid in pids.values():
            os.kill(pid, signal.SIGUSR1)
            until((folder / str(pid)).exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
    modules = {
        name: {module.partition(".")[0] for module in (folder / str(pid)).read_text().split()}
        for name, pid in pids.items()
    }
    return Started(greeting + out, err, modules, {name: (folder / name).read_text() for name in watched})


def test_it_says_once_what_was_chosen_and_nothing_else(started: Started, model: str) -> None:
    assert re.fullmatch(rf"Serving {model} at http://127\.0\.0\.1:\d+\n", started.out)
    stamp = re.compile(r"[\d-]{10} [\d:,]{12} ")
    lines = started.err.split("\n")
    assert [stamp.sub("", line) for line in lines[:3]] == [
        "INFO engine: device cpu, 1 thread; dtype float32; attention backend cpu; no CUDA graphs",
        "INFO engine: KV cache of 64 pages, 1,024 tokens; context length 256 tokens",
        "INFO engine: most running requests 64; budget of a step 512 tokens, and 200 ms beside decodes",
    ]
    requests = [line for line in lines if "server.request_log" in line]
    assert lines[3:] == [*requests, lines[-2], ""]
    assert stamp.sub("", lines[-2]) == "INFO mini_sglang.server.run: stopping; once more to stop at once"


def test_the_engine_starts_before_the_server_imports_what_takes_long(started: Started) -> None:
    assert all(len(children.split()) == 1 for children in started.children.values()), started.children


def test_neither_process_imports_what_only_the_other_one_needs(started: Started) -> None:
    assert not started.modules["engine"] & {*WEB, *TEXT, "uvloop", "rich"}
    assert not started.modules["api"] & {*TENSORS, "rich"}
    assert started.modules["api"] >= WEB | TEXT  # these names are those of modules
    assert {"torch", "numba"} <= started.modules["engine"]


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("mini_sglang.server.run", {*WEB, *TEXT, *TENSORS, "numpy", "llguidance", "rich"}),
        ("mini_sglang.ipc.engine_process", {*WEB, *TEXT, *TENSORS, "numpy", "llguidance", "rich", "asyncio"}),
    ],
)
def test_what_runs_first_in_a_process_imports_little(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    found = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=60, check=True)
    assert not unwanted & set(found.stdout.split())


@pytest.mark.parametrize("module", ["fastapi", "torch.nn", "mini_sglang.execution.worker"])
def test_ctrl_c_at_any_time_of_the_start_ends_both_processes(tmp_path: Path, model: str, module: str) -> None:
    process = start(tmp_path, model, {module: "interrupt"})  # as a terminal does: to both
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.count("\n") == 1
    assert "stopping" in err
    assert_group_is_gone(process)


def test_an_engine_that_dies_while_it_starts_ends_the_server(tmp_path: Path, model: str) -> None:
    process = start(tmp_path, model, {"torch.nn": "die"})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert err.count("\n") == 1
    assert "the engine process ended with status -9 while starting" in err
    assert_group_is_gone(process)


def test_a_broken_tokenizer_is_one_line_and_ends_the_engine(tmp_path: Path, checkpoints: Checkpoints) -> None:
    folder = checkpoints.write("qwen3").path
    (folder / "tokenizer.json").write_text("{")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"")  # of two errors it is this process's that is told
    process = start(tmp_path, str(folder), {})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"mini-sglang: error: model {str(folder)!r}: {folder}/tokenizer.json is not valid JSON")
    assert_group_is_gone(process)


def assert_group_is_gone(leader: subprocess.Popen[str]) -> None:
    with pytest.raises(ProcessLookupError):
        os.killpg(leader.pid, 0)
