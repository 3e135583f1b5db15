"""Checks of L7: one request's queue, the two ends of the socket, the stream, and what happens when somebody leaves.

The engine process is played by the check: it reads what AsyncEngine sends, and answers by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import zmq.asyncio
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from mini_sglang.config import EngineConfig
from mini_sglang.ipc.async_engine import AsyncEngine, OutputQueue
from mini_sglang.ipc.messages import (
    AbortRequest,
    EngineInfo,
    GetStats,
    Outputs,
    Ping,
    ToEngine,
    decode_to_engine,
    encode,
)
from mini_sglang.learn.checking import LessonError, expect, guards
from mini_sglang.outputs import FinishReason, GeneratedTokens, RequestOutput, StepOutputs, TokenOutput, Usage
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.tokenizer import Tokenizer

Result = TypeVar("Result")
SOON_S = 2.0  # for what should happen at once


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


async def soon(work: Coroutine[Any, Any, Result], what: str, *, read: str) -> Result:
    """The result of `work`, or a LessonError if it does not come."""
    try:
        return await asyncio.wait_for(work, SOON_S)
    except TimeoutError:
        raise LessonError("nothing", "an answer at once", what, read=read) from None


# -- the output queue -------------------------------------------------------------------------------------------------


def piece(text: str, num_tokens: int) -> RequestOutput:
    """An output that adds `text` with one token; `num_tokens` is how many there are then."""
    generated = GeneratedTokens(token_ids=list(range(num_tokens)), text_pieces=[text])
    usage = Usage(prompt_tokens=1, completion_tokens=num_tokens)
    return RequestOutput(request_id="a", usage=usage, text_delta=text, num_new_tokens=1, generated=generated)


@guards("latest-only")
def test_a_slow_reader_gets_everything_at_once() -> None:
    async def read_late() -> RequestOutput:
        queue = OutputQueue()
        for count, text in enumerate(("one ", "two ", "three"), 1):
            queue.put(piece(text, count))
        return await queue.get()

    output = run(read_late())
    read = "L7: An output queue that holds one output"
    expect(output.text_delta, "one two three", "text of three outputs, fetched after the third", read=read)
    expect(output.num_new_tokens, 3, "new tokens of three outputs, fetched after the third", read=read)


@guards("never-cleared")
def test_a_reader_waits_when_there_is_nothing_new() -> None:
    async def read_twice() -> bool:
        queue = OutputQueue()
        queue.put(piece("one", 1))
        await queue.get()
        second = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0.01)
        waits = not second.done()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        return waits

    expect(
        run(read_twice()),
        True,
        "whether a second get() waits, when the only output was fetched by the first",
        read="L7: An output queue that holds one output",
    )


@guards("error-overtakes")
def test_what_arrived_before_an_error_is_delivered_before_it() -> None:
    async def read_all() -> list[str]:
        queue, seen = OutputQueue(), []
        queue.put(piece("last words", 1))
        queue.fail(ValueError("the engine ended"))
        for _ in range(2):
            try:
                seen.append((await queue.get()).text_delta)
            except ValueError as error:
                seen.append(str(error))
        return seen

    expect(
        run(read_all()),
        ["last words", "the engine ended"],
        "what a reader gets that was slower than an output and an error after it",
        read="L7: An output queue that holds one output",
    )


# -- the API process's end --------------------------------------------------------------------------------------------


def letters() -> Tokenizer:
    """Token i is the letter chr(i)."""
    backend = Backend(models.BPE(vocab={chr(i): i for i in range(33, 127)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset())


class Wire:
    """The engine process's end of the socket."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def receive(self, what: str, read: str) -> ToEngine:
        async def message() -> ToEngine:
            received: ToEngine = decode_to_engine(await self._socket.recv())
            return received

        return await soon(message(), f"the engine process learns {what}", read=read)

    async def send_tokens(self, wire_id: str, text: str, **fields: Any) -> None:
        output = TokenOutput(request_id=wire_id, token_ids=list(map(ord, text)), **fields)
        await self._socket.send(encode(Outputs(StepOutputs(others=[output]))))


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[AsyncEngine, Wire]]:
    """A real AsyncEngine, and the other end of its socket. Its process only sleeps; there are no grammars."""
    context = zmq.asyncio.Context()
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    here.bind("inproc://lesson")
    there.connect("inproc://lesson")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)")
    info = EngineInfo(
        model="lesson", dtype="float32", device="cpu", vocab_size=127, context_length=99, page_size=16, num_pages=9,
        max_prompt_tokens=98, max_running_requests=4, eos_token_ids=[], pid=process.pid,
        config=EngineConfig(model="lesson"),
    )  # fmt: skip
    engine = AsyncEngine(process, context, here, info, letters())
    try:
        yield engine, Wire(there)
    finally:
        there.close(linger=0)
        await engine.close(timeout=0.01)


