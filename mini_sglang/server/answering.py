"""Answers a job over HTTP: an API's `AnswerFormat` writes its outputs, as one JSON value or as a stream of events.

An `EventStream` sends its status together with the first event, so that an earlier error still gets an error status; a
later error becomes the stream's last events. It never says nothing for long, since proxies close connections that do.
When the client leaves, its job ends. Knows no API.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from mini_sglang.errors import shorten
from mini_sglang.outputs import RequestOutput
from mini_sglang.sampling_params import Json
from mini_sglang.server.context import context_of
from mini_sglang.server.errors import ApiError, ClientDisconnected, as_api_error
from mini_sglang.server.generation import Caller, Job, off_loop, run_job

Result = TypeVar("Result")
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # of a job, each with its choice

TIMEOUT_HEADER = "X-Request-Timeout"
DONE = b"data: [DONE]\n\n"  # the last event of a stream, in the APIs that have one
PING_S = 5.0  # without an event, after which a ping is sent

_encode_json = msgspec.json.Encoder().encode


class AnswerFormat(Protocol):
    """Writes the answer to one job, which has one or more choices, as its API defines it. Events are bytes."""

    ping: bytes = b": ping\n\n"  # says nothing: a comment, or the event that an API has for it

    def whole(self, outputs: Sequence[RequestOutput]) -> object:
        """The JSON value of a complete answer. `outputs`: the last of each choice."""
        ...

    def opening(self, choice: int, first: RequestOutput) -> Iterable[bytes]:
        """The events that begin a choice, before those of its first output."""
        return ()

    def delta(self, choice: int, output: RequestOutput) -> Iterator[bytes]:
        """The events that carry what `output` added to a choice. Iterating does the work."""
        ...

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        """The events that end a stream. `outputs`: the last of each choice."""
        return (DONE,)

    def failure(self, error: ApiError) -> Iterable[bytes]:
        """The events that end a stream after an error."""
        return (event(error.body()),)


def event(value: Json) -> bytes:
    """A server-sent event that carries a JSON object."""
    return b"data: " + _encode_json(value) + b"\n\n"


def named_event(value: Json) -> bytes:
    """A server-sent event that carries a JSON object and has the object's `type` as its name."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event(value)


async def answer(request: Request, job: Job, answer_format: AnswerFormat, *, stream: bool | None) -> Response:
    """Run the job of a request and answer with its outputs. Raises what `run_job` raises, and ClientDisconnected."""
    context = context_of(request)
    job = dataclasses.replace(job, caller=caller_of(request))
    choices = run_job(context, job)
    if context.tracing is not None:
        choices = context.tracing.watch(request, job, choices)
    if stream:
        events = _events(choices, job, answer_format)
        return EventStream(events, lambda error: b"".join(answer_format.failure(error)), answer_format.ping)
    outputs = await while_connected(request.receive, _last_outputs(choices, job))
    num_logprobs = sum(job.num_logprobs(choice, last.usage.completion_tokens) for choice, last in enumerate(outputs))
    whole = await off_loop(num_logprobs, lambda: _encode_json(answer_format.whole(outputs)))
    return Response(whole, media_type="application/json")


def caller_of(request: Request) -> Caller:
    """Which API key the request has, and until when it wants its answer. Raises ApiError 400."""
    client: str = getattr(request.state, "client", "")
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return Caller(client)
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        message = f"{TIMEOUT_HEADER} must be a number of seconds greater than 0, got {shorten(given)}"
        raise ApiError(400, message, param=TIMEOUT_HEADER, code="invalid_value")
    return Caller(client, request.state.arrived + timeout_s)


async def _last_outputs(choices: Outputs, job: Job) -> list[RequestOutput]:
    """Run a job to its end and return the last output of each choice, which holds the whole answer."""
    last: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(choices) as outputs:
        async for choice, output in outputs:
            last[choice] = output
    return [last[choice] for choice in range(job.num_choices)]


async def _events(choices: Outputs, job: Job, answer_format: AnswerFormat) -> AsyncGenerator[bytes, None]:
    """Run a job and yield the events of its stream. A thread makes the events that hold many log-probabilities."""
    last: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(choices) as outputs:
        async for choice, output in outputs:
            is_first = choice not in last
            last[choice] = output
            if is_first:
                for data in answer_format.opening(choice, output):
                    yield data
            num_logprobs = job.num_logprobs(choice, output.num_new_tokens, with_prompt=is_first)
            delta = answer_format.delta(choice, output)
            for data in await off_loop(num_logprobs, functools.partial(list, delta)):
                yield data
    for data in answer_format.closing([last[choice] for choice in range(job.num_choices)]):
        yield data


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work`, but cancel it and raise ClientDisconnected when the client closes the connection.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)  # the engine has been told when this returns


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response that sends the events of a generator, and closes the generator when the client leaves.

    `describe` makes the last events of a stream that fails; `ping` is sent when there is nothing else for PING_S.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        describe: Callable[[ApiError], bytes],
        ping: bytes = AnswerFormat.ping,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._describe = describe
        self._ping = ping
        self._started = False
        self.init_headers(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events. Raises what the generator raises before anything has been sent."""
        try:
            await while_connected(receive, self._send_with_pings(send))
        except ClientDisconnected:
            if not self._started:
                raise

    async def _send_with_pings(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        pinged = _PingedSend(send, start, {"type": "http.response.body", "body": self._ping, "more_body": True})
        pings = asyncio.create_task(pinged.break_silence())
        try:
            await self._send_all(pinged)
        except Exception as error:
            if self._started or not pinged.started:
                raise
            await pinged({"type": "http.response.body", "body": self._describe(as_api_error(error)), "more_body": True})
            await pinged({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._started = pinged.started
            pings.cancel()

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            first = await anext(events)
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:  # the status has been sent: say it in the stream
                body = self._describe(as_api_error(error))
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _PingedSend:
    """A stream's `send` that is never silent for long: a ping goes out, and the start before the first of them."""

    def __init__(self, send: Send, start: Message, ping: Message) -> None:
        self._send = send
        self._start = start
        self._ping = ping
        self._sending = asyncio.Lock()
        self._quiet_since = asyncio.get_running_loop().time()
        self.started = False

    async def __call__(self, message: Message) -> None:
        async with self._sending:
            if message["type"] == "http.response.start":
                if self.started:
                    return
                self.started = True
            await self._send(message)
            self._quiet_since = asyncio.get_running_loop().time()

    async def break_silence(self) -> None:
        """Send pings until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if (left := self._quiet_since + PING_S - loop.time()) > 0:
                await asyncio.sleep(left)
            else:
                await self(self._start)
                await self(self._ping)
