"""Checks of L8: the tree alone first (match, split, lock, evict), then together with the pages' reference counts."""

from __future__ import annotations

import random
from array import array

from mini_sglang.learn.checking import expect, guards
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.kv_cache import KVCacheManager
from mini_sglang.scheduling.radix_cache import Match, Node, RadixCache


def plant(cache: RadixCache, tokens: list[int], pages: list[int], salt: bytes = b"", below: Node | None = None) -> Node:
    """Enter a node by hand, unlocked: what finds or splits nodes is checked before anything can lock them."""
    parent = below or cache._roots.setdefault(salt, Node(None, salt, array("i"), []))
    return cache._add_child(parent, array("i", tokens), pages)


def match(cache: RadixCache, tokens: list[int], salt: bytes = b"") -> Match:
    return cache.match(salt, array("i", tokens), len(tokens))


def hold(cache: RadixCache, tokens: list[int], pages: list[int], salt: bytes = b"") -> Node:
    """Lock what is cached of `tokens`, add the rest (`pages` names one per page of them all), keep all of it locked."""
    found = match(cache, tokens, salt)
    known = len(found.page_ids)
    node, _ = cache.extend(
        cache.lock(salt, found), array("i", tokens[known * cache.page_size :]), pages[known : len(tokens)]
    )
    return node


def insert(cache: RadixCache, tokens: list[int], pages: list[int], salt: bytes = b"") -> None:
    cache.unlock(hold(cache, tokens, pages, salt))


def problem(cache: RadixCache | KVCacheManager) -> str:
    """What `check()` complains about."""
    try:
        cache.check()
    except RuntimeError as error:
        return str(error)
    return "nothing"


# -- match ------------------------------------------------------------------------------------------------------------


@guards("round-up")
def test_a_match_counts_whole_pages_and_names_the_page_that_matches_in_part() -> None:
    cache = RadixCache(4)
    plant(cache, [1, 2, 3, 4, 5, 6, 7, 8], [10, 11])
    found = match(cache, [1, 2, 3, 4, 5, 6, 99, 99, 99])
    read = "L8: A page is the smallest thing that can be shared"
    expect(found.page_ids, [10], "whole pages that match 6 equal tokens, page size 4", read=read)
    expect((found.partial_page, found.num_partial_tokens), (11, 2), "the page to copy from, and how much", read=read)
    expect(found.num_tokens, 6, "matched tokens, those to be copied included", read=read)


@guards("first-token-key")
def test_siblings_that_share_their_first_token_are_told_apart() -> None:
    cache = RadixCache(4)
    plant(cache, [1, 2, 3, 4], [10])
    plant(cache, [1, 9, 9, 9], [11])
    expect(
        match(cache, [1, 9, 9, 9, 5]).page_ids,
        [11],
        "pages of [1 9 9 9], cached beside [1 2 3 4]",
        invariant="of two children, no two begin with the same page",
        read="L8: A page is the smallest thing that can be shared",
    )


@guards("salt-ignored")
def test_nothing_is_found_under_another_salt() -> None:
    cache = RadixCache(1)
    plant(cache, [1, 2, 3], [10, 11, 12], b"tenant a")
    expect(
        match(cache, [1, 2, 3], b"tenant b").num_tokens,
        0,
        "tokens that tenant b finds of what tenant a has cached",
        read="L8: One root per salt",
    )


def test_a_page_that_is_not_full_is_copied_and_never_shared() -> None:
    cache = RadixCache(4)
    tail = plant(cache, [1, 2], [10])
    found = match(cache, [1, 2])
    rule, read = "only a page of page_size tokens is shared", "L8: A page is the smallest thing that can be shared"
    what = "whole pages, page to copy from, and how much, of 1 2, cached as a tail in a page of 4"
    got = (found.page_ids, found.partial_page, found.num_partial_tokens)
    expect(got, ([], 10, 2), what, invariant=rule, read=read)
    expect(found.node is tail.parent, True, "whether the match ends in the root, above the tail", read=read)