@guards("no-abort")
def test_leaving_a_stream_early_aborts_the_request() -> None:
    read = "L7: Leaving is an event"

    async def leave() -> ToEngine:
        async with connected() as (engine, wire):
            outputs = engine.generate([65], SamplingParams(), request_id="a")
            first = asyncio.ensure_future(anext(outputs))
            added: Any = await wire.receive("of the request", read)
            await wire.send_tokens(added.request_id, "B")
            await first
            await outputs.aclose()
            return await wire.receive("that nobody reads the rest", read)

    expect(type(run(leave())).__name__, "AbortRequest", "the message after a reader has left", read=read)


@guards("stop-not-told")
def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    read = "L7: Leaving is an event"

    async def stop() -> tuple[str, ToEngine]:
        async with connected() as (engine, wire):
            outputs = engine.generate([65], SamplingParams(stop=["XY"]), request_id="a")
            first = asyncio.ensure_future(anext(outputs))
            added: Any = await wire.receive("of the request", read)
            await wire.send_tokens(added.request_id, "BXY")
            output = await first
            return output.text, await wire.receive("that a stop string has ended the request", read)

    text, message = run(stop())
    reason = message.reason if isinstance(message, AbortRequest) else None
    expect((text, reason), ("B", FinishReason.STOP), "the text, and the reason that the engine is told", read=read)


@guards("id-used-again")
def test_late_tokens_of_an_old_request_do_not_reach_a_new_one_with_its_id() -> None:
    read = "L7: Ids on the wire"

    async def again() -> str:
        async with connected() as (engine, wire):
            old = engine.generate([65], SamplingParams(), request_id="a")
            waiting = asyncio.ensure_future(anext(old))
            first: Any = await wire.receive("of the first request", read)
            await wire.send_tokens(first.request_id, "o")
            await waiting
            await old.aclose()
            new = engine.generate([65], SamplingParams(), request_id="a")
            waiting = asyncio.ensure_future(anext(new))
            second: Any = await wire.receive("of the end of the first request", read)
            second = await wire.receive("of the second request", read)
            await wire.send_tokens(first.request_id, "old")  # was on its way when the abort arrived
            await wire.send_tokens(second.request_id, "new")
            output = await soon(asyncio.wait_for(waiting, SOON_S), "the second request gets its tokens", read=read)
            await new.aclose()
            return output.text

    expect(
        run(again()),
        "new",
        "text of a request whose id was used before, by one that was left a moment ago",
        invariant="an id on the wire is never used twice",
        read=read,
    )


@guards("one-fault-ends-all")
def test_a_fault_in_one_request_leaves_the_others_alone() -> None:
    read = "L7: One request's fault"

    async def two() -> list[str]:
        async with connected() as (engine, wire):
            params = [SamplingParams(logprobs=1), SamplingParams()]
            streams = [engine.generate([65], each, request_id=str(i)) for i, each in enumerate(params)]
            waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
            added: list[Any] = [await wire.receive("of a request", read) for _ in streams]
            await wire.send_tokens(added[0].request_id, "B", logprobs=[])  # a token without its log-probability
            await wire.send_tokens(added[1].request_id, "C")
            results = await asyncio.gather(*waiting, return_exceptions=True)
            for stream in streams:
                await stream.aclose()
            return [each.text if isinstance(each, RequestOutput) else "an error" for each in results]

    expect(
        run(two()), ["an error", "C"], "what two requests get, the first with a message that is malformed", read=read
    )


# -- the stream -------------------------------------------------------------------------------------------------------


