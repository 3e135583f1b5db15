"""One rank's forward pass: a scheduled batch in, sampled tokens out. Obeys the batch, decides nothing.

`ModelRunner` launches a step operation by operation, on any device; `graph_runner.py` wraps it with CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.select import Backends
from mini_sglang.execution.drafts import accept, draws, write_drafts
from mini_sglang.execution.prompt_logprobs import asked_of, look_up_prompts
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import NOTHING_SAMPLED, Sampled
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.models.transformer import Transformer
from mini_sglang.scheduling.batch import Row, ScheduledBatch


class Runner(Protocol):
    def run(self, batch: ScheduledBatch) -> Sampled:
        """Compute a step. On a CPU it has finished when this returns, on a GPU it has been queued."""
        ...


class Sampler(Protocol):
    """Draws tokens and appends them in the request table."""

    def take(self, batch: ScheduledBatch) -> None:
        """Take in which requests came into a slot, and what the step's rows may draw."""
        ...

    def sample(self, rows: list[Row], logits: torch.Tensor) -> Sampled:
        """Draw one token for each of `rows`, all of which sample. logits [len(rows), vocab]"""
        ...


class ModelRunner:
    """The model, the KV pool, the request table and the sampler of one device."""

    def __init__(
        self, model: Transformer, pool: KVPool, backends: Backends, table: RequestTable, sampler: Sampler
    ) -> None:
        self.model = model
        self.table = table
        self._pool = pool
        self._backends = backends
        self.sampler = sampler

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> Sampled:
        """Compute the batch's rows, and sample those that reach the end of their known tokens."""
        self.table.write_pages(self.take(batch))
        return self.compute(batch)

    def take(self, batch: ScheduledBatch) -> dict[int, int]:
        """Take in what the batch brings beside rows; returns the new pages, by their place in the flat page table."""
        self.table.take(batch.new_requests)
        if batch.drafts:
            write_drafts(self.table, batch)
        self.sampler.take(batch)
        self._pool.copy_pages(batch.page_copies)
        return self.table.places_of(batch.new_pages)

    def compute(self, batch: ScheduledBatch) -> Sampled:
        """Compute a batch whose requests and pages are in the table."""
        rows = batch.rows
        sampling = draws(rows) if batch.drafts else [row for row in rows if row.samples]
        asked = asked_of(rows, self.table) if self.table.ask_prompt_logprobs(rows) else []
        hidden = self.model.hidden(self.forward_batch(rows, [index for part in asked for index in part.indices]))
        sampled = NOTHING_SAMPLED
        if sampling:
            sampled = self.sampler.sample(sampling, self.model.logits(hidden[: len(sampling)]))
        if batch.drafts:
            accept(self.table, batch, sampled.token_ids)
        if asked:
            found = look_up_prompts(asked, hidden[len(sampling) :], self.model.logits, self.table)
            sampled = replace(sampled, prompt_logprobs=found)
        return sampled

    def forward_batch(self, rows: list[Row], also_wanted: Sequence[int] = ()) -> ForwardBatch:
        """The tensors of a step; logits are wanted where it samples, and of the tokens `also_wanted` behind them."""
        return forward_batch(self.table, self._backends, rows, also_wanted)


def forward_batch(
    table: RequestTable, backends: Backends, rows: list[Row], also_wanted: Sequence[int] = ()
) -> ForwardBatch:
    """The tensors of a step; logits are wanted where it samples, and of the tokens `also_wanted` behind them."""
    inputs = table.expand(rows)
    logits_indices = inputs.logits_indices
    if also_wanted:
        logits_indices = torch.cat((logits_indices, table.send(also_wanted)))
    backend = backends.decode if max(inputs.attention.counts) == 1 else backends.prefill
    return ForwardBatch(inputs.input_ids, inputs.positions, logits_indices, backend.plan(inputs.attention))