# -- split ------------------------------------------------------------------------------------------------------------


@guards("children-on-both")
def test_after_a_split_the_children_hang_below_the_lower_half_alone() -> None:
    cache = RadixCache(1)
    node = plant(cache, [1, 2, 3], [10, 11, 12])
    plant(cache, [4], [13], below=node)
    plant(cache, [5], [14], below=node)
    upper = cache._split(node, 1)
    read = "L8: Split"
    expect(upper.tokens.tolist(), [1], "tokens of the upper half", read=read)
    (lower, *others) = sorted(upper.children.values(), key=lambda node: node.tokens.tolist())
    expect(
        (lower.tokens.tolist(), len(others)),
        ([2, 3], 0),
        "the upper half's first child, and how many more it has",
        invariant="every node has one parent",
        read=read,
    )
    expect(len(lower.children), 2, "children of the lower half", read=read)


def test_after_a_split_each_half_is_found_under_its_own_first_page() -> None:
    cache = RadixCache(2)
    upper = cache._split(plant(cache, [1, 1, 2, 2, 3, 3], [10, 11, 12]), 1)
    rule, read = "a node lies in its parent's children and sorted_keys under its own key", "L8: Split"
    found = match(cache, [1, 1, 2, 2, 3, 3])
    expect(found.page_ids, [10, 11, 12], "pages found of a node that was split", invariant=rule, read=read)
    found = match(cache, [1, 1, 2, 9])
    expect((found.partial_page, found.num_partial_tokens), (11, 1), "page to copy from", invariant=rule, read=read)
    keys = [[*array("i", key)] for key in (*upper.sorted_keys, *(child.key for child in upper.children.values()))]
    expect(keys, [[2, 2], [2, 2]], "sorted_keys of the upper half, and the lower one's key", invariant=rule, read=read)


# -- lock and unlock --------------------------------------------------------------------------------------------------


def test_pages_are_locked_until_they_are_let_go() -> None:
    cache = RadixCache(1)
    node = hold(cache, [1, 2], [10, 11])
    expect(cache.num_locked_pages, 2, "locked pages while a request holds 1 2", read="L8: Lock")
    cache.unlock(node)
    expect(cache.num_locked_pages, 0, "locked pages when it has let go", read="L8: Lock")


@guards("split-forgets-locks")
def test_after_a_split_both_halves_are_locked_by_who_had_locked_the_whole() -> None:
    cache = RadixCache(1)
    hold(cache, [1, 2, 3, 4], [10, 11, 12, 13])
    upper = cache.lock(b"", match(cache, [1, 2]))
    (lower,) = upper.children.values()
    expect(
        (upper.locks, lower.locks),
        (2, 1),
        "locks on [1 2] and on [3 4]: one request holds 1 2 3 4, another one 1 2",
        invariant="a node has at least as many locks as its children together",
        read="L8: Split",
    )


@guards("split-keeps-the-top")
def test_who_held_a_node_before_it_was_split_can_let_go_of_all_of_it() -> None:
    cache = RadixCache(1)
    first = hold(cache, [1, 2, 3, 4], [10, 11, 12, 13])
    cache.lock(b"", match(cache, [1, 2]))
    cache.unlock(first)
    expect(
        cache.num_locked_pages,
        2,
        "locked pages when the holder of 1 2 3 4 has gone and the holder of 1 2 has not",
        invariant="whoever locked a node still holds all of it after a split",
        read="L8: Split",
    )


@guards("unlock-only-the-end")
def test_when_all_have_let_go_nothing_is_locked() -> None:
    cache = RadixCache(1)
    insert(cache, [1, 2, 3, 4], [10, 11, 12, 13])
    insert(cache, [1, 2, 5, 6], [10, 11, 14, 15])
    expect(
        (cache.num_locked_pages, cache.num_pages),
        (0, 6),
        "locked pages, and pages in the tree, when two requests have come and gone",
        invariant="cached and held by nobody = pages in the tree - locked pages",
        read="L8: Lock",
    )


