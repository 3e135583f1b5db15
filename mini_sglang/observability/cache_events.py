"""Which blocks enter and leave the prefix cache, as events in vLLM's format, for routers that follow a worker's cache.

A block is a whole page. Its hash is over its tokens and the hash of the block before it, or the cache salt in the first
block, and over nothing of the process: equal prefixes have equal hashes on every worker. It knows neither requests nor
sockets, and keeps of each cached block what it takes to say it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

import msgspec

_HASH_BYTES = 8
_MEDIUM = "GPU"  # vLLM's word for the memory that the model computes in, also on a CPU


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks, each the continuation of the one before, that can be found from now on."""

    block_hashes: list[int]  # unsigned, 64 bits
    parent_block_hash: int | None  # of the block before the first; None: a prompt begins here
    token_ids: list[int]  # block_size for each block
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[tuple[str] | None] | None = None  # for each block; (cache_salt,) for the first of a salted prompt


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that can no longer be found."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """There are no blocks now."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class _Block:
    hash: int
    parent: int | None
    tokens: array[int]
    salt: str  # of the first block of a prompt; "" in the others


class CacheEvents:
    """Listens to a `KVCacheManager` (it is a `CacheListener`), and collects events until they are taken."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}  # by page; a block comes after its parent
        self._events: list[CacheEvent] = []

    def stored(self, salt: bytes, parent_page: int | None, tokens: array[int], page_ids: list[int]) -> None:
        """Note new pages with `tokens`, which continue a cached page or begin a prompt with this salt."""
        size = len(tokens) // len(page_ids)
        parent, word = None, salt.decode("utf-8", "replace")
        start = hash_salt(salt)
        if parent_page is not None:
            start = parent = self._blocks[parent_page].hash
            word = ""
        blocks = []
        for index, block_hash in enumerate(chain_hashes(start, tokens, size)):
            blocks.append(_Block(block_hash, parent, tokens[index * size : (index + 1) * size], word))
            parent, word = block_hash, ""
        self._blocks.update(zip(page_ids, blocks, strict=True))
        self._events += _stored_events(blocks)

    def removed(self, page_ids: list[int]) -> None:
        """Note that pages have left the cache. A page that was never whole was never noted, and is passed over."""
        hashes = [self._blocks.pop(page).hash for page in page_ids if page in self._blocks]
        if hashes:
            self._events.append(BlockRemoved(hashes, _MEDIUM))

    def cleared(self) -> None:
        """Note that the cache is empty, as it is at the beginning. What was collected before says nothing then."""
        self._blocks.clear()
        self._events = [AllBlocksCleared()]

    def check(self, page_ids: set[int]) -> None:
        """Raise RuntimeError unless exactly these whole pages are cached."""
        if self._blocks.keys() != page_ids:
            wrong = sorted(self._blocks.keys() ^ page_ids)
            raise RuntimeError(f"the cache events and the cache disagree on the pages {wrong[:8]}")

    def take(self) -> list[CacheEvent]:
        """Return what was collected since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[CacheEvent]:
        """Return events that lead to the present state from any other. O(blocks)"""
        return [AllBlocksCleared(), *_stored_events(self._blocks.values())]

    @property
    def block_hashes(self) -> set[int]:
        """Of the blocks that are cached."""
        return {block.hash for block in self._blocks.values()}


def _stored_events(blocks: Iterable[_Block]) -> list[CacheEvent]:
    """One event for each run of blocks that continue each other."""
    events: list[CacheEvent] = []
    last: BlockStored | None = None
    for block in blocks:
        if last is None or block.parent != last.block_hashes[-1]:
            keys: list[tuple[str] | None] | None = [(block.salt,)] if block.salt else None
            last = BlockStored([], block.parent, [], len(block.tokens), None, _MEDIUM, None, keys)
            events.append(last)
        elif last.extra_keys is not None:
            last.extra_keys.append(None)
        last.block_hashes.append(block.hash)
        last.token_ids.extend(block.tokens)
    return events


def hash_salt(salt: bytes) -> int:
    """The hash that stands before the first block of prompts with this salt."""
    return int.from_bytes(sha256(salt).digest()[-_HASH_BYTES:], "big")


def chain_hashes(parent: int, tokens: array[int], block_size: int) -> list[int]:
    """The hashes of the blocks of `tokens` that are whole: of each, SHA-256's last 64 bits, over parent and tokens.

    The parent's hash counts as 8 bytes, big-endian, and a token as 4, little-endian as on all machines that run this.
    """
    data, width = tokens.tobytes(), block_size * tokens.itemsize
    chain, hashes = parent.to_bytes(_HASH_BYTES, "big"), []
    for start in range(0, len(data) - width + 1, width):
        chain = sha256(chain + data[start : start + width]).digest()[-_HASH_BYTES:]
        hashes.append(int.from_bytes(chain, "big"))
    return hashes
