"""Who may use an engine now: one thread at a time, in the order in which they ask, and no signal amid a step.

Knows nothing of what is done in a turn.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Turns:
    """A lock that threads get in the order in which they ask, so that none that asks again at once keeps others out."""

    def __init__(self) -> None:
        self._next = threading.Lock()  # held by the thread that gets the turn next
        self._turn = threading.Lock()
        self._inside: set[int] = set()  # threads that have the turn or wait for it

    @property
    def is_inside(self) -> bool:
        """Whether this thread has the turn, or waits for it in a frame further up."""
        return threading.get_ident() in self._inside

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the turn and have it for the block. Raises RuntimeError, instead of waiting for ever, within one."""
        thread = threading.get_ident()
        if thread in self._inside:
            raise RuntimeError(
                "a method of LLM was called while this thread is inside a step of the same LLM (by a signal handler or "
                "a finalizer): call it when the step is over"
            )
        self._inside.add(thread)
        try:
            with self._next:
                self._turn.acquire()
            try:
                yield
            finally:
                self._turn.release()
        finally:
            self._inside.discard(thread)


_DEFERRED = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)  # whose handlers often raise


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold back Ctrl-C, timers and SIGTERM until the block is left, since a step that their handlers interrupt is lost.

    A second Ctrl-C is not held back: that is for a step that hangs.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone runs handlers
        yield
        return
    handlers = {number: handler for number in _DEFERRED if callable(handler := signal.getsignal(number))}
    received: dict[int, FrameType | None] = {}

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in received:
            handlers[signal.SIGINT](number, frame)
        received[number] = frame

    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        with contextlib.ExitStack() as handled:  # each of them, although one may raise
            for number, handler in handlers.items():
                signal.signal(number, handler)
                if number in received:
                    handled.callback(handler, number, received[number])
