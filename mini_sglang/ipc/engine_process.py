"""The engine's own process: `python -m mini_sglang.ipc.engine_process ADDRESS PARENT_PID`, settings as JSON on stdin.

It connects one ZeroMQ socket to the API process, loads the engine and turns messages into engine calls until it is told
to leave. It never outlives its parent. It knows no text, no HTTP and no request beyond its messages.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from typing import TYPE_CHECKING

import msgspec
import zmq

from mini_sglang.child_process import die_with_parent, leave_signals_to_parent
from mini_sglang.collector import no_collections
from mini_sglang.config import EngineConfig
from mini_sglang.errors import FieldError
from mini_sglang.ipc import messages
from mini_sglang.ipc.kv_events import KVEventPublisher, PublishingSocket
from mini_sglang.observability.cache_events import CacheEvents

if TYPE_CHECKING:  # it takes seconds to import
    from mini_sglang.engine import Engine

logger = logging.getLogger(__name__)

_PARENT_CHECK_MS = 500
_STEP_MS = {"cpu": 200, "cuda": 40}  # by device: on a CPU decodes alone may take more than 40
_LINGER_MS = 1000  # time for the last message to leave when the process ends


def main(address: str, parent_pid: int) -> int:
    """Serve one engine until `Shutdown`, the parent's end or a fatal error; returns the exit status."""
    die_with_parent()
    leave_signals_to_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s engine: %(message)s")
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.linger = _LINGER_MS
    socket.connect(address)
    publisher: KVEventPublisher | None = None
    try:
        try:
            cache_events = None if config.kv_events_endpoint is None else CacheEvents()
            if cache_events is not None:  # first of all: whether an address is taken is known at once
                publisher = KVEventPublisher(context, config, cache_events)
                config = publisher.config
            engine = _imported()(_with_bounded_steps(config), cache_listener=cache_events)
        except (ValueError, OSError) as error:  # a setting or a file is wrong: the message says all
            socket.send(messages.encode(messages.Fatal(str(error), is_setting=True)))
            return 1
        socket.send(messages.encode(messages.Ready(engine_info(engine))))
        gc.collect()
        gc.freeze()  # modules and graphs stay: a full collection that looks at them delays a step by 0.1 s
        EngineLoop(engine, PublishingSocket(socket, publisher) if publisher else socket, parent_pid).run()
        engine.close()
        return 0
    except Exception as error:  # the parent must learn why, whatever it was
        logger.exception("the engine stopped")
        socket.send(messages.encode(messages.Fatal(f"{type(error).__name__}: {error}")))
        return 1
    finally:
        if publisher is not None:
            publisher.close()
        socket.close()
        context.term()


def _imported() -> type[Engine]:
    """Import the engine: not earlier, since it takes seconds in which the parent may end or a signal may come."""
    with no_collections():
        from mini_sglang.engine import Engine

    return Engine


def _with_bounded_steps(config: EngineConfig) -> EngineConfig:
    """`config` with a bound for the time of a step, if it leaves that open: people read along."""
    if config.max_step_ms is not None:
        return config
    from mini_sglang.execution.resolve import device_of  # it takes seconds to import

    return config.replace(max_step_ms=_STEP_MS[device_of(config)])


class EngineLoop:
    """Messages in, steps, outputs out. Blocks only while the engine has nothing to do."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes] | PublishingSocket, parent_pid: int) -> None:
        self._engine = engine
        self._socket = socket
        self._parent_pid = parent_pid
        self._is_checked = True  # nothing has run since the accounts were last looked at

    def run(self) -> None:
        """Serve until `Shutdown` or until the parent is gone."""
        while self._receive():
            outputs = self._engine.step()
            if outputs:
                self._send(messages.Outputs(outputs))

    def _receive(self) -> bool:
        """Handle all messages that have arrived, waiting for one while idle. False when it is time to leave."""
        while True:
            busy = self._engine.has_work
            if not self._socket.poll(0 if busy else _PARENT_CHECK_MS):
                if os.getppid() != self._parent_pid:
                    logger.warning("the parent process is gone, leaving")
                    return False
                if busy:
                    self._is_checked = False
                    return True
                self._engine.check_workers()
                self._check_accounts()
                continue
            message = messages.decode_to_engine(self._socket.recv())
            if isinstance(message, messages.Shutdown):
                return False
            self._handle(message)

    def _check_accounts(self) -> None:
        """While idle, once after work. A lost or doubly held page would corrupt answers unseen: better to stop."""
        if not self._is_checked:
            self._engine.check()
            self._is_checked = True

    def _handle(self, message: messages.ToEngine) -> None:
        match message:
            case messages.AddRequest():
                self._add(message)
            case messages.AbortRequest(request_id, reason):
                self._engine.abort(request_id, reason)
            case messages.Ping(call_id):
                self._send(messages.Pong(call_id))
            case messages.GetStats(call_id):
                self._send(messages.Stats(call_id, self._engine.stats()))
            case messages.FlushCache(call_id):
                self._send(messages.CacheFlushed(call_id, self._engine.flush_cache()))
            case messages.StartTrace() | messages.StopTrace():
                self._send(self._trace(message))

    def _add(self, message: messages.AddRequest) -> None:
        try:
            self._engine.add_request(
                message.request_id,
                message.prompt_ids,
                message.params,
                cache_salt=message.cache_salt,
                priority=message.priority,
                client=message.client,
            )
        except FieldError as error:  # this request is wrong; the others go on
            self._send(messages.RequestRejected(message.request_id, error.field, error.problem, list(error.others)))

    def _trace(self, message: messages.StartTrace | messages.StopTrace) -> messages.Trace:
        try:
            if isinstance(message, messages.StopTrace):
                return messages.Trace(message.call_id, path=self._engine.stop_trace())
            self._engine.start_trace(message.num_steps)
            return messages.Trace(message.call_id)
        except (ValueError, OSError) as error:
            return messages.Trace(message.call_id, error=str(error))

    def _send(self, message: messages.FromEngine) -> None:
        # Blocks at the socket's high-water mark: an API process that cannot follow slows the engine, not fills memory.
        self._socket.send(messages.encode(message))


def engine_info(engine: Engine) -> messages.EngineInfo:
    """What the API process needs to know of a loaded engine."""
    config, model = engine.config, engine.model_config
    return messages.EngineInfo(
        model=config.model,
        dtype=config.dtype,
        device=config.device,
        vocab_size=model.vocab_size,
        context_length=config.context_length,
        page_size=config.page_size,
        num_pages=config.num_pages,
        max_prompt_tokens=min(config.context_length - 1, config.num_pages * config.page_size),
        max_running_requests=config.max_running_requests,
        eos_token_ids=sorted(model.eos_token_ids),
        pid=os.getpid(),
        config=config,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
