"""Whether a grammar compiles, found out in a child process that can be killed: no schema takes down a server.

The child, `python -m mini_sglang.grammar.checker FD`, gets a vocabulary, then grammars, all in msgpack, and answers
each with what is wrong with it. If a grammar takes more time of the processor than the limit, or more memory than the
child may have, the child ends and the grammar is refused; a new child takes the next one. Time is the child's own, so
that a busy machine does not change what is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from mini_sglang.child_process import leave_signals_to_parent
from mini_sglang.errors import FieldError
from mini_sglang.grammar.compiler import GrammarCompiler, Vocabulary, error_field, grammar_key
from mini_sglang.sampling_params import SamplingParams

LIMIT_S = 2.0  # of the processor's time, for one grammar; honest ones take milliseconds
_LAST_MOMENT_S = 0.2
_STUCK_S = 600.0  # of any time, after which a child is taken for stuck
_MEMORY = 256 << 20  # bytes that a grammar may take
_REMEMBERED = 1024  # grammars
_REFUSAL = f"takes more than {LIMIT_S:g} s of a processor or {_MEMORY >> 20} MiB to follow; make it smaller"


class GrammarChecker:
    """Checks grammars against one vocabulary, one at a time, and remembers the outcome. Belongs to one event loop.

    The child is started for the first grammar, since many servers never see one. A thread of its own starts it and
    talks to it; `make_vocabulary` runs there too.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: bytes | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None  # to the child
        self._thread = ThreadPoolExecutor(1, "grammar-checker")
        # what is wrong with a grammar, if known: a field and its problem, or nothing
        self._checks: OrderedDict[bytes, asyncio.Future[list[str]]] = OrderedDict()

    async def check(self, params: SamplingParams) -> None:
        """Raise FieldError if the grammar that `params` ask for does not compile."""
        key = grammar_key(params)
        check = self._checks.get(key)
        if check is None:
            check = self._checks[key] = asyncio.get_running_loop().run_in_executor(
                self._thread, self._check, key, error_field(params)
            )
            check.add_done_callback(partial(self._forget_failure, key))
            if len(self._checks) > _REMEMBERED:
                self._checks.popitem(last=False)
        try:
            wrong = await asyncio.shield(check)  # a caller that leaves must not stop it for the others
        except TimeoutError:
            wrong = [error_field(params), _REFUSAL]
        if wrong:
            raise FieldError(*wrong)

    async def close(self) -> None:
        """End the child."""
        for check in self._checks.values():
            check.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._child is not None:
            self._child.kill()
            await asyncio.to_thread(self._child.wait)

    def _forget_failure(self, key: bytes, check: asyncio.Future[list[str]]) -> None:
        """Forget a check without an outcome: the child may have been killed for another reason."""
        if check.cancelled() or check.exception() is not None:
            self._checks.pop(key, None)

    # What follows runs in the thread.

    def _check(self, grammar: bytes, field: str) -> list[str]:
        """What is wrong with a grammar, which is in `field`. Raises TimeoutError if the child does not come to it."""
        try:
            self._need_child()
            return msgspec.msgpack.decode(self._ask(grammar, _STUCK_S), type=list[str])
        except (EOFError, ConnectionError, TimeoutError):
            went_beyond_limit = self._end_child() not in (-signal.SIGKILL, -signal.SIGTERM)
            self._thread.submit(self._need_child)
            if went_beyond_limit:
                return [field, _REFUSAL]
            raise TimeoutError from None
        except BaseException:  # the next answer could be to this grammar
            self._end_child()
            raise

    def _need_child(self) -> None:
        """Start a child, unless there is one."""
        if self._child is not None and self._child.poll() is None:
            return
        self._pipe, childs_end = Pipe()
        fd = childs_end.fileno()
        command = (sys.executable, "-m", "mini_sglang.grammar.checker", str(fd))
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(fd,))
        childs_end.close()
        try:
            if self._vocabulary is None:  # while the child loads its libraries
                self._vocabulary = msgspec.msgpack.encode(self._make_vocabulary())
            self._ask(self._vocabulary)
        except BaseException:
            self._end_child()
            raise

    def _ask(self, message: bytes, timeout: float | None = None) -> bytes:
        """Send one message and wait for the answer. Raises EOFError or ConnectionError if the child is gone."""
        assert self._pipe is not None
        self._pipe.send_bytes(message)
        if not self._pipe.poll(timeout):
            raise TimeoutError
        return self._pipe.recv_bytes()

    def _end_child(self) -> int | None:
        """End the child; returns its exit code, or minus the number of the signal that ended it, if there was one."""
        if self._child is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_LAST_MOMENT_S)  # it may be about to end by itself
        self._child.kill()
        return self._child.wait()


def main(fd: int) -> int:
    """The child: serves until its parent closes the pipe."""
    leave_signals_to_parent()
    pipe = Connection(fd)
    with contextlib.suppress(EOFError):
        compiler = GrammarCompiler(msgspec.msgpack.decode(pipe.recv_bytes(), type=Vocabulary), num_cached=1)
        _limit_memory()
        pipe.send_bytes(b"")
        while True:
            params = msgspec.msgpack.decode(pipe.recv_bytes(), type=SamplingParams)
            wrong: list[str] = []
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # whose signal ends the process
            try:
                compiler.check(params)
            except FieldError as error:
                wrong = [error.field, error.problem.encode(errors="replace").decode()]
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(msgspec.msgpack.encode(wrong))
    return 0


def _limit_memory() -> None:
    """Linux only, as other systems count differently or not at all; there the time limit has to do."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
