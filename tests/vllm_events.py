"""A router's side of KV events: vLLM's message types, and the blocks that a worker's events say it has cached.

The types are declared as vLLM 0.26 to 0.29 declare them in vllm/distributed/kv_events.py: batches are arrays, and since
https://github.com/vllm-project/vllm/pull/42892 events are maps with their name under "type". A replay has had the topic
in front of the number since https://github.com/vllm-project/vllm/pull/45177.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from mini_sglang.scheduling.kv_cache import KVCacheManager

BlockHash = bytes | int
Prefix = tuple[str, tuple[int, ...]]  # cache salt, tokens up to the end of a block


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Follower:
    """What a worker has cached, by its events. Raises AssertionError if they make no sense."""

    def __init__(self) -> None:
        self.blocks: dict[BlockHash, Prefix] = {}
        self.num_removed = 0  # one by one

    def apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        match event:
            case AllBlocksCleared():
                self.blocks.clear()
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    del self.blocks[block_hash]
                self.num_removed += len(event.block_hashes)
            case BlockStored():
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, keys = event.block_size, event.extra_keys or [None] * len(event.block_hashes)
        assert len(event.token_ids) == size * len(event.block_hashes) > 0
        assert not any(keys[1:])
        salt: str = keys[0][0] if keys[0] else ""
        tokens: tuple[int, ...] = ()
        if event.parent_block_hash is not None:
            assert not any(keys)
            salt, tokens = self.blocks[event.parent_block_hash]
        for index, block_hash in enumerate(event.block_hashes):
            tokens += tuple(event.token_ids[index * size : (index + 1) * size])
            assert block_hash not in self.blocks
            self.blocks[block_hash] = (salt, tokens)

    @property
    def prefixes(self) -> set[Prefix]:
        assert len(set(self.blocks.values())) == len(self.blocks)
        return set(self.blocks.values())


def cached_prefixes(kv: KVCacheManager) -> set[Prefix]:
    """The ends of all whole pages that are cached, read from the tree."""
    kv.check()
    prefixes: set[Prefix] = set()
    ends: dict[object, Prefix] = {}
    for node in kv._tree.nodes():
        salt, tokens = (node.key.decode(), ()) if node.parent is None else ends[node.parent]
        whole = len(node.tokens) // kv.page_size * kv.page_size
        for end in range(kv.page_size, whole + 1, kv.page_size):
            prefixes.add((salt, tokens + tuple(node.tokens[:end])))
        ends[node] = (salt, tokens + tuple(node.tokens))
    return prefixes


class Subscriber:
    """Follows a worker from the moment it is made, and asks for what it has missed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], events: str, replay: str, topic: str = "") -> None:
        self.follower = Follower()
        self.last = -1  # number of the latest batch
        self.topic = topic.encode()
        self._events = context.socket(zmq.SUB)
        self._events.connect(events)
        self._events.subscribe(topic)
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(replay)

    def catch_up(self) -> int:
        """Ask for all batches after the latest, and take them in; returns how many came."""
        self.ask()
        return self.receive()

    def ask(self) -> None:
        self._replay.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))

    def receive(self) -> int:
        count = 0
        while True:
            assert self._replay.poll(30_000), "no answer to a replay request"
            delimiter, topic, number, payload = self._replay.recv_multipart()
            assert delimiter == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                return count
            self._take(topic, number, payload)
            count += 1

    def listen(self, timeout_ms: int = 0) -> int:
        """Take in the batches that have been published, those that were missed in between too; returns how many."""
        count = 0
        while self._events.poll(timeout_ms if not count else 0):
            topic, number, payload = self._events.recv_multipart()
            if int.from_bytes(number, "big") > self.last + 1:
                count += self.catch_up()
            if int.from_bytes(number, "big") > self.last:
                self._take(topic, number, payload)
                count += 1
        return count

    def _take(self, topic: bytes, number: bytes, payload: bytes) -> None:
        assert topic == self.topic
        batch = decode(payload)
        assert batch.data_parallel_rank == 0
        assert batch.ts > 1_700_000_000
        for event in batch.events:
            self.follower.apply(event)
        self.last = int.from_bytes(number, "big")

    def close(self) -> None:
        self._events.close(0)
        self._replay.close(0)
