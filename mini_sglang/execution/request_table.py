"""What the device knows of each running request: its tokens, its page table and how to sample it, by slot.

A scheduled batch brings only what changed; everything a step needs beyond that is expanded here, in a few vectorised
operations, from the list of (slot, start, count). Sampled tokens are written back without a detour over the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.execution.sampler import SamplingBatch
from mini_sglang.request import SamplingParams
from mini_sglang.scheduling.batch import NewRow, Row, ScheduledBatch


@dataclass(frozen=True)
class StepInputs:
    """One step, expanded. R rows, T tokens in row order, S rows that sample."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    logit_rows: torch.Tensor  # [S] int64: index among the T tokens of each sampling row's last token
    attention: AttentionMetadata


class RequestTable:
    """State of `num_slots` requests of at most `context_length` tokens each."""

    def __init__(self, num_slots: int, context_length: int, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        # one column more than the context: the token sampled at the very end has a place too
        self._tokens = torch.zeros(num_slots, context_length + 1, dtype=torch.int32, device=device)
        num_pages = -(-context_length // page_size)
        self._page_table = torch.zeros(num_slots, num_pages, dtype=torch.int64, device=device)
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._seeds = [0] * num_slots
        self._prompt_lengths = [0] * num_slots

    def apply(self, batch: ScheduledBatch) -> None:
        """Take in the batch's new rows and new pages."""
        for new in batch.new_rows:
            self._tokens[new.slot, : len(new.token_ids)] = torch.tensor(new.token_ids, dtype=torch.int32)
            self._take(new)
        for pages in batch.new_pages:
            span = slice(pages.first_index, pages.first_index + len(pages.page_ids))
            self._page_table[pages.slot, span] = torch.tensor(pages.page_ids)

    def _take(self, new: NewRow) -> None:
        self._params[new.slot] = new.params
        self._seeds[new.slot] = new.seed
        self._prompt_lengths[new.slot] = new.num_prompt_tokens

    def expand(self, rows: list[Row]) -> StepInputs:
        """The tensors of a step that computes `rows`."""
        device = self._device
        starts, counts = [row.start for row in rows], [row.count for row in rows]
        slot_of_row = torch.tensor([row.slot for row in rows], device=device)
        start_of_row = torch.tensor(starts, device=device)
        num_tokens = sum(counts)
        if num_tokens == len(rows):  # one token each: rows are tokens
            slots, positions = slot_of_row, start_of_row
        else:
            count_of_row = torch.tensor(counts, device=device)
            first_of_row = count_of_row.cumsum(0) - count_of_row
            row_of_token = torch.repeat_interleave(count_of_row, output_size=num_tokens)
            slots = slot_of_row[row_of_token]
            positions = torch.arange(num_tokens, device=device) + (start_of_row - first_of_row)[row_of_token]
        pages = self._page_table[slots, positions // self._page_size]
        return StepInputs(
            input_ids=self._tokens[slots, positions],
            positions=positions,
            logit_rows=torch.tensor(_last_tokens_of_sampling_rows(rows), dtype=torch.int64, device=device),
            attention=AttentionMetadata(
                starts=starts,
                counts=counts,
                page_table=self._page_table[slot_of_row],
                cells=pages * self._page_size + positions % self._page_size,
            ),
        )

    def sampling(self, rows: list[Row]) -> SamplingBatch:
        """How to sample `rows` (all of them sample), each at position start + count."""
        slots = [row.slot for row in rows]
        return SamplingBatch(
            params=[self._known(slot) for slot in slots],
            seeds=[self._seeds[slot] for slot in slots],
            positions=[row.start + row.count for row in rows],
            prompt_lengths=[self._prompt_lengths[slot] for slot in slots],
            history=lambda index: self._tokens[slots[index], : rows[index].start + rows[index].count],
        )

    def _known(self, slot: int) -> SamplingParams:
        params = self._params[slot]
        if params is None:
            raise ValueError(f"slot {slot} samples but no request was ever placed in it")
        return params

    def append(self, rows: list[Row], token_ids: torch.Tensor) -> None:
        """Write the sampled tokens, one per row, behind the tokens just computed. token_ids [len(rows)]"""
        slots = torch.tensor([row.slot for row in rows], device=self._device)
        positions = torch.tensor([row.start + row.count for row in rows], device=self._device)
        self._tokens[slots, positions] = token_ids.to(torch.int32)


def _last_tokens_of_sampling_rows(rows: list[Row]) -> list[int]:
    indices, end = [], 0
    for row in rows:
        end += row.count
        if row.samples:
            indices.append(end - 1)
    return indices
