"""Pages that the host hands to a step arrive in that step, round the ring and after another start."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.execution.page_updates import DEPTH, PageUpdates


def test_each_step_takes_its_own_pages_though_several_wait() -> None:
    table = torch.zeros(4, 5, dtype=torch.int64)
    updates = PageUpdates(table, capacity=3)
    for step in range(2 * DEPTH + 3):  # twice round the ring, up to three steps ahead
        ahead = step % 3 + 1
        for waiting in range(ahead):
            updates.put({(step + waiting) % 20: 100 * step + waiting} if waiting % 2 == 0 else {})
        for waiting in range(ahead):
            before = table.clone()
            updates.take()
            if waiting % 2 == 0:
                before.view(-1)[(step + waiting) % 20] = 100 * step + waiting
            assert torch.equal(table, before)


def test_steps_that_were_computed_while_capturing_do_not_count() -> None:
    table = torch.zeros(1, 4, dtype=torch.int64)
    updates = PageUpdates(table, capacity=2)
    for _ in range(5):
        updates.take()
    updates.restart()
    updates.put({3: 7, 0: 9})
    updates.take()
    assert table.tolist() == [[9, 0, 0, 7]]


def test_more_pages_than_rows_are_refused() -> None:
    updates = PageUpdates(torch.zeros(1, 4, dtype=torch.int64), capacity=2)
    with pytest.raises(ValueError, match="at most 2 new pages, one per row, got 3"):
        updates.put({0: 1, 1: 2, 2: 3})
