"""How the fuzz tests run: for FUZZ_SECONDS each (2; `make fuzz` takes minutes), in a bounded address space.

In the two seconds of the normal suite the inputs are the same each time. A finding is kept: as an example in the test,
or as a file in tests/data/fuzz/.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

SECONDS = float(os.environ.get("FUZZ_SECONDS", "2"))
CORPUS = Path(__file__).parent.parent / "data" / "fuzz"
SPACE_BYTES = 1 << 30  # what one input may take beyond what the process has
LONGEST_S = 5.0  # of processor time, which other processes do not lengthen, that one input may take

Input = TypeVar("Input")


def fuzz(check: Callable[[Input], None], inputs: SearchStrategy[Input]) -> None:
    """Give `check` inputs until the time is up. Raises what it raises, with the smallest input that does so."""
    end = time.monotonic() + SECONDS
    number = 0 if "FUZZ_SECONDS" not in os.environ else random.getrandbits(32)
    size = 20

    def bounded(one: Input) -> None:
        start = time.process_time()
        with bounded_space():
            check(one)
        assert time.process_time() - start < LONGEST_S, "takes too long"

    while time.monotonic() < end:
        run = settings(max_examples=size, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        tried: Any = seed(number)(run(given(inputs)(bounded)))
        tried()
        number, size = number + 1, min(2 * size, 500)


@contextmanager
def bounded_space() -> Iterator[None]:
    """A giant allocation is a MemoryError in the block, which no reader may raise."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPACE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def kept(kind: str) -> list[Path]:
    """The files that once found something."""
    return sorted((CORPUS / kind).iterdir())
