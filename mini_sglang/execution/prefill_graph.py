"""Prefill steps as CUDA graphs, one for each of several token counts, whichever rows the tokens belong to.

Launching every kernel of such a step costs the host more time than a small model's kernels take. The host sends the
rows as one list of integers, and the graph computes everything else from it. Padding tokens belong to the idle slot,
whose cells no request reads. Knows tensors and rows, no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mini_sglang.attention.base import PrefillGraphBackend
from mini_sglang.attention.kv_pool import staged
from mini_sglang.execution.cuda_graph import GraphStep, StepGraphs
from mini_sglang.execution.request_table import RequestTable, last_tokens_of_sampling_rows, spread
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.scheduling.batch import Row

_SPARE = 64  # padding tokens that any step may compute
_FINE_UP_TO = 2048  # tokens: larger steps spend a smaller part on launches, and only the largest has a graph


@dataclass(frozen=True)
class PrefillInputs:
    """The inputs of one captured step, of which at most R rows sample."""

    forward: ForwardBatch
    slots: torch.Tensor  # [R] int64: those of the rows that sample, padded with the idle slot
    positions: torch.Tensor  # [R] int32: those of the tokens that are sampled


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
        """Whether a graph computes these rows with little padding, and its attention suits prompts of their length."""
        tokens = sum(row.count for row in rows)
        if len(rows) > self._inputs.max_rows or tokens > self._graphs.sizes[-1]:
            return False
        longest = max((row.start + row.count for row in rows if row.count > 1), default=0)
        if tokens > _FINE_UP_TO and longest > self._inputs.backend.max_graph_context:
            return False
        return self._graphs.size_for(tokens) - tokens <= max(_SPARE, min(tokens, _FINE_UP_TO) // 4)

    def replay(self, rows: list[Row]) -> GraphStep:
        """Run one step that `fits`. The result has one entry for each row that samples."""
        size = self._graphs.size_for(sum(row.count for row in rows))
        self._inputs.send(rows, size)
        return self._graphs.replay(size, sum(row.samples for row in rows))


class PackedInputs:
    """The rows of a step as one list of integers on the device, from which the step's tensors are computed there.

    The list has slot, start and count of each row, then slot, position and last token of each row that samples, then
    the tiles of prefill attention.
    """

    def __init__(self, table: RequestTable, backend: PrefillGraphBackend, max_rows: int, max_tokens: int) -> None:
        self.backend, self.max_rows = backend, max_rows
        self._table = table
        tiles = backend.max_prefill_tiles(max_rows, max_tokens)
        self._packed = torch.zeros(6 * max_rows + 3 + tiles, dtype=torch.int64, device=table.tokens.device)

    def send(self, rows: list[Row], size: int) -> None:
        """Send the rows of the next step, padded to `size` tokens."""
        idle, spare = self._table.idle_slot, self.max_rows - len(rows)
        starts, counts = [row.start for row in rows], [row.count for row in rows]
        sampling = [row for row in rows if row.samples]
        packed = [row.slot for row in rows] + [idle] * (spare + 1)
        packed += starts + [0] * (spare + 1)
        packed += counts + [0] * spare + [size - sum(counts)]
        spare = self.max_rows - len(sampling)
        packed += [row.slot for row in sampling] + [idle] * spare
        packed += [row.start + row.count for row in sampling] + [0] * spare
        packed += last_tokens_of_sampling_rows(rows) + [0] * spare
        tiles = self.backend.max_prefill_tiles(self.max_rows, size)
        packed += self.backend.prefill_tiles(starts, counts, tiles, idle_row=self.max_rows)
        self._packed[: len(packed)].copy_(staged(packed, self._packed.device), non_blocking=True)

    def of_size(self, size: int) -> PrefillInputs:
        """Compute the tensors of a step of `size` tokens from the list, and advance its rows in the table."""
        table, rows = self._table, self.max_rows
        per_row, per_sample = self._packed[: 3 * (rows + 1)], self._packed[3 * (rows + 1) : 6 * rows + 3]
        slots, starts, counts = per_row.view(3, rows + 1)
        sampling_slots, sampling_positions, logits_indices = per_sample.view(3, rows)
        slot_of_token, positions = spread(slots, starts, counts, size)
        positions = torch.where(slot_of_token == table.idle_slot, 0, positions)
        table.num_computed[slots] = torch.where(slots == table.idle_slot, 0, starts + counts)
        plan = self.backend.plan_prefill(
            table.page_table[slots],
            table.cells(slot_of_token, positions),
            starts,
            counts,
            self._packed[6 * rows + 3 :][: self.backend.max_prefill_tiles(rows, size)],
        )
        input_ids = table.tokens[slot_of_token, positions]
        return PrefillInputs(
            ForwardBatch(input_ids, positions, logits_indices, plan), sampling_slots, sampling_positions.int()
        )


def prefill_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens in steps of 64, from 512 on of 128 and from 1,024 on of 256, up to 2,048; and `max_tokens`."""
    sizes = [*range(64, 513, 64), *range(640, 1025, 128), *range(1280, _FINE_UP_TO + 1, 256)]
    return [*(size for size in sizes if size < max_tokens), max_tokens]
