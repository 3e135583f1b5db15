"""The state of each running request by slot: its tokens and page table on the device, its parameters on the host.

A scheduled batch brings only what changed. Everything else that a step needs is expanded here, in a few vectorised
operations, from the list of (slot, start, count). Sampled tokens are written back without a detour over the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import send
from mini_sglang.scheduling.batch import NewPages, NewRequest, Row


@dataclass(frozen=True)
class StepInputs:
    """One step, expanded. R rows, T tokens in row order, S tokens to sample."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    logits_indices: torch.Tensor  # [S] int64: index among the T tokens of each whose successor is sampled
    attention: AttentionMetadata


class RequestTable:
    """State of `num_slots` requests of at most `context_length` tokens each.

    One more slot, `idle_slot`, pads batches of a fixed size. It is always at position 0 of `idle_page`. Graphs read and
    advance `tokens` [slots, context + 1] int32, `page_table` [slots, max pages] int64 and `num_computed` [slots] int64
    themselves.
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
        self._requests: list[NewRequest | None] = [None] * num_slots
        self._asking: set[int] = set()  # slots whose requests ask for log-probabilities of the prompt

    @staticmethod
    def bytes_per_slot(context_length: int, page_size: int) -> int:
        """Bytes of the device's tables that belong to one slot."""
        tokens, pages = context_length + 1, -(-context_length // page_size)
        return tokens * torch.int32.itemsize + (pages + 1) * torch.int64.itemsize

    def take(self, new_requests: Sequence[NewRequest]) -> None:
        """Take in the requests that get a slot with this step."""
        for new in new_requests:
            self.tokens[new.slot, : len(new.token_ids)] = self.send(new.token_ids)
            self._requests[new.slot] = new
            asks = new.params.prompt_logprobs is not None
            (self._asking.add if asks else self._asking.discard)(new.slot)

    def request(self, slot: int) -> NewRequest:
        """Return the request in a slot, as it came. Raises ValueError if the slot never held one."""
        request = self._requests[slot]
        if request is None:
            raise ValueError(f"slot {slot} samples but no request was ever placed in it")
        return request

    def ask_prompt_logprobs(self, rows: Sequence[Row]) -> bool:
        """Whether any of these rows belongs to a request that asks for log-probabilities of its prompt."""
        return bool(self._asking) and not self._asking.isdisjoint(row.slot for row in rows)

    def places_of(self, new_pages: Sequence[NewPages]) -> dict[int, int]:
        """Map places in the flat page table to new page ids. A place that is named twice takes the later page."""
        return {
            pages.slot * self._width + index: page_id
            for pages in new_pages
            for index, page_id in enumerate(pages.page_ids, pages.first_index)
        }

    def write_pages(self, pages: Mapping[int, int]) -> None:
        """Write page ids into the page table at their places."""
        if pages:
            places, page_ids = self.send([tuple(pages), tuple(pages.values())])
            self.page_table.view(-1).index_copy_(0, places, page_ids)

    def send(self, numbers: Sequence[object], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Copy numbers to the device without waiting for it; integers become int64 unless `dtype` is given."""
        return send(numbers, self._device, dtype)

    def expand(self, rows: list[Row]) -> StepInputs:
        """Return the tensors of a step that computes `rows`, and advance `num_computed`."""
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
            logits_indices=self.send(sampled_from(rows), torch.int64),
            attention=AttentionMetadata(
                starts=starts,
                counts=counts,
                page_table=self.page_table[slot_of_row],
                cells=self.cells(slots, positions),
            ),
        )

    def cells(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """slots [T], positions [T] -> the tokens' cells in the pool, page id * page_size + offset [T] int64"""
        return self.page_table[slots, positions // self.page_size] * self.page_size + positions % self.page_size

    def append(self, rows: list[Row], token_ids: torch.Tensor) -> None:
        """Write the sampled tokens, one per row, behind the tokens just computed. token_ids [len(rows)]"""
        slots, positions = self.send([[row.slot for row in rows], [row.start + row.count for row in rows]])
        self.tokens[slots, positions] = token_ids.to(torch.int32)


def spread(
    slots: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand rows of `counts` tokens, `num_tokens` in all, from `starts` on -> slot and position of each token [T]

    slots, starts, counts [R] int64, on the device. Nothing is read back from it.
    """
    row_of_token = torch.repeat_interleave(counts, output_size=num_tokens)
    first_of_row = counts.cumsum(0) - counts
    positions = torch.arange(num_tokens, device=counts.device) + (starts - first_of_row)[row_of_token]
    return slots[row_of_token], positions


def sampled_from(rows: list[Row]) -> list[int]:
    """Indices among the step's tokens of those whose successors are sampled."""
    indices: list[int] = []
    end = 0
    for row in rows:
        end += row.count
        indices += range(end - row.samples, end)
    return indices