class Client:
    """An ASGI client that notes what it is sent, and can leave."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def describe(error: Exception) -> bytes:
    """The last event of a stream that fails."""
    return f"data: {error}\n\n".encode()


@guards("nobody-notices")
def test_work_ends_when_its_client_has_gone() -> None:
    from mini_sglang.server.answering import while_connected
    from mini_sglang.server.errors import ClientDisconnected

    async def leave() -> tuple[str, bool]:
        client, ended = Client(), asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        asyncio.get_running_loop().call_later(0.01, client.gone.set)
        try:
            await asyncio.wait_for(while_connected(client.receive, work()), SOON_S)
        except ClientDisconnected:
            return "ClientDisconnected", ended.is_set()
        except TimeoutError:
            return f"still working after {SOON_S:g} s", ended.is_set()
        return "a result", ended.is_set()

    expect(
        run(leave()),
        ("ClientDisconnected", True),
        "what came of work whose client has gone, and whether it had ended by then",
        read="L7: Leaving is an event",
    )


@guards("status-too-early")
def test_what_fails_before_the_first_event_gets_a_status_of_its_own() -> None:
    from mini_sglang.server.answering import EventStream
    from mini_sglang.server.errors import ApiError

    async def refused() -> AsyncGenerator[bytes, None]:
        raise ApiError(429, "the queue is full")
        yield b""

    async def start() -> list[Any]:
        client = Client()
        with contextlib.suppress(ApiError):
            await EventStream(refused(), describe)({}, client.receive, client.send)
        return client.sent

    expect(
        run(start()),
        [],
        "what was sent of a stream that fails before its first event",
        invariant="the status goes out together with the first event",
        read="L7: A stream has one status",
    )


@guards("silent-break")
def test_what_fails_later_is_said_in_the_stream() -> None:
    from mini_sglang.server.answering import EventStream
    from mini_sglang.server.errors import ApiError

    async def breaks() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise ApiError(500, "the engine stopped")

    async def start() -> tuple[bool, bool]:
        client = Client()
        with contextlib.suppress(ApiError):
            await EventStream(breaks(), describe)({}, client.receive, client.send)
        return "the engine stopped" in client.text, not client.sent[-1].get("more_body", False)

    expect(
        run(start()),
        (True, True),
        "whether the client reads what went wrong, and whether the answer was ended",
        read="L7: A stream has one status",
    )


@guards("generator-left-open")
def test_the_generator_is_closed_before_the_response_is_over() -> None:
    from mini_sglang.server.answering import EventStream

    async def leave() -> bool:
        client, closed = Client(), False

        async def endless() -> AsyncGenerator[bytes, None]:
            nonlocal closed
            try:
                while True:
                    yield b"data: 1\n\n"
            finally:
                closed = True

        async def send(message: Any) -> None:
            client.gone.set()
            await asyncio.sleep(0.01)  # the client leaves while something is being sent

        response = EventStream(endless(), describe)
        await response({}, client.receive, send)
        return closed

    expect(
        run(leave()),
        True,
        "whether the generator's `finally` has run when the response is over",
        invariant="when the response is over, the engine has been told",
        read="L7: Leaving is an event",
    )


# -- the engine process's end -----------------------------------------------------------------------------------------


class Script:
    """A socket that has `messages` to give, and notes how long it was asked to wait for them."""

    def __init__(self, *messages: ToEngine) -> None:
        self.messages = list(messages)
        self.waits: list[int] = []
        self.sent: list[bytes] = []

    def poll(self, timeout: int) -> int:
        self.waits.append(timeout)
        if len(self.waits) > 50:
            raise LessonError("50 looks at an empty socket", "the loop leaves", "when its parent process is gone")
        return len(self.messages)

    def recv(self) -> bytes:
        return encode(self.messages.pop(0))

    def send(self, message: bytes) -> None:
        self.sent.append(message)


def loop(script: Script, parent_pid: int, *, busy: bool) -> Any:
    """A real EngineLoop around an engine that is only busy or not."""
    from mini_sglang.ipc.engine_process import EngineLoop

    engine: Any = SimpleNamespace(has_work=busy, stats=lambda: None, check=lambda: None, check_ranks=lambda: None)
    return EngineLoop(engine, script, parent_pid)  # type: ignore[arg-type]


@guards("blocks-while-busy")
def test_an_engine_with_work_does_not_wait_for_messages() -> None:
    script = Script()
    going_on = loop(script, os.getppid(), busy=True)._receive()
    expect(
        (going_on, script.waits),
        (True, [0]),
        "whether the loop goes on, and for how many ms it waited for messages while requests run",
        read="L7: Two loops that must not wait for each other",
    )


@guards("one-message-a-step")
def test_all_messages_that_have_arrived_are_handled_before_the_next_step() -> None:
    script = Script(*(Ping(call_id) for call_id in range(5)))
    loop(script, os.getppid(), busy=True)._receive()
    expect(
        len(script.sent),
        5,
        "messages answered before the next step, of 5 that had arrived",
        read="L7: Two loops that must not wait for each other",
    )


@guards("outlives-its-parent")
def test_the_engine_leaves_when_its_parent_is_gone() -> None:
    expect(
        loop(Script(), parent_pid=-1, busy=False)._receive(),
        False,
        "whether the loop goes on when its parent process is gone",
        read="L7: Who dies with whom",
    )


@guards("queue-without-end")
def test_beyond_the_limit_a_request_is_refused_at_once() -> None:
    from mini_sglang.server.context import Admission
    from mini_sglang.server.errors import ApiError
    from mini_sglang.server.generation import Job, _registered
    from mini_sglang.server.native.bodies import GenerateBody

    admission = Admission(running=1, waiting=1, has_shares=False)
    context: Any = SimpleNamespace(jobs={}, engine=SimpleNamespace(request_ids=[]), admission=admission)
    status = 200
    try:
        third = Job("third", [[65]], [SamplingParams()], GenerateBody(prompt="A"))
        with admission.places("", 2, "two that are there"), _registered(context, third):
            pass
    except ApiError as error:
        status = error.status
    expect(
        status,
        429,
        "the status of a third request, where one may run and one may wait",
        read="L7: Back-pressure",
    )


def test_a_question_is_answered_between_steps() -> None:
    script = Script(Ping(7), GetStats(8))
    loop(script, os.getppid(), busy=False)._handle(Ping(7))
    expect(len(script.sent), 1, "answers to a ping")
