"""What the device knows of each running request: its tokens, its page table and how to sample it, by slot.

A scheduled batch brings only what changed; everything a step needs beyond that is expanded here, in a few vectorised
operations, from the list of (slot, start, count). Sampled tokens are written back without a detour over the host.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True)
class DecodeInputs:
    """A step of one token per row, looked up on the device from the slots alone. R rows."""

    slots: torch.Tensor  # [R] int64
    input_ids: torch.Tensor  # [R] int32
    positions: torch.Tensor  # [R] int64
    page_table: torch.Tensor  # [R, max pages] int64
    cells: torch.Tensor  # [R] int64
    temperatures: torch.Tensor  # [R] float32
    seeds: torch.Tensor  # [R] int64


class RequestTable:
    """State of `num_slots` requests of at most `context_length` tokens each.

    One slot more, `idle_slot`, fills up batches of a fixed size. It is always at position 0 of `idle_page`.
    """

    def __init__(
        self, num_slots: int, context_length: int, page_size: int, device: torch.device, idle_page: int = 0
    ) -> None:
        self.idle_slot = num_slots
        self._page_size = page_size
        self._device = device
        # one column more than the context: the token sampled at the very end has a place too
        self._tokens = torch.zeros(num_slots + 1, context_length + 1, dtype=torch.int32, device=device)
        num_pages = -(-context_length // page_size)
        self._page_table = torch.zeros(num_slots + 1, num_pages, dtype=torch.int64, device=device)
        self._page_table[self.idle_slot] = idle_page
        self._num_computed = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._temperatures = torch.zeros(num_slots + 1, dtype=torch.float32, device=device)
        self._device_seeds = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._seeds = [0] * num_slots
        self._prompt_lengths = [0] * num_slots

    def apply(self, batch: ScheduledBatch) -> None:
        """Take in the batch's new rows and new pages."""
        for new in batch.new_rows:
            self._take(new)
        if batch.new_pages:
            entries = {  # an entry named twice takes the later page, which a scatter would not promise
                (pages.slot, index): page_id
                for pages in batch.new_pages
                for index, page_id in enumerate(pages.page_ids, pages.first_index)
            }
            slots, indices, page_ids = self._send([*zip(*entries, strict=True), tuple(entries.values())])
            self._page_table[slots, indices] = page_ids

    def _take(self, new: NewRow) -> None:
        self._tokens[new.slot, : len(new.token_ids)] = self._send(new.token_ids)
        self._temperatures[new.slot] = new.params.temperature
        self._device_seeds[new.slot] = new.seed
        self._params[new.slot] = new.params
        self._seeds[new.slot] = new.seed
        self._prompt_lengths[new.slot] = new.num_prompt_tokens

    def _send(self, numbers: Sequence[object]) -> torch.Tensor:
        """Integers to the device, int64, without waiting for it."""
        if self._device.type == "cpu":
            return torch.tensor(numbers)
        return torch.tensor(numbers, pin_memory=True).to(self._device, non_blocking=True)

    def expand(self, rows: list[Row]) -> StepInputs:
        """The tensors of a step that computes `rows`."""
        device = self._device
        starts, counts = [row.start for row in rows], [row.count for row in rows]
        slot_of_row, start_of_row, count_of_row = self._send([[row.slot for row in rows], starts, counts])
        self._num_computed[slot_of_row] = start_of_row + count_of_row
        num_tokens = sum(counts)
        if num_tokens == len(rows):  # one token each: rows are tokens
            slots, positions = slot_of_row, start_of_row
        else:
            first_of_row = count_of_row.cumsum(0) - count_of_row
            row_of_token = torch.repeat_interleave(count_of_row, output_size=num_tokens)
            slots = slot_of_row[row_of_token]
            positions = torch.arange(num_tokens, device=device) + (start_of_row - first_of_row)[row_of_token]
        pages = self._page_table[slots, positions // self._page_size]
        return StepInputs(
            input_ids=self._tokens[slots, positions],
            positions=positions,
            logit_rows=self._send(_last_tokens_of_sampling_rows(rows)).to(torch.int64),
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
            params=self.params_of(rows),
            seeds=[self._seeds[slot] for slot in slots],
            positions=[row.start + row.count for row in rows],
            prompt_lengths=[self._prompt_lengths[slot] for slot in slots],
            history=lambda index: self._tokens[slots[index], : rows[index].start + rows[index].count],
        )

    def params_of(self, rows: list[Row]) -> list[SamplingParams]:
        return [self._known(row.slot) for row in rows]

    def _known(self, slot: int) -> SamplingParams:
        params = self._params[slot]
        if params is None:
            raise ValueError(f"slot {slot} samples but no request was ever placed in it")
        return params

    def append(self, rows: list[Row], token_ids: torch.Tensor) -> None:
        """Write the sampled tokens, one per row, behind the tokens just computed. token_ids [len(rows)]"""
        slots, positions = self._send([[row.slot for row in rows], [row.start + row.count for row in rows]])
        self._tokens[slots, positions] = token_ids.to(torch.int32)

    def decode_inputs(self, slots: torch.Tensor) -> DecodeInputs:
        """The next token of each slot. slots [R] int64, on the device; nothing here depends on the host."""
        positions = self._num_computed[slots]
        page_table = self._page_table[slots]
        pages = page_table.gather(1, (positions // self._page_size).unsqueeze(1)).squeeze(1)
        return DecodeInputs(
            slots=slots,
            input_ids=self._tokens[slots, positions],
            positions=positions,
            page_table=page_table,
            cells=pages * self._page_size + positions % self._page_size,
            temperatures=self._temperatures[slots],
            seeds=self._device_seeds[slots],
        )

    def advance(self, inputs: DecodeInputs, token_ids: torch.Tensor) -> None:
        """Append the sampled tokens [R] and move every slot on by one, but for the idle one."""
        self._tokens[inputs.slots, inputs.positions + 1] = token_ids.to(torch.int32)
        self._num_computed[inputs.slots] = inputs.positions + (inputs.slots != self.idle_slot)


def _last_tokens_of_sampling_rows(rows: list[Row]) -> list[int]:
    indices, end = [], 0
    for row in rows:
        end += row.count
        if row.samples:
            indices.append(end - 1)
    return indices
