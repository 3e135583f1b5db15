"""AsyncEngine: an engine in a process of its own, behind asyncio. Each request is one async iterator of outputs.

It carries messages over the socket of the engine process, ends that process, and turns tokens into text. It knows
nothing of HTTP, and imports no torch: the model lives on the other side of the socket.

        caller ── generate() ──▶ AddRequest ─────────▶ engine process
           ▲                                                │
           └── output queue of a request ◀ OutputProcessor ◀┘ Outputs, one message per step
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

import msgspec
import zmq.asyncio

from mini_sglang.collector import no_collections
from mini_sglang.config import EngineConfig
from mini_sglang.errors import FieldError
from mini_sglang.grammar.checker import GrammarChecker
from mini_sglang.grammar.compiler import NO_END_TOKEN, Vocabulary, unsupported
from mini_sglang.ipc import messages
from mini_sglang.ipc.launch import LaunchedEngine, kill, launch
from mini_sglang.outputs import FinishReason, RequestOutput, StepOutputs, TokenOutput
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.stats import SchedulerStats
from mini_sglang.text.output_processor import OutputProcessor
from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.weights.hub import ModelSource, find_model

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", messages.Pong, messages.Stats, messages.CacheFlushed, messages.Trace)

_DELIVERIES_PER_TURN = 16  # to send one to its client takes about a tenth of a millisecond
CALL_TIMEOUT_S = 5.0  # an engine that takes longer to answer a ping counts as stuck
TRACE_TIMEOUT_S = 120.0  # a long trace takes long to write


class EngineDeadError(RuntimeError):
    """The engine process has ended; no request can be served any more."""


class OutputQueue:
    """Hands a request's outputs to its consumer. Holds at most one: what a slow consumer misses is merged."""

    def __init__(self) -> None:
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output; the consumer gets it together with those that it has not fetched yet."""
        self._output = output if self._output is None else merge_outputs(self._output, output)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Let the consumer's next `get` raise `error`, once it has had what arrived before."""
        self._error = error
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """Everything new since the last call; waits for it."""
        await self._arrived.wait()
        output, self._output = self._output, None
        if output is None:
            raise self._error or RuntimeError("an output queue was woken without anything in it")
        if self._error is None:
            self._arrived.clear()
        return output


def _make_ready(tokenizer: Tokenizer) -> None:
    """Have done once what else the first requests would wait for: a look at every token, and the library of chats."""
    tokenizer.fewest_tokens(0)
    with no_collections():
        if tokenizer.has_chat_template:  # asking imports transformers
            importlib.import_module("mini_sglang.text.template_bounds")


