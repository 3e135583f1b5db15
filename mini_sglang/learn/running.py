"""Runs a lesson's checks on the engine, with other sources in place of some of its modules.

The whole package is copied to a temporary folder, where the given sources replace ours. pytest runs there in a process
of its own that finds the copy first, and so do all processes that the engine starts. Nothing is patched in memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from mini_sglang.learn.lesson import PACKAGE, Lesson, module_path
from mini_sglang.learn.results import EVENTS, CheckResult, Report, Started

LIMIT_S = 60.0
CHECK = "check.py"
_CONFIG = "[pytest]\naddopts = -q -p no:cacheprovider --noconftest --import-mode=importlib\n"


# Runs `python -m` with some words, in a folder, with environment variables, for at most this many seconds. Returns its
# exit status, negative for a signal and None if it did not end in time, and what it printed.
RunPython = Callable[[Sequence[str], Path, Mapping[str, str], float], tuple[int | None, str]]


@contextmanager
def overlay(sources: Mapping[str, str]) -> Iterator[Path]:
    """Make a folder with a copy of the package in which `sources` (by module) replace ours."""
    with tempfile.TemporaryDirectory(prefix="mini-sglang-lesson-") as name:
        folder = Path(name).resolve()
        # The copies keep the times of the files, so everything compiled for them stays valid.
        shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("course"))
        for module, source in sources.items():
            (folder / PACKAGE.name / module_path(module)).write_text(source, encoding="utf-8")
        yield folder


def run_python(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float
) -> tuple[int | None, str]:
    """A RunPython; what the process has started and left behind is killed with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, output


def run_checks(
    lesson: Lesson,
    sources: Mapping[str, str],
    *,
    contract: bool = True,
    stop_at_first: bool = False,
    limit_s: float = LIMIT_S,
    python: RunPython = run_python,
) -> Report:
    """Run the lesson's check.py and, after it, the contract, with `sources` in place.

    Frames of failures in `sources` get the module's path below the package, frames in check.py are called check.py, and
    other frames are left out.
    """
    with overlay(sources) as folder:
        events, began = folder / "events.jsonl", time.monotonic()
        (folder / "pytest.ini").write_text(_CONFIG)
        files = [lesson.folder / "check.py", *([folder / PACKAGE.name / "learn" / "contract.py"] if contract else [])]
        options = ["-x"] if stop_at_first else []
        command = ["pytest", "-c", folder / "pytest.ini", "--rootdir", folder, *options]
        command += ["-p", f"{PACKAGE.name}.learn.recorder", "--lesson-events", events, *files]
        status, output = python([str(word) for word in command], folder, _environment(folder), limit_s)
        names = {str(folder / PACKAGE.name / module_path(name)): module_path(name).as_posix() for name in sources}
        names[str(lesson.folder / "check.py")] = CHECK
        lines = events.read_bytes().splitlines() if events.exists() else []
        results, unfinished = [], ""
        for event in map(EVENTS.decode, lines):
            if isinstance(event, CheckResult):
                results.append(_with_frames_of(event, names))
            unfinished = event.name if isinstance(event, Started) else ""
    cut_short = _why_cut_short(status, limit_s)
    if not results and not cut_short:
        cut_short = f"no check was run:\n{output[-2000:]}"
    return Report(results, unfinished if cut_short else "", cut_short, time.monotonic() - began)


def _environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _why_cut_short(status: int | None, limit_s: float) -> str:
    if status is None:
        slow = "a loop in your code that never ends, or a machine that is busy with other things"
        return f"the checks were not done after {limit_s:.0f} s, and were stopped ({slow})"
    return f"the checks' process died of signal {-status}" if status < 0 else ""


def _with_frames_of(result: CheckResult, names: Mapping[str, str]) -> CheckResult:
    """`result` with only those frames that are in one of `names`, under their new names."""
    if result.failure is None:
        return result
    frames = [replace(frame, path=names[frame.path]) for frame in result.failure.frames if frame.path in names]
    return replace(result, failure=replace(result.failure, frames=frames))
