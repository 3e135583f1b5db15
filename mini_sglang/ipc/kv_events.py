"""Publishes the prefix cache's events on ZeroMQ sockets, as vLLM does, and sends again what a subscriber has missed.

A message is (topic, sequence number, batch): the number, 8 bytes big-endian, counts from 0; the batch is msgpack. It
knows no request, and no cache but by its events. It has no thread: the engine's loop does it between steps.
"""

from __future__ import annotations

import logging
import time
from collections import deque

import msgspec
import zmq

from mini_sglang.config import EngineConfig
from mini_sglang.observability.cache_events import CacheEvent, CacheEvents

logger = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)  # the number of the message that ends a replay
_MOST_RECEIVED = 4096  # bytes; subscriptions and replay requests are short


class EventBatch(msgspec.Struct, array_like=True):
    """The events of one step, in order."""

    ts: float  # Unix time
    events: list[CacheEvent]
    data_parallel_rank: int = 0


class KVEventPublisher:
    """A PUB socket for events, and a ROUTER socket that replays them if the configuration has an address for one.

    Subscribers ask for a replay with ("", the first number wanted). It is answered by a message ("", topic, number,
    batch) for each batch from there on, and ("", "", -1, "") at the end. The last `kv_events_buffer_steps` batches are
    kept. Where older ones are asked for, one batch with the last number stands for all: it clears the cache, and stores
    what is cached now.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: EngineConfig, events: CacheEvents) -> None:
        """Raises ValueError if a socket cannot be bound."""
        self._events = events
        self._topic = (config.kv_events_topic or "").encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._buffer: deque[bytes] = deque(maxlen=config.kv_events_buffer_steps)  # the latest batches
        self._num_batches = 0
        self._sockets: list[zmq.Socket[bytes]] = []
        self.replay: zmq.Socket[bytes] | None = None  # has a message when there is something to `answer`
        self.config = config  # with the addresses that the sockets have got
        try:
            self._pub = self._bound(context, zmq.PUB, "kv_events_endpoint")
            if config.kv_events_replay_endpoint is not None:
                self.replay = self._bound(context, zmq.ROUTER, "kv_events_replay_endpoint")
        except BaseException:
            self.close()
            raise

    def _bound(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, field: str) -> zmq.Socket[bytes]:
        endpoint = getattr(self.config, field)
        socket = context.socket(kind)
        self._sockets.append(socket)
        socket.linger = 0
        socket.maxmsgsize = _MOST_RECEIVED
        socket.sndhwm = self.config.kv_events_buffer_steps + 2  # a whole replay; who reads slower misses batches
        socket.ipv6 = "[" in endpoint
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"{field} {endpoint!r} cannot be bound: {error}") from error
        self.config = self.config.replace(**{field: socket.getsockopt_string(zmq.LAST_ENDPOINT)})
        logger.info("%s is %s", field, getattr(self.config, field))
        return socket

    def publish(self) -> None:
        """Send what has happened since the last call, if anything has."""
        events = self._events.take()
        if events:
            batch = self._encode(EventBatch(time.time(), events))
            self._pub.send_multipart((self._topic, self._number(self._num_batches), batch))
            self._buffer.append(batch)
            self._num_batches += 1

    def answer(self) -> None:
        """Answer the replay request that has come. Nothing may have happened since `publish`."""
        assert self.replay is not None
        sender, *request = self.replay.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            logger.warning("a replay request is an empty frame and a number of 8 bytes; got %d frames", len(request))
            return
        for number, batch in self._missed(int.from_bytes(request[1], "big")):
            self.replay.send_multipart((sender, b"", self._topic, self._number(number), batch))
        self.replay.send_multipart((sender, b"", b"", _END, b""))

    def _missed(self, start: int) -> list[tuple[int, bytes]]:
        """Batches with their numbers that bring a subscriber up to date that has all before number `start`."""
        first = self._num_batches - len(self._buffer)
        if start < first:
            return [(self._num_batches - 1, self._encode(EventBatch(time.time(), self._events.snapshot())))]
        return [(number, batch) for number, batch in enumerate(self._buffer, first) if number >= start]

    def _number(self, number: int) -> bytes:
        return number.to_bytes(8, "big")

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()


class PublishingSocket:
    """The engine's socket. Each look for a message, of which there is one between two steps, first publishes events."""

    def __init__(self, socket: zmq.Socket[bytes], publisher: KVEventPublisher) -> None:
        self.recv, self.send = socket.recv, socket.send
        self._socket = socket
        self._publisher = publisher
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if publisher.replay is not None:
            self._poller.register(publisher.replay, zmq.POLLIN)

    def poll(self, timeout_ms: int) -> bool:
        """Whether a message has come, or comes within the timeout. A replay request may end the wait."""
        self._publisher.publish()
        arrived = dict(self._poller.poll(timeout_ms))
        if self._publisher.replay in arrived:
            self._publisher.answer()
        return self._socket in arrived
