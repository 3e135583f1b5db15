"""The kernels around a decode step do what their twins do, for any slots at any positions."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.decode_step import (
    decode_inputs,
    decode_inputs_reference,
    update_page_table,
    update_page_table_reference,
    write_tokens,
    write_tokens_reference,
)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_decode_inputs_equal_the_twins(device: torch.device, page_size: int) -> None:
    generator = torch.Generator().manual_seed(page_size)
    num_slots, context = 5, 700
    num_pages = -(-context // page_size)
    num_computed = torch.tensor([0, 1, 15, 16, context - 1], device=device)
    tokens = torch.randint(0, 1000, (num_slots, context + 1), generator=generator, dtype=torch.int32).to(device)
    page_table = torch.randint(0, 10_000, (num_slots, num_pages), generator=generator).to(device)
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
def test_page_table_updates_equal_the_twins(device: torch.device, number: int, taken: int) -> None:
    depth, capacity, generator = 3, 300, torch.Generator().manual_seed(number)
    ring = torch.full((depth, 1 + 2 * capacity), 10**9)  # what is no part of the entry lies outside of any table
    table = torch.randint(0, 1000, (40, 25), generator=generator)
    entry = ring[taken % depth]
    entry[0] = number
    entry[1 : 1 + number] = torch.randperm(table.numel(), generator=generator)[:number]
    entry[1 + capacity :][:number] = torch.arange(number)
    counted, mine, theirs = torch.tensor([taken], device=device), table.to(device), table.clone()
    update_page_table(ring.pin_memory() if device.type == "cuda" else ring, counted, mine)
    update_page_table_reference(ring, torch.tensor([taken]), theirs)
    assert mine.tolist() == theirs.tolist()
    assert counted.tolist() == [taken + 1]


@pytest.mark.parametrize("rows", [1, 128, 300])
def test_written_tokens_equal_the_twins(device: torch.device, rows: int) -> None:
    token_ids = torch.arange(7, 7 + rows, device=device)
    ring = torch.full((3, 300), -1)
    for step_count in (1, 3, 8):
        mine, theirs = ring.pin_memory() if device.type == "cuda" else ring.clone(), ring.clone()
        write_tokens(token_ids, torch.tensor([step_count], device=device), mine)
        if device.type == "cuda":
            torch.cuda.synchronize()
        write_tokens_reference(token_ids, torch.tensor([step_count]), theirs)
        assert mine.tolist() == theirs.tolist()
