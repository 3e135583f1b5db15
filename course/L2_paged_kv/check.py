"""The checks of lesson L2: pages are counted, shared, copied, given back, and found in memory."""

from __future__ import annotations

import random

from mini_sglang.learn.checking import expect, expect_error, guards
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.kv_cache import KVCacheManager
from mini_sglang.scheduling.page_allocator import PageAllocator

HOLDERS = "free pages have no holder, all others have as many as their count says"
CONSERVED = "free + cached + held = all pages"
COUNTING = "L2: Who holds a page"
TABLE = "L2: A page table"
COPYING = "L2: Copy on write"
RETURNING = "L2: When a page comes back"
CELLS = "L2: From a position to a cell"


# -- the allocator ----------------------------------------------------------------------------------------------------


def test_taken_pages_are_distinct_and_have_one_holder_each() -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(3) + allocator.allocate(2)
    expect(sorted(pages), [0, 1, 2, 3, 4], "all pages of a pool of 5, taken in two calls", read=COUNTING)
    expect([allocator.count(page) for page in pages], [1] * 5, "holders of each", invariant=HOLDERS, read=COUNTING)
    expect(allocator.num_free, 0, "free pages afterwards", invariant=HOLDERS, read=COUNTING)


@guards("zero-takes-all")
def test_no_pages_are_taken_when_none_are_asked_for() -> None:
    allocator = PageAllocator(4)
    expect(allocator.allocate(0), [], "allocate(0)", read=COUNTING)
    expect(allocator.num_free, 4, "free pages after allocate(0) of a pool of 4", invariant=HOLDERS, read=COUNTING)


@guards("half-an-allocation")
def test_who_asks_for_too_many_pages_is_refused_and_nothing_changes() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(1)
    with expect_error(ValueError, "allocate(4) with 3 of 4 pages free", read=COUNTING):
        allocator.allocate(4)
    expect(allocator.num_free, 3, "free pages after the refusal", invariant=HOLDERS, read=COUNTING)


@guards("freed-while-held")
def test_a_page_is_free_only_when_its_last_holder_has_let_go() -> None:
    allocator = PageAllocator(3)
    [page] = allocator.allocate(1)
    allocator.retain([page])
    allocator.release([page])
    expect(allocator.count(page), 1, "holders after one of two let go", invariant=HOLDERS, read=COUNTING)
    expect(allocator.num_free, 2, "free pages after one of two holders let go", invariant=HOLDERS, read=COUNTING)
    allocator.release([page])
    expect(allocator.num_free, 3, "free pages after the last holder let go", invariant=HOLDERS, read=COUNTING)


@guards("double-free")
def test_a_free_page_cannot_be_released_again() -> None:
    allocator = PageAllocator(2)
    [page] = allocator.allocate(1)
    allocator.release([page])
    with expect_error(ValueError, "releasing a page twice", match=str(page), invariant=HOLDERS, read=COUNTING):
        allocator.release([page])


@guards("held-and-free")
def test_a_free_page_cannot_gain_a_holder() -> None:
    allocator = PageAllocator(2)
    with expect_error(ValueError, "retaining free page 1", match="1", invariant=HOLDERS, read=COUNTING):
        allocator.retain([1])


# -- page tables ------------------------------------------------------------------------------------------------------


@guards("rounded-down")
def test_tokens_that_only_begin_a_page_need_it_too() -> None:
    kv = KVCacheManager(num_pages=8, page_size=4)
    needed = {count: kv.pages_for(count) for count in (1, 3, 5, 9)}
    expect(needed, {1: 1, 3: 1, 5: 2, 9: 3}, "pages of 4 tokens that so many tokens need", read=TABLE)


@guards("one-page-too-many")
def test_tokens_that_fill_their_pages_need_no_other() -> None:
    kv = KVCacheManager(num_pages=8, page_size=4)
    needed = {count: kv.pages_for(count) for count in (0, 4, 8)}
    expect(needed, {0: 0, 4: 1, 8: 2}, "pages of 4 tokens that so many tokens need", read=TABLE)


