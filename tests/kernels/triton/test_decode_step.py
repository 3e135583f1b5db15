"""The kernel looks up what its twin looks up, for any slots at any positions."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.decode_step import (
    decode_inputs,
    decode_inputs_reference,
    leave_tokens,
    leave_tokens_reference,
    take_pages,
    take_pages_reference,
)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_same_inputs_as_the_twin(device: torch.device, page_size: int) -> None:
    generator = torch.Generator().manual_seed(page_size)
    slots_there, context = 5, 700
    num_pages = -(-context // page_size)
    num_computed = torch.tensor([0, 1, 15, 16, context - 1], device=device)
    tokens = torch.randint(0, 1000, (slots_there, context + 1), generator=generator, dtype=torch.int32).to(device)
    page_table = torch.randint(0, 10_000, (slots_there, num_pages), generator=generator).to(device)
    slots = torch.tensor([3, 0, 4, 4, 1, 2], device=device)
    got = decode_inputs(slots, num_computed, tokens, page_table, page_size)
    want = decode_inputs_reference(slots, num_computed, tokens, page_table, page_size)
    for name in ("input_ids", "positions", "lengths", "cells"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine.dtype == theirs.dtype
        assert mine.tolist() == theirs.tolist(), name
    for row, length in enumerate(want.lengths.tolist()):
        pages = -(-length // page_size)
        assert torch.equal(got.page_table[row, :pages], want.page_table[row, :pages])


@pytest.mark.parametrize("taken", [0, 2, 7])
@pytest.mark.parametrize("number", [0, 1, 130, 300])
def test_the_same_pages_as_the_twin(device: torch.device, number: int, taken: int) -> None:
    depth, capacity, generator = 3, 300, torch.Generator().manual_seed(number)
    ring = torch.full((depth, 1 + 2 * capacity), 10**9)  # what is no part of the entry lies outside of any table
    table = torch.randint(0, 1000, (40, 25), generator=generator)
    entry = ring[taken % depth]
    entry[0] = number
    entry[1 : 1 + number] = torch.randperm(table.numel(), generator=generator)[:number]
    entry[1 + capacity :][:number] = torch.arange(number)
    counted, mine, theirs = torch.tensor([taken], device=device), table.to(device), table.clone()
    take_pages(ring.pin_memory() if device.type == "cuda" else ring, counted, mine)
    take_pages_reference(ring, torch.tensor([taken]), theirs)
    assert mine.tolist() == theirs.tolist()
    assert counted.tolist() == [taken + 1]


@pytest.mark.parametrize("rows", [1, 128, 300])
def test_the_same_entry_as_the_twin(device: torch.device, rows: int) -> None:
    token_ids = torch.arange(7, 7 + rows, device=device)
    ring = torch.full((3, 300), -1)
    for begun in (1, 3, 8):
        mine, theirs = ring.pin_memory() if device.type == "cuda" else ring.clone(), ring.clone()
        leave_tokens(token_ids, torch.tensor([begun], device=device), mine)
        if device.type == "cuda":
            torch.cuda.synchronize()
        leave_tokens_reference(token_ids, torch.tensor([begun]), theirs)
        assert mine.tolist() == theirs.tolist()
