"""Drafts by a model: before a step it writes tokens behind the known ones, and after it catches up with the target.

A drafting model reads the target's request table, and keeps its own KV in pages of the same numbers: whatever the
scheduler shares, copies or takes back holds for both. It draws as the request would, with the same noise, so that a
sampled draft is right as often as a greedy one where the two distributions agree. The host reads the drafted tokens
before the step that verifies them is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import torch

from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.select import Backends
from mini_sglang.execution.model_runner import Runner, Sampler, forward_batch
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import Sampled
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.models.eagle3 import Eagle3Head
from mini_sglang.models.transformer import Transformer
from mini_sglang.scheduling.batch import Row, ScheduledBatch, is_unknown


class Drafter(Protocol):
    """A model that drafts for another one."""

    def draft(self, rows: list[Row], place: int, memory: DraftMemory) -> None:
        """Draw the successor of each row's one token into the table, for the `place`th time before this step.

        From one time to the next rows go on by a token, and the last of them may be gone.
        """
        ...

    def follow(self, batch: ScheduledBatch, computed: torch.Tensor, memory: DraftMemory) -> None:
        """Compute the batch's rows, as the target has done just now. It has accepted `computed` tokens of each slot."""
        ...


@dataclass(frozen=True)
class DraftMemory:
    """What a drafter works on: a pool of its own, and the target's table and sampler."""

    pool: KVPool
    backends: Backends
    table: RequestTable
    sampler: Sampler

    def step(self, rows: list[Row]) -> ForwardBatch:
        """The tensors of a step that computes `rows`"""
        return forward_batch(self.table, self.backends, rows)


class DraftModel:
    """Any supported model whose vocabulary is the target's."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def draft(self, rows: list[Row], place: int, memory: DraftMemory) -> None:
        memory.sampler.sample(rows, self._model(memory.step(rows)))

    def follow(self, batch: ScheduledBatch, computed: torch.Tensor, memory: DraftMemory) -> None:
        self._model.hidden(memory.step([Row(row.slot, row.start, row.count, 0) for row in batch.rows]))


class Eagle3Drafter:
    """An EAGLE-3 head. `hidden` [most tokens, layers, hidden] is where the target leaves its hidden states of a step.

    A request's next token is paired with the features of its last computed one, which are kept by slot.
    """

    def __init__(self, head: Eagle3Head, hidden: torch.Tensor, num_slots: int) -> None:
        self._head, self._hidden = head, hidden
        self._features = hidden.new_zeros(num_slots, hidden.shape[-1])
        self._drafted = self._features  # of the tokens drafted last, one for each row

    def draft(self, rows: list[Row], place: int, memory: DraftMemory) -> None:
        before = self._drafted[: len(rows)] if place else self._features[memory.table.send([row.slot for row in rows])]
        self._drafted = self._head(memory.step(rows), before)
        memory.sampler.sample(rows, self._head.logits(self._drafted))

    def follow(self, batch: ScheduledBatch, computed: torch.Tensor, memory: DraftMemory) -> None:
        """The first token of a request, or behind a cached prefix, is paired with features of its own."""
        table, rows, new_slots = memory.table, batch.rows, {request.slot for request in batch.new_requests}
        step = memory.step(rows)
        features = self._head.features(self._hidden[: len(step.positions)])
        firsts, end = [], 0
        for row in rows:
            firsts.append(end)
            end += row.count
        going = [(first, row.slot) for first, row in zip(firsts, rows, strict=True) if row.slot not in new_slots]
        before = torch.cat((features[:1], features[:-1]))
        first_of_row, slots, starts = table.send([firsts, [row.slot for row in rows], [row.start for row in rows]])
        before[first_of_row] = features[first_of_row]
        if going:
            first_of_going, slots_of_going = table.send([*zip(*going, strict=True)])
            before[first_of_going] = self._features[slots_of_going]
        self._head.store(step, before)
        self._features[slots] = features[first_of_row + computed[slots] - starts - 1]


class DraftingRunner:
    """A runner whose steps `drafter` drafts for, where the scheduler leaves that to it."""

    def __init__(self, runner: Runner, drafter: Drafter, memory: DraftMemory) -> None:
        self._runner, self._drafter, self._memory = runner, drafter, memory
        self._table = memory.table

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> Sampled:
        """Draft, compute the step, and let the drafter follow it."""
        self._memory.pool.copy_pages(batch.page_copies)
        wanted = [row for row in batch.rows if is_unknown(batch.drafts.get(row.slot))]
        drafts = {}
        if wanted:
            self._table.write_pages(self._table.places_of(batch.new_pages))
            drafts = self._draft(sorted(wanted, key=lambda row: -row.count))
            batch = msgspec.structs.replace(batch, drafts={**batch.drafts, **drafts})
        sampled = self._runner.run(batch)
        computed = self._table.num_computed.clone()
        self._drafter.follow(batch, computed, self._memory)
        self._table.num_computed.copy_(computed)  # which `follow` has moved over rejected tokens too
        return replace(sampled, drafts=drafts) if drafts else sampled

    def _draft(self, rows: list[Row]) -> dict[int, list[int]]:
        """Draft as many tokens of each row as it verifies, the longest row first -> by slot"""
        for place in range(rows[0].count - 1):
            going = [Row(row.slot, row.start + place, 1, 1) for row in rows if row.count > place + 1]
            self._drafter.draft(going, place, self._memory)
        places = [(row.slot, position) for row in rows for position in range(row.start + 1, row.start + row.count)]
        slots, positions = self._table.send([*zip(*places, strict=True)])
        drafted = iter(self._table.tokens[slots, positions].tolist())
        return {row.slot: [next(drafted) for _ in range(row.count - 1)] for row in rows}
