"""What the device knows of each running request: its tokens, its page table and how to sample it, by slot.

A scheduled batch brings only what changed; everything a step needs beyond that is expanded here, in a few vectorised
operations, from the list of (slot, start, count). Sampled tokens are written back without a detour over the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.transfer import send
from mini_sglang.execution.sampler import SamplingBatch, is_biased
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import NewRow, Row, ScheduledBatch


@dataclass(frozen=True)
class StepInputs:
    """One step, expanded. R rows, T tokens in row order, S rows that sample."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    logit_rows: torch.Tensor  # [S] int64: index among the T tokens of each sampling row's last token
    attention: AttentionMetadata


class RequestTable:
    """State of `num_slots` requests of at most `context_length` tokens each.

    One slot more, `idle_slot`, fills up batches of a fixed size. It is always at position 0 of `idle_page`. Graphs read
    and advance `tokens` [slots, context + 1] int32, `page_table` [slots, max pages] int64 and `num_computed` [slots]
    int64 themselves.
    """

    def __init__(
        self, num_slots: int, context_length: int, page_size: int, device: torch.device, idle_page: int
    ) -> None:
        self.idle_slot = num_slots
        self.page_size = page_size
        self._device = device
        # one column more than the context: the token sampled at the very end has a place too
        self.tokens = torch.zeros(num_slots + 1, context_length + 1, dtype=torch.int32, device=device)
        num_pages = -(-context_length // page_size)
        self._width = num_pages
        self.page_table = torch.zeros(num_slots + 1, num_pages, dtype=torch.int64, device=device)
        self.page_table[self.idle_slot] = idle_page
        self.num_computed = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._seeds = [0] * num_slots
        self._prompt_lengths = [0] * num_slots
        self._end_ids: list[list[int]] = [[]] * num_slots  # held back by `min_tokens`
        self._masks: dict[int, bytes] = {}  # of this step's rows under a grammar
        self._wanting_more: set[int] = set()  # slots with a bias or log-probabilities

    @staticmethod
    def bytes_per_slot(context_length: int, page_size: int) -> int:
        """What one slot takes of the tables on the device."""
        tokens, pages = context_length + 1, -(-context_length // page_size)
        return tokens * torch.int32.itemsize + (pages + 1) * torch.int64.itemsize

    def take_rows(self, batch: ScheduledBatch) -> None:
        """Take in the batch's new rows."""
        self._masks = batch.masks
        for new in batch.new_rows:
            self._take(new)

    def places_of(self, batch: ScheduledBatch) -> dict[int, int]:
        """New pages by their place in the flat page table; one that is named twice takes the later page."""
        return {
            pages.slot * self._width + index: page_id
            for pages in batch.new_pages
            for index, page_id in enumerate(pages.page_ids, pages.first_index)
        }

    def write_pages(self, pages: Mapping[int, int]) -> None:
        """Write pages, by place, into the page table."""
        if pages:
            places, page_ids = self.send([tuple(pages), tuple(pages.values())])
            self.page_table.view(-1).index_copy_(0, places, page_ids)

    def _take(self, new: NewRow) -> None:
        self.tokens[new.slot, : len(new.token_ids)] = self.send(new.token_ids)
        self._params[new.slot] = new.params
        self._seeds[new.slot] = new.seed
        self._prompt_lengths[new.slot] = new.num_prompt_tokens
        self._end_ids[new.slot] = new.end_token_ids
        wants_more = is_biased(new.params) or new.params.logprobs is not None
        (self._wanting_more.add if wants_more else self._wanting_more.discard)(new.slot)

    def send(self, numbers: Sequence[object], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Numbers to the device, integers as int64 unless `dtype` says otherwise, without waiting for it."""
        return send(numbers, self._device, dtype)

    def expand(self, rows: list[Row]) -> StepInputs:
        """The tensors of a step that computes `rows`."""
        starts, counts = [row.start for row in rows], [row.count for row in rows]
        slot_of_row, start_of_row, count_of_row = self.send([[row.slot for row in rows], starts, counts])
        self.num_computed[slot_of_row] = start_of_row + count_of_row
        num_tokens = sum(counts)
        slots, positions = slot_of_row, start_of_row
        if num_tokens > len(rows):  # else one token each: rows are tokens
            slots, positions = spread(slot_of_row, start_of_row, count_of_row, num_tokens)
        return StepInputs(
            input_ids=self.tokens[slots, positions],
            positions=positions,
            logit_rows=self.send(last_tokens_of_sampling_rows(rows), torch.int64),
            attention=AttentionMetadata(
                starts=starts,
                counts=counts,
                page_table=self.page_table[slot_of_row],
                cells=self.cells(slots, positions),
            ),
        )

    def cells(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where in the pool the token of each slot [T] at its position [T] lies, as page id * page_size + offset [T]"""
        return self.page_table[slots, positions // self.page_size] * self.page_size + positions % self.page_size

    def sampling(self, rows: list[Row]) -> SamplingBatch:
        """How to sample `rows` (all of them sample), each at position start + count."""
        slots = [row.slot for row in rows]
        return SamplingBatch(
            params=self.params_of(rows),
            seeds=[self._seeds[slot] for slot in slots],
            positions=[row.start + row.count for row in rows],
            prompt_lengths=[self._prompt_lengths[slot] for slot in slots],
            history=lambda index: self.tokens[slots[index], : rows[index].start + rows[index].count],
            masks={
                index: self._mask(row.slot) for index, row in enumerate(rows) if self._known(row.slot).is_constrained
            },
            held_back={
                index: self._end_ids[row.slot]
                for index, row in enumerate(rows)
                if row.start + row.count - self._prompt_lengths[row.slot] < self._known(row.slot).min_tokens
            },
        )

    def want_only_tokens(self, slots: Iterable[int]) -> bool:
        """Whether these slots want no more than what a device draws by itself: no bias, no log-probabilities."""
        return self._wanting_more.isdisjoint(slots)

    def prompt_alternatives(self, slot: int) -> int | None:
        """How many alternatives the log-probabilities of the slot's prompt come with; None: they are not asked for."""
        return self._known(slot).prompt_logprobs

    def prompt_length(self, slot: int) -> int:
        return self._prompt_lengths[slot]

    def params_of(self, rows: list[Row]) -> list[SamplingParams]:
        return [self._known(row.slot) for row in rows]

    def _known(self, slot: int) -> SamplingParams:
        params = self._params[slot]
        if params is None:
            raise ValueError(f"slot {slot} samples but no request was ever placed in it")
        return params

    def _mask(self, slot: int) -> bytes:
        mask = self._masks.get(slot)
        if mask is None:
            raise ValueError(f"slot {slot} samples under a grammar but the step has no mask for it")
        return mask

    def append(self, rows: list[Row], token_ids: torch.Tensor) -> None:
        """Write the sampled tokens, one per row, behind the tokens just computed. token_ids [len(rows)]"""
        slots, positions = self.send([[row.slot for row in rows], [row.start + row.count for row in rows]])
        self.tokens[slots, positions] = token_ids.to(torch.int32)


def spread(
    slots: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `counts` tokens, `num_tokens` in all, from `starts` on -> slot and position of each token [T]

    slots, starts, counts [R] int64, on the device; nothing is read back from it.
    """
    row_of_token = torch.repeat_interleave(counts, output_size=num_tokens)
    first_of_row = counts.cumsum(0) - counts
    positions = torch.arange(num_tokens, device=counts.device) + (starts - first_of_row)[row_of_token]
    return slots[row_of_token], positions


def last_tokens_of_sampling_rows(rows: list[Row]) -> list[int]:
    indices, end = [], 0
    for row in rows:
        end += row.count
        if row.samples:
            indices.append(end - 1)
    return indices
