"""The cache's events say which blocks are cached: all of them, nothing else, in every order of things."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from mini_sglang.observability.cache_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    CacheEvents,
    chain_hashes,
    hash_salt,
)
from mini_sglang.scheduling.kv_cache import KVCacheManager
from tests import vllm_events
from tests.scheduling.conftest import stateful as stateful
from tests.scheduling.test_kv_cache import ManagerMachine, request, start
from tests.scheduling.test_scheduler_properties import FailingSchedulerMachine
from tests.vllm_events import Follower, cached_prefixes

UNSALTED = hash_salt(b"")
LITERAL = [8045764920826975884, 7576750733461189936]  # computed by hand, with hashlib alone
decode_event = msgspec.msgpack.Decoder(
    vllm_events.BlockStored | vllm_events.BlockRemoved | vllm_events.AllBlocksCleared
).decode


def listened(num_pages: int = 16, page_size: int = 2) -> tuple[KVCacheManager, CacheEvents]:
    """A cache, and what it says from here on."""
    events = CacheEvents()
    kv = KVCacheManager(num_pages, page_size, listener=events)
    assert events.take() == [AllBlocksCleared()]
    return kv, events


def hashes_of(tokens: list[int], parent: int = UNSALTED) -> list[int]:
    """Of blocks of two tokens."""
    return chain_hashes(parent, array("i", tokens).tobytes(), 8)


def stored(
    hashes: list[int], parent: int | None, tokens: list[int], keys: list[tuple[str] | None] | None = None
) -> BlockStored:
    return BlockStored(hashes, parent, tokens, len(tokens) // len(hashes), None, "GPU", None, keys)


def follow(follower: Follower, events: Iterable[CacheEvent]) -> None:
    for event in events:
        follower.apply(decode_event(msgspec.msgpack.encode(event)))


def test_a_prompt_is_stored_as_a_chain_of_its_whole_pages() -> None:
    kv, events = listened()
    start(kv, [1, 2, 3, 4, 5])
    chain = hashes_of([1, 2, 3, 4])
    assert events.take() == [stored(chain, None, [1, 2, 3, 4])]
    assert events.take() == []


def test_a_continuation_names_its_parent_and_only_what_is_new() -> None:
    kv, events = listened()
    kv.release(start(kv, [1, 2, 3, 4, 5]))
    start(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    first, second, third, fourth = hashes_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert events.take() == [stored([first, second], None, [1, 2, 3, 4]), stored([third, fourth], second, [5, 6, 7, 8])]
    start(kv, [1, 2, 9, 9])
    [event] = events.take()
    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, event.token_ids) == (first, [9, 9])


def test_what_is_computed_twice_is_stored_once() -> None:
    kv, events = listened()
    one, two = request([1, 2, 3]), request([1, 2, 4])
    for each in (one, two):
        assert kv.admit(each, kv.match(each), 3)
        each.slot, each.num_computed_tokens = int(each.request_id), 3
    kv.commit(one, step=1, tail=True)
    assert len(events.take()) == 1
    kv.commit(two, step=1, tail=True)
    kv.steps_read(1)
    kv.release(two)
    assert events.take() == []
    kv.check()


def test_salted_prompts_have_other_hashes_and_say_their_salt() -> None:
    kv, events = listened()
    for salt in ("", "a", "\ud800"):
        new = request([1, 2, 3, 4], salt)
        assert kv.admit(new, kv.match(new), 4)
        new.slot, new.num_computed_tokens = int(new.request_id), 4
        kv.commit(new, step=1)
    plain, salted, broken = events.take()
    assert isinstance(plain, BlockStored)
    assert isinstance(salted, BlockStored)
    assert isinstance(broken, BlockStored)
    assert (plain.extra_keys, salted.extra_keys) == (None, [("a",), None])
    assert salted.parent_block_hash is None
    assert len({*plain.block_hashes, *salted.block_hashes, *broken.block_hashes}) == 6
    assert msgspec.msgpack.encode(broken)  # which a lone surrogate would not let be


def test_evicted_pages_are_removed_and_tails_are_no_blocks() -> None:
    kv, events = listened()
    kv.release(start(kv, [1, 2, 3, 4, 5]))
    chain = hashes_of([1, 2, 3, 4])
    events.take()
    kv.evict(1)  # the tail
    assert events.take() == []
    kv.evict(1)
    assert events.take() == [BlockRemoved([chain[1]], "GPU")]
    assert events.block_hashes == {chain[0]}


def test_a_flush_clears_all_unless_a_request_runs() -> None:
    kv, events = listened()
    kv.release(start(kv, [1, 2, 3, 4]))
    running = start(kv, [1, 2, 5, 6])
    chain = hashes_of([1, 2, 3, 4])
    events.take()
    assert kv.flush() == 1
    assert events.take() == [BlockRemoved([chain[1]], "GPU")]
    kv.release(running)
    assert kv.flush() == 2
    assert events.take() == [AllBlocksCleared()]
    assert events.block_hashes == set()


def test_pages_of_a_failed_step_are_removed() -> None:
    kv, events = listened()
    running = start(kv, [1, 2, 3, 4, 5, 6])
    events.take()
    kv.invalidate(running, 2)
    assert events.take() == [BlockRemoved(hashes_of([1, 2, 3, 4, 5, 6])[1:], "GPU")]
    kv.release(running)
    assert events.take() == []


def test_a_cache_that_begins_anew_says_so() -> None:
    kv, events = listened()
    start(kv, [1, 2, 3, 4])
    KVCacheManager(16, 2, listener=events)
    assert events.take() == [AllBlocksCleared()]
    assert events.block_hashes == set()


def test_a_cache_without_reuse_stores_nothing() -> None:
    events = CacheEvents()
    kv = KVCacheManager(8, 2, reuse=False, listener=events)
    kv.release(start(kv, [1, 2, 3, 4]))
    assert events.take() == [AllBlocksCleared()]


def test_check_finds_events_that_are_not_the_caches() -> None:
    kv, events = listened()
    running = start(kv, [1, 2, 3, 4])
    events.removed([running.page_ids[1]])
    with pytest.raises(RuntimeError, match=rf"disagree on the pages \[{running.page_ids[1]}\]"):
        kv.check()


def test_a_snapshot_joins_what_continues_and_comes_parents_first() -> None:
    kv, events = listened()
    kv.release(start(kv, [1, 2, 3, 4]))
    start(kv, [1, 2, 3, 4, 5, 6, 7])
    start(kv, [1, 2, 9, 9])
    first, second, third = hashes_of([1, 2, 3, 4, 5, 6])
    [fourth] = hashes_of([9, 9], first)
    assert events.snapshot() == [
        AllBlocksCleared(),
        stored([first, second, third], None, [1, 2, 3, 4, 5, 6]),
        stored([fourth], first, [9, 9]),
    ]
    assert events.block_hashes == {first, second, third, fourth}


def test_hashes_are_those_of_every_process() -> None:
    assert hashes_of([1, 2, 3, 4], hash_salt(b"salt")) == LITERAL
    program = (
        "from mini_sglang.observability.cache_events import *; "
        "print(chain_hashes(hash_salt(b'salt'), array('i', [1, 2, 3, 4]).tobytes(), 8))"
    )
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        output = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        assert output.stdout.decode().strip() == str(LITERAL)


class FollowedCacheMachine(ManagerMachine):
    """Events are taken now and then. Whoever follows them, or comes late to a snapshot, knows what is cached."""

    @invariant()
    def follows(self) -> None:
        if hasattr(self, "kv") and not hasattr(self, "events"):
            self.events, self.follower = CacheEvents(), Follower()
            self.kv = KVCacheManager(self.kv.num_pages, self.kv.page_size, reuse=self.kv.reuse, listener=self.events)

    @rule()
    def compare(self) -> None:
        follow(self.follower, self.events.take())
        late = Follower()
        follow(late, self.events.snapshot())
        assert self.follower.prefixes == late.prefixes == cached_prefixes(self.kv)
        assert self.follower.blocks.keys() == self.events.block_hashes

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from(["a", "b"]))
    def admit_salted(self, tokens: list[int], salt: str) -> None:
        new = request(tokens, salt)
        if self.kv.admit(new, self.kv.match(new), len(tokens)):
            new.slot, new.num_computed_tokens = int(new.request_id), len(tokens)
            self.active.append(new)
            self.kv.take_changes()
            self.kv.commit(new, self.step, tail=True)
        else:
            self.kv.forget(new)

    @rule()
    def flush(self) -> None:
        self.kv.flush()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "events"):
            self.compare()
            assert not self.follower.blocks


class FollowedSchedulerMachine(FailingSchedulerMachine):
    """The same of a whole scheduler: with preemptions, equal prompts at once, aborts, flushes and failing steps."""

    @invariant()
    def follows(self) -> None:
        if not hasattr(self, "simulation"):
            return
        kv = self.simulation.scheduler.kv
        if not hasattr(self, "events"):
            self.events, self.follower = CacheEvents(), Follower()
            self.events.cleared()
            kv._listener = self.events
        follow(self.follower, self.events.take())
        assert self.follower.prefixes == cached_prefixes(kv)


def test_any_history_of_the_cache_can_be_followed(stateful: settings) -> None:
    run_state_machine_as_test(FollowedCacheMachine, settings=stateful)


def test_any_history_of_the_scheduler_can_be_followed(stateful: settings) -> None:
    run_state_machine_as_test(FollowedSchedulerMachine, settings=stateful)
