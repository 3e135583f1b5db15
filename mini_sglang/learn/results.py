"""What a run of checks has found, as values: the recorder writes them in the checks' process, the command reads them.

They are plain data and go through a file of JSON lines, so that what was found survives a check that hangs or crashes.
"""

from __future__ import annotations

import msgspec


class Frame(msgspec.Struct, frozen=True):
    """A line of a traceback."""

    path: str
    line: int
    function: str


class Failure(msgspec.Struct, frozen=True):
    """Why a check failed: an expectation of the lesson (`what` is set), or any other exception."""

    kind: str  # the exception's class
    message: str
    frames: list[Frame]  # outermost first
    got: str = ""
    expected: str = ""
    what: str = ""
    invariant: str = ""
    read: str = ""
    output: str = ""  # what the check printed


class Started(msgspec.Struct, frozen=True, tag=True):
    """A check has begun."""

    name: str


class CheckResult(msgspec.Struct, frozen=True, tag=True):
    """A check has ended. `name` reads as a sentence."""

    name: str
    guards: list[str]  # names of pitfalls
    failure: Failure | None = None


Event = Started | CheckResult
EVENTS = msgspec.json.Decoder(Event)


class Report(msgspec.Struct, frozen=True):
    """A whole run: the results in order, and what cut it short, if anything did."""

    results: list[CheckResult]
    unfinished: str = ""  # the check that was running when the time ended or the process died
    cut_short: str = ""  # why not all checks were run, in words
    seconds: float = 0.0

    @property
    def first_failure(self) -> CheckResult | None:
        return next((result for result in self.results if result.failure is not None), None)

    @property
    def passed(self) -> bool:
        return bool(self.results) and self.first_failure is None and not self.cut_short
