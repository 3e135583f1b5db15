"""Which replica of several gets a request: in turn, the least loaded, or the one that has its beginning in the cache.

A policy is told the prompt and how many requests each replica has under way, and names a replica. Replicas are whatever
can be a key of a dict; they may come and go between two calls. Imports nothing of this package, knows no clock and no
network: the simulator and a router in front of real servers use the same classes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Replica = Any  # whatever can be a key of a dict
Prompt = Sequence[int] | str  # token ids, or text
Loads = Mapping[Replica, int]  # requests under way, of every replica that may be chosen; not empty

BLOCK = 64  # tokens or characters that a prefix is remembered in steps of
MOST_BLOCKS = 1 << 18  # that are remembered; about 200 bytes each
LEAST_SHARE = 0.25  # of a prompt that a replica must have seen to be preferred
MOST_LOAD = 1.25  # times the mean, of a replica that is preferred for what it has seen
FREE_LOAD = 4  # requests that such a replica may have whatever the mean is
BRANCHES = 4  # ways on that a beginning may have for each replica that has seen it, before another one is to see it too


class RoutingPolicy(Protocol):
    """Chooses replicas."""

    def choose(self, prompt: Prompt, loads: Loads) -> Replica:
        """One of the keys of `loads`, to which the caller then sends the request. Raises ValueError if it is empty."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, prompt: Prompt, loads: Loads) -> Replica:
        replicas = _some(loads)
        self._num_chosen += 1
        return replicas[(self._num_chosen - 1) % len(replicas)]


class LeastLoaded:
    """The one with the fewest requests under way; among equals, the one that has got the fewest so far."""

    def __init__(self) -> None:
        self._num_sent: dict[Replica, int] = {}

    def choose(self, prompt: Prompt, loads: Loads) -> Replica:
        return self.choose_among(_some(loads), loads)

    def choose_among(self, replicas: Sequence[Replica], loads: Loads) -> Replica:
        """The least loaded of some of the replicas."""
        sent = self._num_sent
        if len(sent) != len(loads) or sent.keys() != loads.keys():
            least = min((sent[replica] for replica in loads if replica in sent), default=0)
            # a new one begins where the others stand, else it would win every tie until it has caught up
            sent = self._num_sent = {replica: sent.get(replica, least) for replica in loads}
        chosen = min(replicas, key=lambda replica: (loads[replica], sent[replica]))
        sent[chosen] += 1
        return chosen


class PrefixAffinity:
    """The one that has got most of the prompt's beginning before, unless that would overload it.

    A prompt of which no replica has seen `LEAST_SHARE` goes to the least loaded. A replica is preferred only while it
    has at most `MOST_LOAD` times the mean load (or `FREE_LOAD` requests); beyond that the next best is, and then the
    least loaded, which has seen the beginning from then on: so a hot prefix spreads. Bounding loads by a multiple of
    their mean follows Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018).

    So does a beginning that many prompts share, as a system prompt, even where there is little load: with each
    `BRANCHES` ways in which prompts go on from it, one more replica gets it, or else all would come to the first.

    What replicas have seen is a tree of prefixes in blocks: each block is known by a hash of it and of all before it.
    The blocks used least recently are forgotten, the ends of a prefix before its beginning.
    """

    def __init__(self, block: int = BLOCK, most_blocks: int = MOST_BLOCKS) -> None:
        if block < 1 or most_blocks < 1:
            raise ValueError(f"block and most_blocks must be at least 1, got {block} and {most_blocks}")
        self._block = block
        self._most_blocks = most_blocks
        self._seen: OrderedDict[int, _Seen] = OrderedDict()  # by hash of a prefix, the latest used last
        self._least_loaded = LeastLoaded()

    @property
    def num_blocks(self) -> int:
        """How many blocks are remembered."""
        return len(self._seen)

    def choose(self, prompt: Prompt, loads: Loads) -> Replica:
        replicas = _some(loads)
        hashes = self._hashes(prompt)
        depths = self._depths(hashes, loads)
        most = max(FREE_LOAD, math.ceil(MOST_LOAD * (sum(loads.values()) + 1) / len(loads)))
        allowed = {replica: depth for replica, depth in depths.items() if loads[replica] < most}
        deepest = max(allowed.values(), default=0)
        if deepest and deepest * self._block >= LEAST_SHARE * len(prompt):
            last = self._seen[hashes[deepest - 1]]
            if last.num_branches < BRANCHES * len(last.replicas):
                replicas = [replica for replica, depth in allowed.items() if depth == deepest]
        chosen = self._least_loaded.choose_among(replicas, loads)
        self._remember(hashes, chosen)
        return chosen

    def forget(self, replica: Replica) -> None:
        """Forget what a replica has seen: it has left, or its cache was emptied."""
        for key in [key for key, seen in self._seen.items() if replica in seen.replicas]:
            seen = self._seen[key]
            seen.replicas.discard(replica)
            if not seen.replicas:
                self._drop(key)

    def _hashes(self, prompt: Prompt) -> list[int]:
        """One for each whole block: of the prompt up to its end."""
        size, value, hashes = self._block, 0, []
        for start in range(0, len(prompt) - size + 1, size):
            part = prompt[start : start + size]
            value = hash((value, part if isinstance(part, str) else tuple(part)))
            hashes.append(value)
        return hashes

    def _depths(self, hashes: Sequence[int], loads: Loads) -> dict[Replica, int]:
        """How many leading blocks each replica has seen, of those that have seen any."""
        depths: dict[Replica, int] = {}
        for depth, key in enumerate(hashes, 1):
            seen = self._seen.get(key)
            if seen is None:
                break
            for replica in seen.replicas:
                if depths.get(replica, 0) == depth - 1 and replica in loads:
                    depths[replica] = depth
        return depths

    def _remember(self, hashes: Sequence[int], replica: Replica) -> None:
        blocks = self._seen
        before: _Seen | None = None
        for key in hashes:
            seen = blocks.get(key)
            if seen is None:
                seen = blocks[key] = _Seen(before)
                if before is not None:
                    before.num_branches += 1
            seen.replicas.add(replica)
            before = seen
        for key in reversed(hashes):  # a beginning is used after what follows it, so it is forgotten later
            blocks.move_to_end(key)
        while len(blocks) > self._most_blocks:
            self._drop(next(iter(blocks)))

    def _drop(self, key: int) -> None:
        before = self._seen.pop(key).before
        if before is not None:
            before.num_branches -= 1


@dataclass(slots=True)
class _Seen:
    """A block, with all that is before it."""

    before: _Seen | None  # the block before it
    replicas: set[Replica] = field(default_factory=set)
    num_branches: int = 0  # different blocks that follow it


def _some(loads: Loads) -> Sequence[Replica]:
    if not loads:
        raise ValueError("there is no replica to choose")
    return list(loads)


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix": PrefixAffinity,
}
