"""Which blocks enter and leave the prefix cache, as events in vLLM's format, for routers that follow a worker's cache.

A block is a whole page. Its hash is over its tokens and the hash of the block before it, or the cache salt in the first
block, and over nothing of the process: equal prefixes have equal hashes on every worker. It knows neither requests nor
sockets, and keeps of each cached block what it takes to say it again.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

import msgspec

_HASH_BYTES = 8
_MEDIUM = "GPU"  # vLLM's word for the memory that the model computes in, also on a CPU


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks, each the continuation of the one before, that can be found from now on."""

    block_hashes: list[int]  # unsigned, 64 bits
    parent_block_hash: int | None  # of the block before the first; None: a prompt begins here
    token_ids: list[int]  # block_size for each block
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[tuple[str] | None] | None = None  # for each block; (cache_salt,) for the first of a salted prompt


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks that can no longer be found."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """There are no blocks now."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Block(msgspec.Struct, gc=False):  # there are many, and the collector need not look at them
    hash: int
    parent: int | None
    tokens: bytes  # 4 each
    salt: bytes  # of the first block of a prompt; empty in the others


class CacheEvents:
    """Listens to a `KVCacheManager` (it is a `CacheListener`), and collects events until they are taken."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}  # by page; a block comes after its parent
        self._events: list[CacheEvent] = []

    def stored(self, salt: bytes, parent_page: int | None, tokens: array[int], page_ids: list[int]) -> None:
        """Note new pages with `tokens`, which continue a cached page or begin a prompt with this salt."""
        size, data = len(tokens) // len(page_ids), tokens.tobytes()
        width = size * tokens.itemsize
        if parent_page is None:
            parent, chain = None, hash_salt(salt)
        else:
            parent = chain = self._blocks[parent_page].hash
            salt = b""
        hashes = chain_hashes(chain, data, width)
        self._events.append(_stored(hashes, parent, tokens.tolist(), size, salt))
        for index, (page, block_hash) in enumerate(zip(page_ids, hashes, strict=True)):
            self._blocks[page] = _Block(block_hash, parent, data[index * width : (index + 1) * width], salt)
            parent, salt = block_hash, b""

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
        """Return events that lead to the present state from any other: one for each run of blocks. O(blocks)"""
        events: list[CacheEvent] = [AllBlocksCleared()]
        run: list[_Block] = []
        for block in self._blocks.values():
            if run and block.parent != run[-1].hash:
                events.append(_stored_run(run))
                run = []
            run.append(block)
        return [*events, _stored_run(run)] if run else events

    @property
    def block_hashes(self) -> set[int]:
        """Of the blocks that are cached."""
        return {block.hash for block in self._blocks.values()}


def _stored_run(run: list[_Block]) -> BlockStored:
    first, tokens = run[0], array("i", b"".join([block.tokens for block in run]))
    return _stored([block.hash for block in run], first.parent, tokens.tolist(), len(tokens) // len(run), first.salt)


def _stored(hashes: list[int], parent: int | None, tokens: list[int], block_size: int, salt: bytes) -> BlockStored:
    keys: list[tuple[str] | None] | None = None
    if salt:
        keys = [(salt.decode("utf-8", "replace"),), *[None] * (len(hashes) - 1)]
    return BlockStored(hashes, parent, tokens, block_size, None, _MEDIUM, None, keys)


def hash_salt(salt: bytes) -> int:
    """The hash that stands before the first block of prompts with this salt."""
    return int.from_bytes(sha256(salt).digest()[-_HASH_BYTES:], "big")


def chain_hashes(parent: int, tokens: bytes, width: int) -> list[int]:
    """The hashes of blocks of `width` bytes: of each, SHA-256's last 64 bits, over the hash before it and its tokens.

    That hash counts as 8 bytes, big-endian, and a token as 4, little-endian as on all machines that run this.
    """
    chain, hashes = parent.to_bytes(_HASH_BYTES, "big"), []
    for start in range(0, len(tokens), width):
        chain = sha256(chain + tokens[start : start + width]).digest()[-_HASH_BYTES:]
        hashes.append(int.from_bytes(chain, "big"))
    return hashes
