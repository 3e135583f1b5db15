"""The pytest plugin of a lesson's run: it writes what each check found to a file of JSON lines.

It runs in the checks' process (`-p mini_sglang.learn.recorder --lesson-events FILE`). The contract comes last and is
skipped when a check has failed, since its own failure would be harder to read.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from mini_sglang.learn.checking import LessonError
from mini_sglang.learn.results import CheckResult, Event, Failure, Frame, Started


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lesson-events", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--lesson-events")
    if path is not None:
        config.pluginmanager.register(Recorder(path))


class Recorder:
    """Appends one line per event, at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._failed and item.path.name == "contract.py":
            pytest.skip("a check has failed")
        self._write(Started(sentence(item.name)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed or (report.passed and call.when == "call"):
            failure = None
            if call.excinfo is not None:
                self._failed = True
                failure = describe(call.excinfo, report.capstdout)
            marks = getattr(getattr(item, "function", None), "guards", ())
            self._write(CheckResult(sentence(item.name), list(marks), failure))
        return report

    def pytest_exception_interact(
        self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[object], report: pytest.CollectReport
    ) -> None:
        if isinstance(node, pytest.Collector) and call.excinfo is not None and not self._failed:  # an import raised
            self._failed = True
            self._write(CheckResult("the lesson's checks can be loaded", [], describe(call.excinfo, "")))

    def _write(self, event: Event) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")


def sentence(test_name: str) -> str:
    """A test's name as a sentence."""
    return test_name.removeprefix("test_").replace("_", " ")


def describe(excinfo: pytest.ExceptionInfo[BaseException], output: str) -> Failure:
    """The exception as a `Failure`, with what the check printed."""
    error = excinfo.value
    if isinstance(error, pytest.Collector.CollectError) and error.__cause__ is not None:
        error = error.__cause__
    entries = pytest.ExceptionInfo.from_exception(error).traceback if error.__traceback__ else excinfo.traceback
    frames = [Frame(os.path.abspath(entry.path), entry.lineno + 1, entry.name) for entry in entries]
    told = ("got", "expected", "what", "invariant", "read") if isinstance(error, LessonError) else ()
    expectation = {name: getattr(error, name) for name in told}
    return Failure(type(error).__name__, str(error), frames, **expectation, output=output)
