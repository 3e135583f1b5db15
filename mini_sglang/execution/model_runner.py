"""One rank's forward pass: a scheduled batch in, sampled tokens out. Obeys the batch, decides nothing."""

from __future__ import annotations

import torch

from mini_sglang.attention.base import AttentionBackend
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import sample, token_logprobs
from mini_sglang.models.forward_batch import ForwardBatch
from mini_sglang.models.transformer import Transformer
from mini_sglang.scheduling.batch import ScheduledBatch, StepResult


class ModelRunner:
    """The model, the KV pool and the request table of one device."""

    def __init__(self, model: Transformer, pool: KVPool, backend: AttentionBackend, table: RequestTable) -> None:
        self._model = model
        self._pool = pool
        self._backend = backend
        self._table = table

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> StepResult:
        """Compute the batch's rows and sample those that reached the end of their known tokens."""
        self._table.apply(batch)
        self._pool.copy_pages(batch.page_copies)
        inputs = self._table.expand(batch.rows)
        logits = self._model(
            ForwardBatch(
                input_ids=inputs.input_ids,
                positions=inputs.positions,
                logit_rows=inputs.logit_rows,
                plan=self._backend.plan(inputs.attention),
            )
        )
        sampling_rows = [row for row in batch.rows if row.samples]
        if not sampling_rows:
            return StepResult([], [])
        sampling = self._table.sampling(sampling_rows)
        token_ids = sample(logits, sampling)
        self._table.append(sampling_rows, token_ids)
        return StepResult(token_ids.tolist(), token_logprobs(logits, token_ids, sampling.params))
