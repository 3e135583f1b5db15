"""Whether a grammar compiles, found out in a child process that can be killed: no schema takes down a server.

The child, `python -m mini_sglang.grammar.checker`, reads a vocabulary, then grammars, and answers each with what is
wrong with it; messages are msgpack behind four bytes of length. A grammar that takes longer than the limit, or more
memory than the child may have, gets the child killed and is refused; a new child takes the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from mini_sglang.child_process import leave_signals_to_parent
from mini_sglang.errors import FieldError
from mini_sglang.grammar.compiler import GrammarCompiler, Vocabulary, error_field, grammar_key, grammar_only
from mini_sglang.sampling_params import SamplingParams

LIMIT_S = 0.5  # for one grammar; honest ones take milliseconds
_ALARM_S = 2  # after which the child ends itself, should its parent be gone
_MEMORY = 256 << 20  # bytes that a grammar may take
_REMEMBERED = 1024  # grammars
_LENGTH = struct.Struct("<I")


class GrammarChecker:
    """Checks grammars against one vocabulary, one at a time, and remembers the outcome. Belongs to one event loop.

    The child is started for the first grammar, since many servers never see one. `make_vocabulary` runs in a thread.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: bytes | None = None
        self._child: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._turn = asyncio.Lock()
        self._checks: dict[bytes, asyncio.Task[str]] = {}  # under way, by grammar
        self._found: OrderedDict[bytes, str] = OrderedDict()  # the problem of a grammar; empty if it has none

    async def check(self, params: SamplingParams) -> None:
        """Raise FieldError if the grammar that `params` ask for does not compile."""
        key = grammar_key(params)
        problem = self._found.get(key)
        if problem is None:
            if key not in self._checks:  # a task of its own: a caller that leaves must not stop it half-way
                self._checks[key] = asyncio.create_task(self._check(params, key))
                self._checks[key].add_done_callback(lambda _: self._checks.pop(key))
            problem = await asyncio.shield(self._checks[key])
        if problem:
            raise FieldError(error_field(params), problem)

    async def close(self) -> None:
        """End the child."""
        for check in [*self._checks.values()]:
            check.cancel()
        await self._end_child()

    async def _check(self, params: SamplingParams, key: bytes) -> str:
        """The problem of a grammar; empty if it has none."""
        async with self._turn:
            try:
                child = await self._living_child()
                async with asyncio.timeout(LIMIT_S):
                    problem = (await _ask(child, msgspec.msgpack.encode(grammar_only(params)))).decode()
                self._remember(key, problem)
                return problem
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                await self._end_child()
                self._begin_child()
                memory = _MEMORY >> 20
                return f"takes more than {LIMIT_S} s or {memory} MiB to compile; make it smaller"
            except BaseException:  # nobody knows where the conversation stands
                await self._end_child()
                raise

    def _remember(self, key: bytes, problem: str) -> None:
        """Not what a limit says, which another time may not be reached."""
        self._found[key] = problem
        if len(self._found) > _REMEMBERED:
            self._found.popitem(last=False)

    async def _living_child(self) -> asyncio.subprocess.Process:
        child = await asyncio.shield(self._child or self._begin_child())
        if child.returncode is not None:
            child = await asyncio.shield(self._begin_child())
        return child

    def _begin_child(self) -> asyncio.Task[asyncio.subprocess.Process]:
        self._child = asyncio.create_task(self._start())
        return self._child

    async def _start(self) -> asyncio.subprocess.Process:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mini_sglang.grammar.checker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            if self._vocabulary is None:  # while the child loads its libraries
                self._vocabulary = msgspec.msgpack.encode(await asyncio.to_thread(self._make_vocabulary))
            await _ask(child, self._vocabulary)
        except BaseException:
            await _kill(child)
            raise
        return child

    async def _end_child(self) -> None:
        starting, self._child = self._child, None
        if starting is None:
            return
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, asyncio.IncompleteReadError, OSError):
            await _kill(await starting)


async def _ask(child: asyncio.subprocess.Process, message: bytes) -> bytes:
    """Send one message and wait for the answer. Raises IncompleteReadError or ConnectionError if the child is gone."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(_LENGTH.pack(len(message)) + message)
    await child.stdin.drain()
    (length,) = _LENGTH.unpack(await child.stdout.readexactly(_LENGTH.size))
    return await child.stdout.readexactly(length)


async def _kill(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    await child.wait()


def main() -> int:
    """The child: serves until its parent closes the pipe."""
    leave_signals_to_parent()
    vocabulary = _receive()
    if vocabulary is None:
        return 1
    compiler = GrammarCompiler(msgspec.msgpack.decode(vocabulary, type=Vocabulary), num_cached=0)
    _limit_memory()
    _answer("")
    while (message := _receive()) is not None:
        params = msgspec.msgpack.decode(message, type=SamplingParams)
        signal.alarm(_ALARM_S)
        try:
            compiler.compile(params)
        except FieldError as error:
            _answer(error.problem)
        else:
            _answer("")
        signal.alarm(0)
    return 0


def _receive() -> bytes | None:
    header = sys.stdin.buffer.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    return sys.stdin.buffer.read(length)


def _answer(text: str) -> None:
    data = text.encode(errors="replace")
    sys.stdout.buffer.write(_LENGTH.pack(len(data)) + data)
    sys.stdout.buffer.flush()


def _limit_memory() -> None:
    """Linux only, as other systems count differently or not at all; there the time limit has to do."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