@guards("lock-only-the-end")
def test_a_lock_holds_the_whole_way_up_to_the_root() -> None:
    cache = RadixCache(1)
    insert(cache, [1, 2, 3, 4], [10, 11, 12, 13])
    insert(cache, [1, 2, 5, 6], [10, 11, 14, 15])
    node = cache.lock(b"", match(cache, [1, 2, 5, 6]))
    read = "L8: Lock"
    expect(cache.num_locked_pages, 4, "locked pages on the way to the end of 1 2 5 6", read=read)
    assert node.parent is not None
    expect(node.parent.locks, 1, "locks on [1 2], the parent of what was locked", read=read)


@guards("counted-twice")
def test_who_holds_what_was_cut_off_can_let_go_of_it() -> None:
    cache = RadixCache(1)
    node = hold(cache, [1, 2], [10, 11])
    cache.detach(node, 2, 0)  # as after a step that failed
    cache.unlock(node)
    expect(
        (cache.num_locked_pages, cache.num_pages),
        (0, 0),
        "locked pages, and pages in the tree, when both were cut off and then unlocked",
        invariant="what is cut off has left all counts",
        read="L8: Lock",
    )


# -- evict ------------------------------------------------------------------------------------------------------------


def test_what_nobody_holds_can_be_evicted() -> None:
    cache = RadixCache(1)
    insert(cache, [1, 2], [10, 11])
    expect(
        sorted(cache.evict(2)),
        [10, 11],
        "pages evicted, when their only holder has let go",
        invariant="an unlocked leaf waits in the heap",
        read="L8: Lock",
    )


@guards("evict-ignores-locks")
def test_what_is_locked_again_is_not_evicted() -> None:
    cache = RadixCache(1)
    insert(cache, [1, 2], [10, 11])
    hold(cache, [1, 2], [10, 11])
    expect(
        cache.evict(2),
        [],
        "pages evicted, while a request holds them all",
        invariant="a locked page keeps its content",
        read="L8: Evict",
    )


@guards("stale-recency")
def test_the_leaf_that_was_not_used_for_longest_goes_first() -> None:
    cache = RadixCache(1)
    insert(cache, [1], [10])
    insert(cache, [2], [11])
    insert(cache, [1], [10])  # used again: now 2 is the older one
    expect(cache.evict(1), [11], "the evicted page: 1 was cached first, and used last", read="L8: Evict")


@guards("used-at-the-start-only")
def test_a_path_is_in_use_until_it_is_let_go() -> None:
    cache = RadixCache(1)
    first = hold(cache, [1], [10])
    insert(cache, [2], [11])
    cache.unlock(first)
    expect(cache.evict(1), [11], "the evicted page: 1 was locked first, and let go last", read="L8: Lock")


@guards("evict-from-the-front")
def test_what_is_left_of_a_leaf_is_still_a_beginning() -> None:
    cache = RadixCache(1)
    insert(cache, [1, 2, 3], [10, 11, 12])
    cache.evict(1)
    expect(
        match(cache, [1, 2, 3]).page_ids,
        [10, 11],
        "pages found of 1 2 3 when one of three was evicted",
        invariant="page i of a path holds tokens i * page_size and on, computed after all those before",
        read="L8: Evict",
    )


@guards("parent-stays")
def test_a_parent_can_be_evicted_when_its_children_are_gone() -> None:
    cache = RadixCache(1)
    insert(cache, [1, 2, 3], [10, 11, 12])
    insert(cache, [1, 2, 4], [10, 11, 13])
    expect(
        sorted(cache.evict(9)),
        [10, 11, 12, 13],
        "pages evicted from a tree that nobody holds",
        invariant="evict can free every page that is cached and not locked",
        read="L8: Evict",
    )


