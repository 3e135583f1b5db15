"""What a child process does so that it ends when its parent says so, and not later than its parent.

It knows neither what the process computes nor who starts it.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, even in the middle of a long step.

    Linux only (prctl); elsewhere a process has to look after its parent itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM, which may reach the whole process group: the parent decides what they mean."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
