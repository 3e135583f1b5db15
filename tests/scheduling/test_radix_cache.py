"""RadixCache: finds the longest cached prefix to the token, evicts the least recently used, never what is locked."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mini_sglang.scheduling.radix_cache import Match, Node, RadixCache, common_prefix, token_array


class Tree:
    """A RadixCache that is given fresh page ids, with a record of what each page holds."""

    def __init__(self, page_size: int) -> None:
        self.cache = RadixCache(page_size)
        self.size = page_size
        self.contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # page -> (salt, all tokens up to its end)
        self.num_given = 0

    def match(self, tokens: list[int], salt: bytes = b"") -> Match:
        return self.cache.match(salt, array("i", tokens), len(tokens))

    def hold(self, tokens: list[int], salt: bytes = b"") -> tuple[Node, Node | None]:
        """Insert `tokens`, a tail included, and keep it all locked."""
        match = self.match(tokens, salt)
        node = self.cache.lock(salt, match)
        known, full = len(match.page_ids), len(tokens) // self.size
        pages = self._fresh(full - known, tokens, salt, known)
        node, published = self.cache.extend(node, array("i", tokens[known * self.size : full * self.size]), pages)
        assert published == pages
        tail = None
        if len(tokens) > full * self.size:
            rest = array("i", tokens[full * self.size :])
            for page in self.cache.drop_covered_tails(node, rest.tobytes()):
                del self.contents[page]
            (page,) = self._fresh(1, tokens, salt, full)
            tail = self.cache.add_tail(node, rest, page)
            if tail is None:
                del self.contents[page]
        return node, tail

    def let_go(self, held: tuple[Node, Node | None]) -> None:
        node, tail = held
        if tail is not None:
            self.cache.release_tail(tail)
        self.cache.unlock(node)

    def insert(self, tokens: list[int], salt: bytes = b"") -> None:
        self.let_go(self.hold(tokens, salt))

    def evict(self, count: int) -> list[int]:
        pages = self.cache.evict(count)
        for page in pages:
            del self.contents[page]
        return pages

    def _fresh(self, count: int, tokens: list[int], salt: bytes, first: int) -> list[int]:
        pages = list(range(self.num_given, self.num_given + count))
        self.num_given += count
        for index, page in enumerate(pages, first):
            self.contents[page] = (salt, tuple(tokens[: (index + 1) * self.size]))
        return pages

    def longest(self, tokens: list[int], salt: bytes) -> int:
        """The oracle: compare with the contents of every page."""
        cached = [content for owner, content in self.contents.values() if owner == salt]
        return max((shared_by_counting(content, tuple(tokens)) for content in cached), default=0)


def shared_by_counting(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(
    a=st.lists(st.integers(0, 1), max_size=70), b=st.lists(st.integers(0, 1), max_size=70), shared=st.integers(0, 70)
)
def test_common_prefix_equals_counting(a: list[int], b: list[int], shared: int) -> None:
    b = a[:shared] + b
    assert common_prefix(array("i", a), array("i", b)) == shared_by_counting(tuple(a), tuple(b))


@given(st.lists(st.integers(0, (1 << 31) - 1)))
def test_a_token_array_holds_the_tokens(tokens: list[int]) -> None:
    assert token_array(tokens) == array("i", tokens)


def test_two_sequences_that_share_only_their_first_token_live_side_by_side() -> None:
    tree = Tree(page_size=4)
    tree.insert([1, 2, 3, 4])
    tree.insert([1, 9, 9, 9])
    assert tree.match([1, 9, 9, 9]).page_ids == [1]
    match = tree.match([1, 9, 7])
    assert (match.page_ids, match.partial_page, match.num_partial_tokens) == ([], 1, 2)


def test_a_match_that_ends_inside_a_page_names_the_page_and_the_tokens() -> None:
    tree = Tree(page_size=4)
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    match = tree.match([1, 2, 3, 4, 5, 6, 0])
    assert (match.page_ids, match.partial_page, match.num_partial_tokens, match.num_tokens) == ([0], 1, 2, 6)
    match = tree.match([1, 2, 3, 4, 5, 6, 7, 8, 9, 0])
    assert (match.page_ids, match.partial_page, match.num_tokens) == ([0, 1], 2, 9)


def test_the_limit_is_kept_inside_a_page_too() -> None:
    tree = Tree(page_size=4)
    tree.insert([1, 2, 3, 4])
    match = tree.cache.match(b"", array("i", [1, 2, 3, 4]), 3)
    assert (match.page_ids, match.partial_page, match.num_tokens) == ([], 0, 3)


def test_a_match_counts_the_pages_that_somebody_holds() -> None:
    tree = Tree(page_size=2)
    tree.hold([1, 2, 3, 4])
    tree.insert([1, 2, 3, 4, 5, 6])
    match = tree.match([1, 2, 3, 4, 5, 6, 7])
    assert (len(match.page_ids), match.num_locked_pages) == (3, 2)
    assert tree.match([1, 2, 9]).num_locked_pages == 1


def test_salts_do_not_share_and_an_emptied_one_leaves_nothing() -> None:
    tree = Tree(page_size=2)
    tree.insert([1, 2], b"a")
    assert tree.match([1, 2], b"b").num_tokens == 0
    assert tree.evict(1) == [0]
    assert list(tree.cache.nodes()) == []


def test_an_equal_page_is_not_held_twice() -> None:
    cache = RadixCache(2)
    tokens = array("i", [1, 2, 3, 4])
    first = cache.lock(b"", Match())
    second = cache.lock(b"", cache.match(b"", tokens, 4))
    first, _ = cache.extend(first, tokens[:], [10, 11])
    second, canonical = cache.extend(second, tokens + array("i", [5, 6]), [20, 21, 22])
    assert canonical == [10, 11, 22]
    cache.check()
    cache.unlock(first)
    assert cache.evict(9) == []
    cache.unlock(second)
    assert sorted(cache.evict(9)) == [10, 11, 22]


def test_the_least_recently_used_leaf_goes_first_and_from_its_end() -> None:
    tree = Tree(page_size=1)
    tree.insert([1, 2, 3])
    tree.insert([1, 7, 8])
    tree.insert([1, 2, 3])  # used again
    assert tree.evict(1) == [4]
    assert tree.match([1, 7, 8]).num_tokens == 2
    assert sorted(tree.evict(3)) == [1, 2, 3]
    assert tree.match([1, 2, 3]).num_tokens == 1


def test_a_page_is_used_until_it_is_let_go() -> None:
    tree = Tree(page_size=1)
    first, second = tree.hold([1, 2]), tree.hold([3, 4])
    tree.let_go(second)
    tree.let_go(first)
    assert tree.evict(2) == [2, 3]


def test_a_leaf_waits_for_eviction_once_however_often_it_was_used() -> None:
    tree = Tree(page_size=1)
    for _ in range(20):
        tree.insert([1, 2])
    assert len(tree.cache._heap) == 1


def test_what_is_locked_stays_however_much_is_asked_for() -> None:
    tree = Tree(page_size=2)
    held = tree.hold([1, 2, 3, 4])
    tree.insert([1, 2, 5, 6, 7])
    assert sorted(tree.evict(100)) == [2, 3]
    assert tree.match([1, 2, 3, 4]).num_tokens == 4
    tree.let_go(held)
    assert sorted(tree.evict(100)) == [0, 1]


def test_splitting_keeps_the_lock_on_both_halves() -> None:
    tree = Tree(page_size=1)
    held = tree.hold([1, 2, 3, 4])
    tree.insert([1, 2])  # locks and unlocks only the upper half
    tree.cache.check()
    assert tree.evict(100) == []
    tree.let_go(held)
    assert tree.cache.num_locked_pages == 0


def test_a_shorter_tail_goes_when_a_longer_page_begins_with_it() -> None:
    tree = Tree(page_size=4)
    tree.insert([1, 2])
    tree.insert([1, 2, 3])
    assert tree.cache.num_pages == 1
    tree.insert([1, 2])
    assert tree.cache.num_pages == 1


def test_detaching_cuts_the_path_and_leaves_locks_valid() -> None:
    tree = Tree(page_size=1)
    node, _ = tree.hold([1, 2, 3, 4])
    other, _ = tree.hold([1, 2, 3, 4, 5])
    assert sorted(tree.cache.detach(node, 4, keep=2)) == [2, 3, 4]
    tree.cache.check()
    assert tree.match([1, 2, 3, 4, 5]).num_tokens == 2
    tree.cache.unlock(node)
    tree.cache.unlock(other)
    tree.cache.check()
    assert sorted(tree.cache.evict(9)) == [0, 1]


@pytest.mark.parametrize(("keep", "left", "beside"), [(3, 3, 3), (2, 2, 3), (1, 1, 1), (0, 0, 0)])
def test_detaching_cuts_a_path_of_several_nodes_at_the_right_page(keep: int, left: int, beside: int) -> None:
    tree = Tree(page_size=1)
    tree.hold([1, 2])
    node, _ = tree.hold([1, 2, 3, 4])
    deepest, _ = tree.hold([1, 2, 3, 4, 5])
    tree.hold([1, 2, 9])
    assert node is not deepest
    tree.cache.detach(deepest, 5, keep)
    tree.cache.check()
    assert tree.match([1, 2, 3, 4, 5]).num_tokens == left
    assert tree.match([1, 2, 9]).num_tokens == beside


@pytest.mark.parametrize("page_size", [1, 16])
def test_check_finds_a_lock_that_was_lost(page_size: int) -> None:
    tree = Tree(page_size)
    node, _ = tree.hold(list(range(16)))
    node.locks = 0
    with pytest.raises(RuntimeError, match="locked pages"):
        tree.cache.check()


def two_leaves_and_a_tail() -> RadixCache:
    """Page 0 holds 1 2; below it are pages 1 (3 4, locked) and 2 (5 6), and page 3 with a tail (7)."""
    tree = Tree(page_size=2)
    tree.hold([1, 2, 3, 4])
    tree.insert([1, 2, 5, 6])
    tree.insert([1, 2, 7])
    return tree.cache


def node(cache: RadixCache, page: int | None) -> Node:
    """The node of one page, or the root."""
    (found,) = [node for node in cache.nodes() if node.page_ids == ([] if page is None else [page])]
    return found


FAULTS: dict[str, Callable[[RadixCache], object]] = {
    "a page is held by two nodes": lambda cache: node(cache, 2).page_ids.__setitem__(0, 1),
    "holds 4 pages and counts 5": lambda cache: setattr(cache, "num_pages", 5),
    "has 2 locked pages and counts 1": lambda cache: setattr(cache, "num_locked_pages", 1),
    r"pages \[2\] is dead": lambda cache: setattr(node(cache, 2), "dead", True),
    "is an empty root": lambda cache: cache._roots.update({b"salt": Node(None, b"salt", array("i"), [])}),
    r"pages \[\] has the wrong number of tokens": lambda cache: node(cache, None).tokens.append(9),
    r"pages \[2\] has the wrong number of tokens": lambda cache: node(cache, 2).tokens.append(9),
    r"pages \[3\] has the wrong number of tokens": lambda cache: node(cache, 3).tokens.pop(),
    r"pages \[2\] has the wrong key": lambda cache: setattr(node(cache, 2), "key", b"key"),
    r"pages \[0\] has unsorted keys": lambda cache: node(cache, 0).sorted_keys.reverse(),
    r"pages \[0\] has a child of another parent": lambda cache: setattr(node(cache, 2), "parent", node(cache, None)),
    r"pages \[0\] has fewer locks than its children": lambda cache: setattr(node(cache, 1), "locks", 2),
    r"pages \[\d\] could be evicted, but is not queued": lambda cache: cache._heap.clear(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds_each_fault(fault: str) -> None:
    cache = two_leaves_and_a_tail()
    cache.check()
    FAULTS[fault](cache)
    with pytest.raises(RuntimeError, match=fault):
        cache.check()


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
SALTS = st.sampled_from([b"", b"", b"other"])


class RadixMachine(RuleBasedStateMachine):
    """Against the record of what each page holds."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 8]))
    def start(self, page_size: int) -> None:
        self.tree = Tree(page_size)
        self.held: list[tuple[tuple[Node, Node | None], bytes, list[int]]] = []

    @rule(tokens=TOKENS, salt=SALTS)
    def insert(self, tokens: list[int], salt: bytes) -> None:
        self.tree.insert(tokens, salt)

    @rule(tokens=TOKENS, salt=SALTS)
    def hold(self, tokens: list[int], salt: bytes) -> None:
        self.held.append((self.tree.hold(tokens, salt), salt, tokens))

    @rule(which=st.integers(0, 100))
    def let_go(self, which: int) -> None:
        if self.held:
            self.tree.let_go(self.held.pop(which % len(self.held))[0])

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        unlocked = self.tree.cache.num_pages - self.tree.cache.num_locked_pages
        assert len(self.tree.evict(count)) == min(count, unlocked)

    @rule(tokens=TOKENS, salt=SALTS)
    def match_equals_the_oracle(self, tokens: list[int], salt: bytes) -> None:
        match = self.tree.match(tokens, salt)
        assert match.num_tokens == self.tree.longest(tokens, salt)
        for index, page in enumerate(match.page_ids, 1):
            assert self.tree.contents[page] == (salt, tuple(tokens[: index * self.tree.size]))
        if match.partial_page is not None:
            owner, content = self.tree.contents[match.partial_page]
            assert owner == salt
            assert content[: match.num_tokens] == tuple(tokens[: match.num_tokens])

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.cache.check()
        assert {page for node in self.tree.cache.nodes() for page in node.page_ids} == self.tree.contents.keys()
        for _, salt, tokens in self.held:
            full = len(tokens) // self.tree.size * self.tree.size
            assert self.tree.longest(tokens, salt) >= full


def test_any_history_finds_the_longest_prefix(stateful: settings) -> None:
    run_state_machine_as_test(RadixMachine, settings=stateful)
