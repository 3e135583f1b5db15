"""Prefill steps as CUDA graphs, one for each of many token counts, whichever rows the tokens belong to.

Launching every kernel of such a step costs the host more time than a small model's kernels take, and a product of a new
shape may bring a kernel that the driver loads only once the device has done all that was queued before. The host sends
the rows as one list of integers, and the graph computes everything else from it. Padding tokens belong to the idle
slot, whose cells no request reads. Knows tensors and rows, no request.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mini_sglang.attention.base import PrefillGraphBackend
from mini_sglang.attention.kv_pool import staged
from mini_sglang.execution.cuda_graph import GraphStep, StepGraphs
from mini_sglang.execution.drafts import draws
from mini_sglang.execution.request_table import RequestTable, sampled_from, spread
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.scheduling.batch import Row

_LARGE = 2048  # tokens; attention is a small part of smaller steps, so they have no second graph for long contexts


@dataclass(frozen=True)
class PrefillInputs:
    """The inputs of one captured step, which samples at most R tokens."""

    forward: ForwardBatch
    slots: torch.Tensor  # [R] int64: those whose tokens are sampled, padded with the idle slot
    positions: torch.Tensor  # [R] int32: those of the tokens that are sampled


def prefill_graphs(
    step: Callable[[PrefillInputs], GraphStep], inputs: Sequence[PackedInputs], max_tokens: int, pool: Any
) -> list[PrefillGraphs]:
    """The graphs of all steps of up to `max_tokens` tokens; the first that fits a step is the fastest."""
    sizes = prefill_sizes(max_tokens)
    large = [size for size in sizes if size > _LARGE]
    of_inputs = [(packed, large if packed.long else sizes) for packed in inputs]
    return [PrefillGraphs(step, packed, sizes, pool) for packed, sizes in of_inputs if sizes]


class PrefillGraphs:
    """Graphs of `step` over `inputs`, for `sizes` (ascending) tokens, in `pool`'s memory."""

    def __init__(
        self, step: Callable[[PrefillInputs], GraphStep], inputs: PackedInputs, sizes: list[int], pool: Any
    ) -> None:
        self._inputs = inputs
        self._graphs = StepGraphs(
            lambda size: step(inputs.of_size(size)), sizes, "prefill", pool, prepare=lambda size: inputs.send([], size)
        )

    def fits(self, rows: list[Row]) -> bool:
        """Whether a graph computes these rows, in tiles that suit contexts of their length."""
        tokens = sum(row.count for row in rows)
        if len(rows) > self._inputs.max_rows or tokens > self._graphs.sizes[-1]:
            return False
        if sum(row.samples for row in rows) > self._inputs.max_samples(self._graphs.size_for(tokens)):
            return False
        longest = max((row.start + row.count for row in rows if row.count > 1), default=0)
        return tokens <= _LARGE or self._inputs.long or longest <= self._inputs.backend.short_context

    def replay(self, rows: list[Row]) -> GraphStep:
        """Run one step that `fits`. The result has one entry for each token that is sampled."""
        size = self._graphs.size_for(sum(row.count for row in rows))
        self._inputs.send(rows, size)
        return self._graphs.replay(size, sum(row.samples for row in rows))


class PackedInputs:
    """The rows of a step as one list of integers on the device, from which the step's tensors are computed there.

    The list has slot, start and count of each row, then of each token that is sampled its slot, its position and the
    token before it, then the tiles of prefill attention, which suit long contexts if they are `long`.
    """

    def __init__(
        self,
        table: RequestTable,
        backend: PrefillGraphBackend,
        max_rows: int,
        max_tokens: int,
        most_samples: int,
        *,
        long: bool = False,
    ) -> None:
        self.backend, self.max_rows, self.long = backend, max_rows, long
        self._table, self._most_samples = table, most_samples
        tiles = backend.max_prefill_tiles(max_rows, max_tokens, long=long)
        length = 3 * (max_rows + 1) + 3 * most_samples + tiles
        self._packed = torch.zeros(length, dtype=torch.int64, device=table.tokens.device)

    def max_samples(self, size: int) -> int:
        """The most tokens that a step of `size` tokens samples: all of them, but for steps that are mostly prompts."""
        return min(size, self._most_samples if size <= _LARGE else self.max_rows)

    def send(self, rows: list[Row], size: int) -> None:
        """Send the rows of the next step, padded to `size` tokens."""
        idle, spare = self._table.idle_slot, self.max_rows - len(rows)
        starts, counts = [row.start for row in rows], [row.count for row in rows]
        sampling = draws(rows)
        spare_samples = self.max_samples(size) - len(sampling)
        packed = [row.slot for row in rows] + [idle] * (spare + 1)
        packed += starts + [0] * (spare + 1)
        packed += counts + [0] * spare + [size - sum(counts)]
        packed += [row.slot for row in sampling] + [idle] * spare_samples
        packed += [row.start + row.count for row in sampling] + [0] * spare_samples
        packed += sampled_from(rows) + [0] * spare_samples
        tiles = self.backend.max_prefill_tiles(self.max_rows, size, long=self.long)
        packed += self.backend.prefill_tiles(starts, counts, tiles, idle_row=self.max_rows, long=self.long)
        self._packed[: len(packed)].copy_(staged(packed, self._packed.device), non_blocking=True)

    def of_size(self, size: int) -> PrefillInputs:
        """Compute the tensors of a step of `size` tokens from the list, and advance its rows in the table."""
        table, rows, samples = self._table, self.max_rows, self.max_samples(size)
        number_of_tiles = self.backend.max_prefill_tiles(rows, size, long=self.long)
        lengths = [3 * (rows + 1), 3 * samples, number_of_tiles]
        per_row, per_sample, tiles = self._packed[: sum(lengths)].split(lengths)
        slots, starts, counts = per_row.view(3, rows + 1)
        sampling_slots, sampling_positions, logits_indices = per_sample.view(3, samples)
        slot_of_token, positions = spread(slots, starts, counts, size)
        positions = torch.where(slot_of_token == table.idle_slot, 0, positions)
        table.num_computed[slots] = torch.where(slots == table.idle_slot, 0, starts + counts)
        plan = self.backend.plan_prefill(
            table.page_table[slots],
            table.cells(slot_of_token, positions),
            starts,
            counts,
            tiles,
            long=self.long,
        )
        input_ids = table.tokens[slot_of_token, positions]
        return PrefillInputs(
            ForwardBatch(input_ids, positions, logits_indices, plan), sampling_slots, sampling_positions.int()
        )


def packed_inputs(
    table: RequestTable, backend: PrefillGraphBackend, max_rows: int, max_tokens: int, most_samples: int
) -> list[PackedInputs]:
    """Inputs in tiles for short contexts, and in those for long ones where they differ."""
    kinds = (False, True) if backend.short_context < sys.maxsize else (False,)
    return [PackedInputs(table, backend, max_rows, max_tokens, most_samples, long=long) for long in kinds]


def prefill_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens, each 32 more than the last, above 2,048 by up to a sixteenth; the last is `max_tokens`."""
    sizes = [32]
    while sizes[-1] < max_tokens:
        sizes.append(sizes[-1] + (32 if sizes[-1] < _LARGE else 1 << sizes[-1].bit_length() - 5))
    return [*sizes[:-1], max_tokens]
