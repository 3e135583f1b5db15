"""Pages arrive in the step they were put in for, its tokens where the host looks for them, round the rings."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from mini_sglang.execution.pinned_ring import DEPTH, PinnedRing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def left(tokens: memoryview[int]) -> list[int]:
    """What lies there once the device has done what it was told."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return tokens.tolist()


def test_each_step_takes_its_own_pages_though_several_wait() -> None:
    table = torch.zeros(4, 5, dtype=torch.int64, device=DEVICE)
    ring = PinnedRing(table, rows=3)
    for step in range(2 * DEPTH + 3):  # twice round the ring, up to three steps ahead
        ahead = step % 3 + 1
        for waiting in range(ahead):
            ring.put({(step + waiting) % 20: 100 * step + waiting} if waiting % 2 == 0 else {})
        for waiting in range(ahead):
            before = table.clone()
            ring.take()
            if waiting % 2 == 0:
                before.view(-1)[(step + waiting) % 20] = 100 * step + waiting
            assert torch.equal(table, before)


def test_tokens_of_steps_that_were_not_read_stay_where_they_were_left() -> None:
    ring = PinnedRing(torch.zeros(1, 4, dtype=torch.int64, device=DEVICE), rows=5)
    unread: deque[tuple[memoryview[int], list[int]]] = deque()
    for step in range(2 * DEPTH + 3):
        rows = step % 5 + 1
        ring.put({})
        unread.append((ring.tokens(rows), [10 * step + row for row in range(rows)]))
        ring.take()
        spare = 0 if rows == 5 else 1  # rows of the graph that nobody asked for
        ring.leave(torch.arange(10 * step, 10 * step + rows + spare, device=DEVICE))
        if len(unread) == DEPTH:
            tokens, expected = unread.popleft()
            assert left(tokens) == expected


def test_steps_that_were_computed_while_capturing_do_not_count() -> None:
    table = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
    ring = PinnedRing(table, rows=2)
    for _ in range(5):
        ring.take()
    ring.restart()
    ring.put({3: 7, 0: 9})
    ring.take()
    ring.leave(torch.tensor([5], device=DEVICE))
    assert table.tolist() == [[9, 0, 0, 7]]
    assert left(ring.tokens(1)) == [5]


def test_more_pages_than_rows_are_refused() -> None:
    ring = PinnedRing(torch.zeros(1, 4, dtype=torch.int64, device=DEVICE), rows=2)
    with pytest.raises(ValueError, match="at most 2 new pages, got 3"):
        ring.put({0: 1, 1: 2, 2: 3})
