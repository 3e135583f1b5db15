"""KVCacheManager: pages are shared to the token, move in one place only, and are all accounted for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import NewPages
from mini_sglang.scheduling.kv_cache import KVCacheManager

NAMES = (str(number) for number in itertools.count())


def request(tokens: list[int], salt: str = "") -> Request:
    return Request(request_id=next(NAMES), prompt_ids=tokens, params=SamplingParams(), cache_salt=salt)


def start(kv: KVCacheManager, tokens: list[int], *, step: int = 1) -> Request:
    """Admit a request and compute its whole prompt."""
    new = request(tokens)
    assert kv.admit(new, kv.match(new), len(tokens))
    new.slot = int(new.request_id)
    new.num_computed_tokens = len(tokens)
    kv.commit(new, step, tail=True)
    return new


def test_a_released_prompt_is_found_but_for_its_last_token() -> None:
    kv = KVCacheManager(num_pages=8, page_size=4)
    kv.release(start(kv, [1, 2, 3, 4, 5, 6, 7, 8]))
    match = kv.match(request([1, 2, 3, 4, 5, 6, 7, 8]))
    assert (match.num_tokens, len(match.page_ids), match.num_partial_tokens) == (7, 1, 3)


def test_a_match_inside_a_page_is_copied_to_a_fresh_page() -> None:
    kv = KVCacheManager(num_pages=8, page_size=4)
    first = start(kv, [1, 2, 3, 4, 5, 6])
    kv.take_changes()
    second = request([1, 2, 3, 4, 5, 9, 9])
    second.slot = 1
    assert kv.admit(second, kv.match(second), 7)
    assert second.num_computed_tokens == 5
    assert second.page_ids[0] == first.page_ids[0]
    assert second.page_ids[1] != first.page_ids[1]
    new_pages, copies = kv.take_changes()
    assert copies == [(first.page_ids[1], second.page_ids[1])]
    assert [(pages.slot, pages.first_index, pages.page_ids) for pages in new_pages] == [(1, 0, second.page_ids)]
    kv.check()


def test_a_page_computed_twice_is_exchanged_for_the_cached_one() -> None:
    kv = KVCacheManager(num_pages=8, page_size=2)
    one, two = request([1, 2, 3]), request([1, 2, 4])
    for each in (one, two):
        assert kv.admit(each, kv.match(each), 3)
        each.slot, each.num_computed_tokens = int(each.request_id), 3
    kv.take_changes()
    own = two.page_ids[0]
    kv.commit(one, step=1, tail=True)
    kv.commit(two, step=1, tail=True)
    assert two.page_ids[0] == one.page_ids[0]
    new_pages, _ = kv.take_changes()
    assert [(pages.slot, pages.first_index, pages.page_ids) for pages in new_pages] == [
        (two.slot, 0, [one.page_ids[0]])
    ]
    assert kv.num_free_pages == 4  # the own page is kept as long as step 1 may use it
    assert kv.num_returning_pages == 1
    kv.check()
    kv.steps_read(1)
    assert kv.num_free_pages == 5
    assert kv.num_returning_pages == 0
    assert own not in one.page_ids + two.page_ids
    kv.check()


def test_a_page_that_decoding_fills_can_be_found_at_once() -> None:
    kv = KVCacheManager(num_pages=8, page_size=2)
    running = start(kv, [1, 2, 3])
    running.output_ids.append(4)
    kv.commit(running, step=1)
    assert kv.match(request([1, 2, 3, 4, 5])).num_tokens == 3
    running.num_computed_tokens = 4
    running.output_ids.append(5)
    assert kv.reserve(running, 5)
    kv.commit(running, step=2)
    assert kv.match(request([1, 2, 3, 4, 5])).num_tokens == 4


def test_the_cached_tokens_of_a_waiting_request_are_those_of_the_tree_as_it_is() -> None:
    kv = KVCacheManager(num_pages=8, page_size=2)
    waiting = request([1, 2, 3, 4, 5, 6, 7, 8])
    assert kv.cached_tokens(waiting) == 0
    running = start(kv, [1, 2, 3, 4])
    assert kv.cached_tokens(waiting) == 4
    assert kv.reserve(running, 7)
    running.output_ids += [5, 6]
    running.num_computed_tokens = 6
    kv.commit(running, step=2)
    assert kv.cached_tokens(waiting) == 6
    running.output_ids.append(7)
    running.num_computed_tokens = 7
    kv.release(running)
    assert kv.cached_tokens(waiting) == 7
    kv.evict(1)
    assert kv.cached_tokens(waiting) == 6
    other = start(kv, [1, 2, 3, 4, 5, 6, 0])
    assert kv.cached_tokens(waiting) == 6
    kv.invalidate(other, 2)
    assert kv.cached_tokens(waiting) == 2


@pytest.mark.parametrize("longer", [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]])
def test_a_page_that_begins_with_a_shorter_one_takes_its_place(longer: list[int]) -> None:
    kv = KVCacheManager(num_pages=8, page_size=4)
    kv.release(start(kv, [1, 2]))
    kv.release(start(kv, longer))
    assert kv.num_cached_pages == kv.pages_for(len(longer))
    kv.check()


def test_pages_are_not_sent_for_a_request_without_a_slot() -> None:
    kv = KVCacheManager(num_pages=4, page_size=2)
    new = request([1, 2, 3])
    assert kv.admit(new, kv.match(new), 3)
    with pytest.raises(RuntimeError, match=f"request {new.request_id} has pages but no slot"):
        kv.take_changes()


def test_a_page_table_can_be_sent_again() -> None:
    kv = KVCacheManager(num_pages=4, page_size=2)
    running = start(kv, [1, 2, 3])
    assert running.slot is not None
    kv.take_changes()
    assert kv.take_changes() == ([], [])
    kv.resend_page_table(running)
    assert kv.take_changes()[0] == [NewPages(running.slot, 0, running.page_ids)]


def test_what_does_not_fit_changes_nothing() -> None:
    kv = KVCacheManager(num_pages=4, page_size=2)
    held = start(kv, [1, 2, 3, 4, 5])
    new = request([1, 2, 3, 9, 9])
    assert not kv.admit(new, kv.match(new), 5 + 2)
    assert new.page_ids == []
    assert not kv.reserve(held, 9)
    assert kv.num_available_pages == 1
    kv.check()


def test_a_prompt_that_fills_the_whole_pool_is_admitted_over_its_own_cache() -> None:
    kv = KVCacheManager(num_pages=2, page_size=4)
    kv.release(start(kv, [1, 2, 3, 4, 5, 6, 7, 8]))
    again = request([1, 2, 3, 4, 5, 6, 7, 8])
    again.slot = 0
    assert kv.admit(again, kv.match(again), 8)  # evicts the page that it would copy: nothing to copy then
    assert again.num_computed_tokens == 7
    assert kv.take_changes()[1] == []
    kv.check()


def test_different_salts_share_nothing() -> None:
    kv = KVCacheManager(num_pages=8, page_size=1)
    kv.release(start(kv, [1, 2, 3]))
    assert kv.match(request([1, 2, 3], salt="other")).num_tokens == 0
    assert kv.match(request([1, 2, 3], salt="\ud800")).num_tokens == 0


def test_naive_reuses_nothing_and_frees_everything() -> None:
    kv = KVCacheManager(num_pages=8, page_size=2, reuse=False)
    first = start(kv, [1, 2, 3, 4])
    assert kv.match(request([1, 2, 3, 4])).num_tokens == 0
    kv.release(first)
    assert (kv.num_free_pages, kv.num_cached_pages) == (8, 0)
    kv.check()


def test_invalid_pages_cannot_be_found_any_more() -> None:
    kv = KVCacheManager(num_pages=8, page_size=2)
    running = start(kv, [1, 2, 3, 4, 5])
    kv.invalidate(running, 2)
    assert kv.match(request([1, 2, 3, 4, 5])).num_tokens == 2
    kv.check()
    kv.release(running)
    assert (kv.num_free_pages, kv.num_cached_pages) == (7, 1)
    kv.check()


def test_pages_of_a_failed_step_are_not_published_when_their_request_leaves() -> None:
    kv = KVCacheManager(num_pages=8, page_size=2)
    running = request([1, 2, 3, 4, 5])
    assert kv.admit(running, kv.match(running), 5)
    running.num_computed_tokens = 2
    kv.commit(running, step=1)
    running.num_computed_tokens = 5  # in the step that fails
    kv.invalidate(running, 2)
    assert kv.is_invalid(running)
    kv.release(running)
    assert kv.match(request([1, 2, 3, 4, 5])).num_tokens == 2
    assert not kv.is_invalid(running)  # it may start again
    kv.check()


def test_requests_that_share_pages_can_be_invalidated_one_after_the_other() -> None:
    kv = KVCacheManager(num_pages=8, page_size=2)
    one, two = start(kv, [1, 2, 3]), start(kv, [1, 2, 4])
    kv.invalidate(one, 0)
    assert kv.is_invalid(two)
    kv.invalidate(two, 0)
    kv.check()
    kv.release(one)
    kv.release(two)
    assert kv.num_free_pages == 8
    kv.check()


def test_check_finds_a_page_that_nobody_gave() -> None:
    kv = KVCacheManager(num_pages=4, page_size=2)
    running = start(kv, [1, 2, 3])
    running.page_ids.append(3)
    with pytest.raises(RuntimeError, match="page 3 counts 0 holders, but 1 hold it"):
        kv.check()


def test_check_finds_a_page_that_the_tree_does_not_own() -> None:
    kv = KVCacheManager(num_pages=4, page_size=2)
    kv.release(start(kv, [1, 2, 3]))
    kv._tree.num_pages += 1
    with pytest.raises(RuntimeError, match="the tree holds 2 pages and counts 3"):
        kv.check()


def test_check_finds_a_lock_that_no_request_holds() -> None:
    kv = KVCacheManager(num_pages=4, page_size=2)
    kv.release(start(kv, [1, 2, 3, 4]))
    kv._tree.lock(b"", kv.match(request([1, 2, 9])))
    with pytest.raises(RuntimeError, match="2 cached pages have no other holder, 1 are counted"):
        kv.check()


def test_check_finds_a_request_without_its_lock() -> None:
    kv = KVCacheManager(num_pages=4, page_size=2)
    new = request([1, 2, 3])
    root = kv._tree.lock(b"", kv.match(new))
    assert kv.admit(new, kv.match(new), 3)
    kv._tree.unlock(root)
    kv.check()
    kv._tree.unlock(root)
    with pytest.raises(RuntimeError, match=f"request {new.request_id} holds a path that is not locked"):
        kv.check()


def test_check_finds_pages_that_are_not_those_of_the_path() -> None:
    kv = KVCacheManager(num_pages=4, page_size=2)
    running = start(kv, [1, 2, 3, 4])
    running.page_ids.reverse()
    with pytest.raises(RuntimeError, match=f"request {running.request_id} does not hold the pages of its path"):
        kv.check()


def test_check_finds_tokens_that_are_not_those_of_the_path() -> None:
    kv = KVCacheManager(num_pages=4, page_size=2)
    running = start(kv, [1, 2, 3, 4])
    kv.tokens(running)[0] = 9
    with pytest.raises(RuntimeError, match=f"request {running.request_id} does not hold the pages of its path"):
        kv.check()


class ManagerMachine(RuleBasedStateMachine):
    """Requests come, grow, and leave in any order; steps are read late."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]), num_pages=st.integers(2, 24), reuse=st.sampled_from([True, True, False])
    )
    def begin(self, page_size: int, num_pages: int, reuse: bool) -> None:
        self.kv = KVCacheManager(num_pages, page_size, reuse=reuse)
        self.active: list[Request] = []
        self.step = 1

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), part=st.integers(1, 20))
    def admit(self, tokens: list[int], part: int) -> None:
        new = request(tokens)
        match = self.kv.match(new)
        end = min(match.num_tokens + part, len(tokens))
        available = self.kv.num_available_pages
        if not self.kv.admit(new, match, end):
            assert self.kv.num_available_pages == available
            self.kv.forget(new)
            return
        new.slot = int(new.request_id)
        self.active.append(new)
        new.num_computed_tokens = end
        self.kv.take_changes()
        self.kv.commit(new, self.step, tail=end == len(tokens))

    @rule(which=st.integers(0, 100), token=st.integers(0, 1))
    def compute(self, which: int, token: int) -> None:
        if not self.active:
            return
        running = self.active[which % len(self.active)]
        if self.kv.reserve(running, running.num_computed_tokens + 1):
            running.num_computed_tokens += 1
            if running.num_computed_tokens < len(running.prompt_ids):
                self.kv.commit(running, self.step)
            else:
                running.output_ids.append(token)

    @rule()
    def publish(self) -> None:
        for running in self.active:
            self.kv.commit(running, self.step)

    @rule(which=st.integers(0, 100), invalid_from=st.one_of(st.none(), st.none(), st.integers(0, 30)))
    def leave(self, which: int, invalid_from: int | None) -> None:
        if not self.active:
            return
        running = self.active.pop(which % len(self.active))
        if invalid_from is not None:
            self.kv.invalidate(running, invalid_from)
            for other in [other for other in self.active if self.kv.is_invalid(other)]:
                self.active.remove(other)
                self.kv.release(other)
                self.kv.forget(other)
        self.kv.release(running)
        self.kv.forget(running)

    @rule(count=st.integers(0, 8))
    def evict(self, count: int) -> None:
        expected = min(count, self.kv.num_cached_pages)
        free = self.kv.num_free_pages
        assert self.kv.evict(count) == expected
        assert self.kv.num_free_pages == free + expected

    @rule()
    def read(self) -> None:
        self.kv.steps_read(self.step)
        self.step += 1

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check()

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for running in self.active:
            self.kv.release(running)
        self.kv.steps_read(self.step)
        self.kv.evict(self.kv.num_pages)
        assert self.kv.num_free_pages == self.kv.num_pages


def test_any_history_accounts_for_every_page(stateful: settings) -> None:
    run_state_machine_as_test(ManagerMachine, settings=stateful)