def test_a_page_table_grows_by_what_is_missing() -> None:
    kv = KVCacheManager(num_pages=4, page_size=4)
    request = begin(kv, list(range(6)))
    expect(len(request.page_ids), 2, "pages of a prompt of 6 tokens", read=TABLE)
    kv.take_changes()
    expect(kv.reserve(request, 8), True, "reserve(8 tokens), which fit into the pages there are", read=TABLE)
    expect(kv.take_changes()[0], [], "what the executor is told about them", read=TABLE)
    expect(kv.reserve(request, 9), True, "reserve(9 tokens)", read=TABLE)
    told = [(new.slot, new.first_index, new.page_ids) for new in kv.take_changes()[0]]
    expect(
        told, [(request.slot, 2, request.page_ids[2:])], "(slot, first index, page ids) for the executor", read=TABLE
    )
    expect(kv.reserve(request, 17), False, "reserve(17 tokens) of a pool of 16", read=TABLE)
    expect(len(request.page_ids), 3, "pages after the refusal", invariant="False means nothing changed", read=TABLE)
    expect_conserved(kv)


# -- sharing ----------------------------------------------------------------------------------------------------------


def test_whole_pages_of_an_equal_beginning_are_shared() -> None:
    kv = KVCacheManager(num_pages=8, page_size=4)
    first = begin(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    compute(kv, first)
    second = begin(kv, [1, 2, 3, 4, 9, 9, 9, 9])
    expect(second.num_computed_tokens, 4, "tokens that need not be computed again", read=COUNTING)
    expect(second.page_ids[0], first.page_ids[0], "page of the shared beginning", read=COUNTING)
    expect(kv.num_free_pages, 5, "free pages of 8, with 4 page table entries and one page in both", read=COUNTING)
    told = [(new.slot, new.first_index, new.page_ids) for new in kv.take_changes()[0]]
    expect(told[-1], (second.slot, 0, second.page_ids), "(slot, first index, page ids) for the executor", read=TABLE)
    expect_conserved(kv)


@guards("written-into-a-shared-page")
def test_a_page_that_matched_in_part_stays_with_those_who_filled_it() -> None:
    kv, first, second = matched_inside_a_page()
    expect(second.num_computed_tokens, 6, "tokens that need not be computed again", read=COPYING)
    shared = [page for page in second.page_ids if page in first.page_ids]
    rule = "nobody writes into a page that others hold"
    expect(shared, first.page_ids[:1], "pages that both requests hold", invariant=rule, read=COPYING)
    expect(len(second.page_ids), 3, "pages of a prompt of 9 tokens", read=COPYING)
    expect_conserved(kv)


@guards("copy-forgotten")
def test_what_matched_inside_a_page_is_copied_to_a_page_of_its_own() -> None:
    kv, first, second = matched_inside_a_page()
    _, copies = kv.take_changes()
    rule = "every computed token has its key and value in the request's own page table"
    copy = (first.page_ids[1], second.page_ids[1])
    expect(copies, [copy], "(source, destination) of the copies that the step makes", invariant=rule, read=COPYING)


# -- giving back ------------------------------------------------------------------------------------------------------


def test_what_a_request_has_computed_is_found_after_it_has_left() -> None:
    kv = KVCacheManager(num_pages=8, page_size=4)
    request = begin(kv, list(range(8)))
    request.num_computed_tokens = 8
    kv.release(request)
    kv.forget(request)
    expect(kv.num_free_pages, 6, "free pages of 8; 2 stay cached", invariant=CONSERVED, read=RETURNING)
    again = new_request(list(range(8)))
    expect(kv.match(again).num_tokens, 7, "cached tokens of the same prompt, all but its last", read=RETURNING)
    expect_conserved(kv)


@guards("refused-but-locked")
def test_a_request_that_does_not_fit_leaves_no_lock_behind() -> None:
    kv = KVCacheManager(num_pages=4, page_size=4)
    compute(kv, leave := begin(kv, [1, 2, 3, 4, 5, 6, 7, 8]))
    kv.release(leave)
    expect(kv.num_available_pages, 4, "free or evictable pages before", read=RETURNING)
    large = new_request([1, 2, 3, 4, 5, *range(100, 120)])
    expect(kv.admit(large, kv.match(large), 25), False, "admitting 25 tokens to a pool of 16", read=RETURNING)
    rule = "False means nothing changed: what nobody holds can be evicted"
    expect(kv.num_available_pages, 4, "free or evictable pages afterwards", invariant=rule, read=RETURNING)


@guards("leaked-on-abort")
def test_a_request_aborted_in_its_prompt_gives_back_every_page() -> None:
    kv = KVCacheManager(num_pages=8, page_size=4)
    request = begin(kv, list(range(20)))
    request.num_computed_tokens = 7  # of 20, when its caller leaves
    kv.commit(request, step=1)
    kv.release(request)
    expect(request.page_ids, [], "page table after release", read=RETURNING)
    expect(request.num_computed_tokens, 0, "computed tokens after release", read=RETURNING)
    expect(kv.num_available_pages, 8, "free or evictable pages of 8", invariant=CONSERVED, read=RETURNING)
    expect_conserved(kv)


def test_a_page_that_was_only_begun_is_found_too() -> None:
    kv = KVCacheManager(num_pages=8, page_size=4)
    request = begin(kv, list(range(10)))
    request.num_computed_tokens = 10
    kv.release(request)
    kv.forget(request)
    expect(kv.num_free_pages, 5, "free pages of 8; 3 stay cached", invariant=CONSERVED, read=RETURNING)
    again = new_request(list(range(10)))
    expect(kv.match(again).num_tokens, 9, "cached tokens of the same prompt, all but its last", read=RETURNING)
    expect_conserved(kv)


def test_nothing_names_a_request_that_has_left() -> None:
    kv = KVCacheManager(num_pages=8, page_size=4)
    request = begin(kv, list(range(6)))
    kv.reserve(request, 9)  # begins a page, and the executor has not heard of it
    kv.release(request)
    kv.forget(request)
    expect(kv.take_changes()[0], [], "page table entries announced for a request that has left", read=RETURNING)
    expect_conserved(kv)


def test_without_reuse_every_page_is_the_requests_own() -> None:
    kv = KVCacheManager(num_pages=8, page_size=4, reuse=False)
    first = begin(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    compute(kv, first)
    second = begin(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    expect(kv.num_free_pages, 4, "free pages of 8, two equal prompts of two pages each", read=COPYING)
    kv.release(first)
    kv.release(second)
    expect(kv.num_free_pages, 8, "free pages of 8 when both have left", invariant=CONSERVED, read=COPYING)


def test_nothing_is_published_of_a_request_whose_step_failed() -> None:
    kv = KVCacheManager(num_pages=8, page_size=4)
    request = begin(kv, list(range(10)))
    request.num_computed_tokens = 10
    kv.invalidate(request, 0)
    kv.release(request)
    rule = "what is cached was computed"
    expect(kv.num_free_pages, 8, "free pages of 8 when a spoiled request has left", invariant=rule, read=RETURNING)
    expect(kv.is_invalid(request), False, "whether it is still spoiled, without a page", read=RETURNING)


@guards("back-before-the-step")
def test_a_replaced_page_is_free_only_when_the_step_that_uses_it_was_read() -> None:
    kv = KVCacheManager(num_pages=8, page_size=2)
    one, two = begin(kv, [1, 2, 3]), begin(kv, [1, 2, 4])
    one.num_computed_tokens = two.num_computed_tokens = 3  # both computed page [1, 2], in step 7
    kv.commit(one, step=7)
    kv.commit(two, step=7)
    expect(
        two.page_ids[0], one.page_ids[0], "page of [1, 2] in the second table, exchanged for the first", read=RETURNING
    )
    rule = "no page is free that a launched step writes to"
    kv.steps_read(6)
    expect(kv.num_free_pages, 4, "free pages of 8 when step 6 was read", invariant=rule, read=RETURNING)
    kv.steps_read(7)
    expect(kv.num_free_pages, 5, "free pages of 8 when step 7 was read", invariant=CONSERVED, read=RETURNING)
    expect_conserved(kv)


def test_pages_are_conserved_whatever_happens() -> None:
    choose = random.Random(2)
    kv = KVCacheManager(num_pages=12, page_size=3)
    running: list[Request] = []
    for step in range(1, 300):
        if choose.random() < 0.5:
            request = new_request([choose.randrange(2) for _ in range(choose.randrange(1, 12))])
            if kv.admit(request, kv.match(request), len(request.prompt_ids)):
                request.slot = len(running)
                running.append(request)
        for request in running:
            request.num_computed_tokens = len(request.prompt_ids) + len(request.output_ids)
            kv.commit(request, step)
            request.output_ids.append(choose.randrange(2))
            kv.reserve(request, len(request.prompt_ids) + len(request.output_ids))
        kv.take_changes()
        if running and (choose.random() < 0.5 or kv.num_available_pages < 4):
            leaving = running.pop(choose.randrange(len(running)))
            leaving.num_computed_tokens = min(leaving.num_computed_tokens, len(leaving.page_ids) * kv.page_size)
            kv.release(leaving)
            kv.forget(leaving)
        kv.steps_read(step)
        expect_conserved(kv, f"the state after {step} random operations")


# -- memory -----------------------------------------------------------------------------------------------------------


@guards("cell-without-page-size")
def test_no_two_tokens_share_a_cell() -> None:
    found = cells(page_ids=[0, 1, 2], page_size=4, positions=list(range(12)))
    rule = "one cell for each token of each page"
    expect(len(set(found)), 12, "different cells of 12 tokens in pages 0, 1, 2", invariant=rule, read=CELLS)


@guards("page-id-is-not-order")
def test_a_token_lies_where_its_page_lies() -> None:
    found = cells(page_ids=[5, 2, 7], page_size=4, positions=[0, 3, 4, 9])
    expect(found, [20, 23, 8, 29], "cells of tokens 0, 3, 4, 9 in pages of 4, page table [5, 2, 7]", read=CELLS)


# -- how the checks set things up -------------------------------------------------------------------------------------


def new_request(tokens: list[int]) -> Request:
    return Request(request_id="learner", prompt_ids=tokens, params=SamplingParams())


def begin(kv: KVCacheManager, tokens: list[int]) -> Request:
    """A request that was admitted with pages for its whole prompt."""
    request = new_request(tokens)
    expect(kv.admit(request, kv.match(request), len(tokens)), True, f"admitting {len(tokens)} tokens", read=TABLE)
    request.slot = 0
    return request


def compute(kv: KVCacheManager, request: Request) -> None:
    request.num_computed_tokens = len(request.prompt_ids)
    kv.commit(request, step=1, tail=True)


def matched_inside_a_page() -> tuple[KVCacheManager, Request, Request]:
    """Two prompts that are equal in their first six tokens, in pages of four."""
    kv = KVCacheManager(num_pages=8, page_size=4)
    first = begin(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    compute(kv, first)
    kv.take_changes()
    return kv, first, begin(kv, [1, 2, 3, 4, 5, 6, 9, 9, 9])


def expect_conserved(kv: KVCacheManager, what: str = "the state of all pages") -> None:
    try:
        kv.check()
    except RuntimeError as error:
        expect(str(error), "every page accounted for", what, invariant=CONSERVED, read=COUNTING)


def cells(page_ids: list[int], page_size: int, positions: list[int]) -> list[int]:
    """What RequestTable says of one request's tokens."""
    import torch

    from mini_sglang.execution.request_table import RequestTable

    table = RequestTable(2, 4 * page_size, page_size, torch.device("cpu"), idle_page=0)
    table.page_table[1, : len(page_ids)] = torch.tensor(page_ids)
    found: list[int] = table.cells(torch.ones(len(positions), dtype=torch.int64), torch.tensor(positions)).tolist()
    return found
