"""Python processes that begin with the slow imports done: each is forked from one that has done them, and nothing else.

The engine is not among those imports: every process finds its own copy of it, as a fresh `python -m` does. Hence
nothing here may import it when it is imported itself.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGE = "mini_sglang"
SLOW_IMPORTS = [
    *("_pytest.config", "torch", "torch.distributed", "numpy", "transformers", "transformers.tokenization_utils_fast"),
    *(
        "tokenizers",
        "safetensors.torch",
        "gguf",
        "numba",
        "triton.language",
        "triton.runtime.interpreter",
        "llguidance",
    ),
    *("fastapi", "uvicorn", "httpx", "pydantic", "msgspec", "zmq.asyncio", "prometheus_client", "rich.console"),
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(SLOW_IMPORTS)


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float) -> tuple[int | None, str]:
    """What `run_python` of the learn package does, which says what the parameters are."""
    status, output, errors = run_apart(command, folder, environment, limit_s)
    return status, output + errors


def run_apart(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float
) -> tuple[int | None, str, str]:
    """`python -m *command` in `folder`, where it also looks for modules first: exit status, output and errors."""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, "output"), Path(name, "errors")]
        process = _context.Process(target=_run, args=(command, folder, dict(environment), files))
        process.start()
        process.join(limit_s)
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.exitcode
        process.join()
        output, errors = (file.read_text(errors="replace") for file in files)
    return status, output, errors


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str], files: Sequence[Path]) -> None:
    gc.freeze()  # pytest collects garbage, and would look for some in all that was imported
    os.setsid()
    for standard, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), standard)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    early = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    assert not early, f"not the copy in {folder}, but what was there before: {early}"
    sys.path.insert(0, str(folder))
    sys.argv[:] = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