# -- with the reference counts ----------------------------------------------------------------------------------------


def run(kv: KVCacheManager, name: str, prompt: list[int]) -> Request:
    """Admit a request, compute its prompt, publish the pages."""
    request = Request(name, prompt, SamplingParams())
    request.slot = 0
    if kv.admit(request, kv.match(request), len(prompt)):
        request.num_computed_tokens = len(prompt)
        kv.commit(request, 1, tail=True)
        kv.steps_read(1)
    return request


@guards("nothing-left-to-compute")
def test_of_a_prompt_that_is_cached_whole_one_token_is_left_to_compute() -> None:
    kv = KVCacheManager(8, 4)
    kv.release(run(kv, "first", [1, 2, 3, 4, 5, 6, 7, 8]))
    again = Request("again", [1, 2, 3, 4, 5, 6, 7, 8], SamplingParams())
    expect(
        kv.match(again).num_tokens,
        7,
        "matched tokens of 8, all of which are cached",
        invariant="the first new token is sampled from the logits of a token that the step computes",
        read="L8: One token is always left",
    )


@guards("not-retained")
def test_each_page_counts_every_request_that_shares_it_and_the_tree() -> None:
    kv = KVCacheManager(8, 1)
    kv.release(run(kv, "first", [1, 2, 3]))
    run(kv, "second", [1, 2, 3, 4])
    expect(
        problem(kv),
        "nothing",
        "what check() finds while a second request shares the cached pages of a first",
        invariant="a page's count is the number of its holders",
        read="L8: Two counts for two questions",
    )


@guards("lock-late")
def test_a_request_is_not_given_the_pages_that_it_has_just_matched() -> None:
    kv = KVCacheManager(4, 1)
    kv.release(run(kv, "first", [1, 2, 3]))
    second = Request("second", [1, 2, 3, 7, 8], SamplingParams())
    second.slot = 0
    expect(
        kv.admit(second, kv.match(second), 5),
        False,
        "admitted, with 3 pages matched, 2 more needed and 1 free",
        invariant="lock first, then count what can be evicted",
        read="L8: Lock before you look for room",
    )


@guards("length-remembered")
def test_what_was_found_of_a_prompt_is_looked_up_again_when_pages_were_evicted() -> None:
    kv = KVCacheManager(8, 1)
    kv.release(run(kv, "first", [1, 2, 3]))
    waiting = Request("waiting", [1, 2, 3, 4], SamplingParams())
    before = kv.cached_tokens(waiting)
    kv.evict(3)
    expect(
        (before, kv.cached_tokens(waiting)),
        (3, 0),
        "cached_tokens of a waiting request before and after all was evicted",
        invariant="version rises when tokens may find another length",
        read="L8: Evict",
    )


def test_any_history_keeps_the_counts_right() -> None:
    rng = random.Random(8)
    kv = KVCacheManager(24, 2)
    running: list[Request] = []
    for index in range(400):
        if running and rng.random() < 0.45:
            request = running.pop(rng.randrange(len(running)))
            kv.release(request)
            last = f"the release of {request.prompt_ids}"
        else:
            request = run(kv, str(index), [rng.randrange(2) for _ in range(rng.randint(1, 12))])
            if request.page_ids:
                running.append(request)
            last = f"{request.prompt_ids}, {'admitted' if request.page_ids else 'for which there was no room'}"
        expect(
            problem(kv),
            "nothing",
            f"what check() finds after {index + 1} random admissions and releases; the last was {last}",
            invariant="every page is in one node, every count is that of a recount, every idle leaf waits for evict",
            read="L8: Two counts for two questions",
        )
    for request in running:
        kv.release(request)
    kv.evict(kv.num_cached_pages)
    expect(
        kv.num_free_pages, 24, "free pages when all have gone and the cache was emptied", invariant="no page is lost"
    )
