"""One rank's forward pass: a scheduled batch in, sampled tokens out. Obeys the batch, decides nothing."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from mini_sglang.attention.base import AttentionBackend, AttentionPlan
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.execution.cuda_graph import DecodeGraphs, DecodeStep
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import is_plain, sample, token_logprobs
from mini_sglang.models.forward_batch import ForwardBatch
from mini_sglang.models.transformer import Transformer
from mini_sglang.request import TokenLogprobs
from mini_sglang.scheduling.batch import DecodeRows, Row, ScheduledBatch


class Sampled(NamedTuple):
    """What a step sampled, one entry per sampling row. The tokens may still be on their way on the device."""

    token_ids: torch.Tensor  # [S] int64
    logprobs: list[TokenLogprobs | None]


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """An attention backend whose decode steps can lie in CUDA graphs."""

    def plan_decode(self, page_table: torch.Tensor, cells: torch.Tensor, lengths: torch.Tensor) -> AttentionPlan: ...


class ModelRunner:
    """The model, the KV pool and the request table of one device."""

    def __init__(self, model: Transformer, pool: KVPool, backend: AttentionBackend, table: RequestTable) -> None:
        self._model = model
        self._pool = pool
        self._backend = backend
        self._table = table
        self._graphs: DecodeGraphs | None = None
        self._plain_decodes: DecodeRows | None = None  # known to need nothing but what the graph draws

    @torch.inference_mode()
    def capture_graphs(self, max_rows: int) -> None:
        """Run decode steps of up to `max_rows` rows as CUDA graphs from here on. TypeError if attention cannot."""
        from mini_sglang.kernels.race import race  # Triton: only where there is a GPU

        backend = self._backend
        if not isinstance(backend, GraphBackend):
            raise TypeError(f"{type(backend).__name__} cannot plan inside a CUDA graph")

        def decode(slots: torch.Tensor) -> DecodeStep:
            inputs = self._table.decode_inputs(slots)
            plan = backend.plan_decode(inputs.page_table, inputs.cells, (inputs.positions + 1).int())
            logits = self._model(ForwardBatch(inputs.input_ids, inputs.positions, None, plan))
            token_ids = race(logits, inputs.temperatures, inputs.seeds, inputs.positions + 1)
            self._table.advance(inputs, token_ids)
            return DecodeStep(token_ids, logits)

        device = self._pool.layers[0].device
        self._graphs = DecodeGraphs(decode, max_rows, self._table.idle_slot, device)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> Sampled:
        """Compute the batch's rows and sample those that reached the end of their known tokens."""
        self._table.apply(batch)
        self._pool.copy_pages(batch.page_copies)
        if self._graphs is not None and not batch.chunks and len(batch.decodes) <= self._graphs.max_rows:
            return self._replay(batch, self._graphs)
        rows = batch.rows
        inputs = self._table.expand(rows)
        logits = self._model(
            ForwardBatch(
                input_ids=inputs.input_ids,
                positions=inputs.positions,
                logit_rows=inputs.logit_rows,
                plan=self._backend.plan(inputs.attention),
            )
        )
        sampling_rows = [row for row in rows if row.samples]
        return self._sample(sampling_rows, logits) if sampling_rows else Sampled(inputs.logit_rows, [])

    def _replay(self, batch: ScheduledBatch, graphs: DecodeGraphs) -> Sampled:
        decodes = batch.decodes
        step = graphs.replay(decodes.slots)
        if decodes is not self._plain_decodes:
            rows = batch.rows
            if not all(is_plain(params) for params in self._table.params_of(rows)):
                return self._sample(rows, step.logits)  # overwrites the tokens that the graph appended
            self._plain_decodes = decodes
        return Sampled(step.token_ids, [None] * len(decodes))

    def _sample(self, rows: list[Row], logits: torch.Tensor) -> Sampled:
        sampling = self._table.sampling(rows)
        token_ids = sample(logits, sampling)
        self._table.append(rows, token_ids)
        return Sampled(token_ids, token_logprobs(logits, token_ids, sampling.params))
