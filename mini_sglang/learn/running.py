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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from mini_sglang.learn.lesson import PACKAGE, Lesson, module_path
from mini_sglang.learn.results import EVENTS, CheckResult, Report, Started

LIMIT_S = 60.0
CHECK = "check.py"
_CONFIG = "[pytest]\naddopts = -q -p no:cacheprovider --noconftest --import-mode=importlib\n"


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


def run_checks(
    lesson: Lesson,
    sources: Mapping[str, str],
    *,
    contract: bool = True,
    stop_at_first: bool = False,
    limit_s: float = LIMIT_S,
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
        command = [sys.executable, "-m", "pytest", "-c", folder / "pytest.ini", "--rootdir", folder, *options]
        command += ["-p", f"{PACKAGE.name}.learn.recorder", "--lesson-events", events, *files]
        cut_short, output = _run([str(word) for word in command], folder, limit_s)
        names = {str(folder / PACKAGE.name / module_path(name)): module_path(name).as_posix() for name in sources}
        names[str(lesson.folder / "check.py")] = CHECK
        lines = events.read_bytes().splitlines() if events.exists() else []
        results, unfinished = [], ""
        for event in map(EVENTS.decode, lines):
            if isinstance(event, CheckResult):
                results.append(_with_frames_of(event, names))
            unfinished = event.name if isinstance(event, Started) else ""
    if not results and not cut_short:
        cut_short = f"no check was run:\n{output}"
    return Report(results, unfinished if cut_short else "", cut_short, time.monotonic() - began)


def _run(command: list[str], folder: Path, limit_s: float) -> tuple[str, str]:
    """Run to the end or the limit; returns why the run was cut short ("" if it was not) and the end of its output."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        slow = "a loop in your code that never ends, or a machine that is busy with other things"
        return f"the checks were not done after {limit_s:.0f} s, and were stopped ({slow})", ""
    finally:
        with contextlib.suppress(ProcessLookupError):  # ends what the engine may have started too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode < 0:
        return f"the checks' process died of signal {-process.returncode}", output[-2000:]
    return "", output[-2000:]


def _with_frames_of(result: CheckResult, names: Mapping[str, str]) -> CheckResult:
    """`result` with only those frames that are in one of `names`, under their new names."""
    if result.failure is None:
        return result
    frames = [replace(frame, path=names[frame.path]) for frame in result.failure.frames if frame.path in names]
    return replace(result, failure=replace(result.failure, frames=frames))