def merge_outputs(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """One output that says what two consecutive outputs of a request say."""
    return dataclasses.replace(
        later,
        text_delta=earlier.text_delta + later.text_delta,
        num_new_tokens=earlier.num_new_tokens + later.num_new_tokens,
    )


@dataclasses.dataclass(slots=True)
class _Stream:
    """One request under way: where its tokens become text, and where its consumer waits."""

    request_id: str
    processor: OutputProcessor
    outputs: OutputQueue


class AsyncEngine:
    """The engine, as the API process sees it. Make one with `await AsyncEngine.start(config)`.

    All methods belong to the event loop that called `start`. What waits for an answer of the engine, or asks for one,
    raises EngineDeadError once its process has ended; `abort` and `request_ids` then know no request.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        context: zmq.asyncio.Context,
        socket: zmq.asyncio.Socket,
        info: messages.EngineInfo,
        tokenizer: Tokenizer,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._process = process
        self._context = context
        self._socket = socket
        self._streams: dict[str, _Stream] = {}  # by the id used on the wire, which is never used twice
        self._calls: dict[int, asyncio.Future[messages.Reply]] = {}
        self._counter = itertools.count()
        self._error: EngineDeadError | None = None
        self._closing = False
        self._dead = asyncio.Event()
        eos = frozenset(info.eos_token_ids)
        self._grammars = GrammarChecker(functools.partial(Vocabulary.of, tokenizer, info.vocab_size, eos))
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch_process())]

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncEngine:
        """Start an engine process and wait until its model is loaded.

        Raises ValueError or OSError if a setting, the model or the folder for temporary files is wrong, RuntimeError
        with the engine's own message if it cannot start. The process also ends when the thread that called this ends.
        """
        source = await asyncio.to_thread(find_model, config)  # which fetches it if need be
        return await cls.join(await launch(config), source)

    @classmethod
    async def join(cls, launched: LaunchedEngine, source: ModelSource) -> AsyncEngine:
        """Wait until a process that has been started has loaded its model, and load the tokenizer meanwhile.

        The process is this engine's from now on, and ends with an error. Raises as `start` does.
        """
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, source)
            await asyncio.to_thread(_make_ready, tokenizer)
            info = await launched.ready()
        except BaseException:
            await launched.kill()
            raise
        return cls(launched.process, launched.context, launched.socket, info, tokenizer)

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        priority: int = 0,
        client: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request; yields what is new whenever there is something, the last time with a finish reason.

        Leaving the iterator early, or cancelling its consumer, aborts the request. Raises FieldError if the engine
        refuses the request, or its grammar does not compile.
        """
        self._check_alive()
        if params.is_constrained:
            if not self.info.eos_token_ids:
                raise unsupported(params, NO_END_TOKEN)
            await self._grammars.check(params)
            self._check_alive()
        processor = OutputProcessor(self.tokenizer, request_id, len(prompt_ids), params)
        stream = _Stream(request_id, processor, OutputQueue())
        wire_id = f"{request_id}#{next(self._counter)}"
        self._streams[wire_id] = stream
        try:
            # stop strings end a request on this side: the engine knows no text
            wire_params = msgspec.structs.replace(params, stop=[])
            self._send(messages.AddRequest(wire_id, prompt_ids, wire_params, cache_salt, priority, client))
            while True:
                output = await stream.outputs.get()
                yield output
                if output.finished:
                    return
        finally:
            if self._streams.pop(wire_id, None) is not None:  # nobody waits for the rest
                self._send(messages.AbortRequest(wire_id))

    @property
    def request_ids(self) -> list[str]:
        """The requests under way, oldest first."""
        return [stream.request_id for stream in self._streams.values()]

    def abort(self, request_id: str) -> bool:
        """End the requests with this id; their consumers get a last output with reason ABORT. False: there is none."""
        found = [wire_id for wire_id, stream in self._streams.items() if stream.request_id == request_id]
        for wire_id in found:
            self._send(messages.AbortRequest(wire_id))
            self._deliver(TokenOutput(request_id=wire_id, token_ids=[], finish_reason=FinishReason.ABORT))
        return bool(found)

    async def ping(self, timeout: float = CALL_TIMEOUT_S) -> None:
        """Make one round trip through the engine loop. Raises TimeoutError after `timeout` seconds."""
        await self._call(messages.Ping, messages.Pong, timeout)

    async def stats(self) -> SchedulerStats:
        """The engine's counters at this moment. Raises TimeoutError."""
        return (await self._call(messages.GetStats, messages.Stats, CALL_TIMEOUT_S)).stats

    async def flush_cache(self) -> int:
        """Drop the cached pages that no request uses; returns how many. Raises TimeoutError."""
        return (await self._call(messages.FlushCache, messages.CacheFlushed, CALL_TIMEOUT_S)).num_pages

    async def start_trace(self, num_steps: int | None = None) -> None:
        """Trace the engine process until `stop_trace`, or for `num_steps` steps.

        Raises ValueError if there is no `profile_dir`, a trace is being made already or the folder is no good;
        TimeoutError.
        """
        start = functools.partial(messages.StartTrace, num_steps=num_steps)
        answer = await self._call(start, messages.Trace, TRACE_TIMEOUT_S)
        if answer.error is not None:
            raise ValueError(answer.error)

    async def stop_trace(self) -> str:
        """End the trace; returns the path of its file. Raises ValueError if there is none, TimeoutError."""
        answer = await self._call(messages.StopTrace, messages.Trace, TRACE_TIMEOUT_S)
        if answer.path is None:
            raise ValueError(answer.error)
        return answer.path

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine process has ended without being asked to; returns why."""
        await self._dead.wait()
        assert self._error is not None
        return self._error

    async def close(self, timeout: float = 1.0) -> None:
        """End the engine process, by force after `timeout` seconds. Requests under way get EngineDeadError."""
        self._closing = True
        if self._process.returncode is None:
            self._send(messages.Shutdown())
        self._die(EngineDeadError("the engine was closed"))
        await self._grammars.close()
        try:
            await asyncio.wait_for(self._process.wait(), timeout)
        except TimeoutError:
            await kill(self._process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _receive(self) -> None:
        try:
            while True:
                message = messages.decode_from_engine(await self._socket.recv())
                if isinstance(message, messages.Outputs):
                    await self._deliver_all(message.outputs)
                else:
                    self._handle(message)
        except Exception as error:  # without this task every request would wait for ever
            logger.exception("messages of the engine cannot be read any more")
            self._die(EngineDeadError(f"the engine cannot be understood: {type(error).__name__}: {error}"))

    def _handle(self, message: messages.FromEngine) -> None:
        match message:
            case messages.RequestRejected(wire_id, field, problem, others):
                if (stream := self._streams.pop(wire_id, None)) is not None:
                    stream.outputs.fail(FieldError(field, problem, *others))
            case messages.Pong() | messages.Stats() | messages.CacheFlushed() | messages.Trace():
                call = self._calls.get(message.call_id)
                if call is not None and not call.done():
                    call.set_result(message)
            case messages.Fatal(error):
                self._die(EngineDeadError(f"the engine stopped: {error}"))

    async def _deliver_all(self, outputs: StepOutputs) -> None:
        """Hand out a step's outputs, some in each turn of the event loop: in the next one their consumers run."""
        for count, output in enumerate(outputs, start=1):
            self._deliver(output)
            if count % _DELIVERIES_PER_TURN == 0:
                await asyncio.sleep(0)

    def _deliver(self, tokens: TokenOutput) -> None:
        """Turn a step's tokens into text and wake the consumer. Tokens of a request that has ended are dropped."""
        wire_id = tokens.request_id
        stream = self._streams.get(wire_id)
        if stream is None:
            return
        try:
            output = stream.processor.push(tokens)
        except Exception as error:  # a fault in one request's text must not end the others
            logger.exception("request %s failed", wire_id)
            del self._streams[wire_id]
            self._send(messages.AbortRequest(wire_id))
            stream.outputs.fail(RuntimeError(f"{type(error).__name__}: {error}"))
            return
        if output.finished:
            del self._streams[wire_id]
            if tokens.finish_reason is None:  # a stop string matched, which only this side can see
                self._send(messages.AbortRequest(wire_id, FinishReason.STOP))
        stream.outputs.put(output)

    async def _watch_process(self) -> None:
        status = await self._process.wait()
        if not self._closing:
            await asyncio.sleep(0.05)  # its last message, which says why, may still be on its way
        self._die(EngineDeadError(f"the engine process ended with status {status}"))

    def _die(self, error: EngineDeadError) -> None:
        if self._error is not None:
            return
        self._error = error
        for stream in self._streams.values():
            stream.outputs.fail(error)
        self._streams.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        if not self._closing:
            logger.error("%s", error)
            self._dead.set()

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error

    async def _call(self, question: Callable[[int], messages.ToEngine], answer: type[Answer], timeout: float) -> Answer:
        self._check_alive()
        call_id = next(self._counter)
        call = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(call_id))
            result = await asyncio.wait_for(call, timeout)
        except TimeoutError:
            raise TimeoutError(f"the engine did not answer within {timeout:g} s") from None
        finally:
            del self._calls[call_id]
        assert isinstance(result, answer)
        return result

    def _send(self, message: messages.ToEngine) -> None:
        """Queue a message, in order. Never blocks: admission bounds how many there can be."""
        if self._error is None:
            self._socket.send(messages.encode(message))
