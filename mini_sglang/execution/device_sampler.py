"""How each running request is sampled, kept on a GPU by slot, and the draw by it, in a graph or outside.

The kernels draw the tokens that `sampler.py` defines; rows that they cannot draw (`needs_torch_sampler`) are drawn
again by PyTorch. Needs Triton, so it is imported only where there is a GPU.
"""

from __future__ import annotations

import torch

from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import Sampled, TorchSampler, needs_torch_sampler
from mini_sglang.kernels.triton.sampling import PROMPT, SlotState, sample_slots
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import NewRequest, Row, ScheduledBatch

_MAX_COUNT = 2**15 - 1
_PLAIN_GREEDY = SamplingParams(temperature=0)


class DeviceSampler:
    """Sampling state of the slots of `table`, into which it writes the tokens it draws.

    The largest part are the counts that penalties need: 2 bytes * slots * vocab_size.
    """

    def __init__(self, table: RequestTable, vocab_size: int) -> None:
        self._table = table
        self._torch = TorchSampler(table)
        self._to_complete: set[int] = set()  # slots whose rows are drawn again or have log-probabilities
        self._vocab_size = vocab_size
        slots, device = table.num_computed.shape[0], table.num_computed.device
        greedy = torch.tensor(_settings(_PLAIN_GREEDY, vocab_size), dtype=torch.float64, device=device)
        self._state = SlotState(
            settings=greedy.repeat(slots, 1),
            seeds=torch.zeros(slots, dtype=torch.int64, device=device),
            counts=torch.zeros(slots, vocab_size, dtype=torch.int16, device=device),
            tokens=table.tokens,
            num_computed=table.num_computed,
            idle_slot=table.idle_slot,
        )

    def take(self, batch: ScheduledBatch) -> None:
        """Take in the requests that came into a slot, and what the step's rows under a grammar may draw."""
        self._torch.take(batch)
        new_requests = batch.new_requests
        if not new_requests:
            return
        slots = self._table.send([new.slot for new in new_requests])
        # a row that is drawn again is drawn here in the cheapest way
        drawn = [_PLAIN_GREEDY if needs_torch_sampler(new.params) else new.params for new in new_requests]
        settings = [_settings(params, self._vocab_size) for params in drawn]
        self._state.settings[slots] = self._table.send(settings, torch.float64)
        self._state.seeds[slots] = self._table.send([new.seed for new in new_requests])
        for new, params in zip(new_requests, drawn, strict=True):
            wants_more = needs_torch_sampler(new.params) or new.params.logprobs is not None
            (self._to_complete.add if wants_more else self._to_complete.discard)(new.slot)
            if params.is_penalised:
                self._count(new)

    def sample(self, rows: list[Row], logits: torch.Tensor) -> Sampled:
        """Draw one token per row, and what else it asks for. logits [len(rows), vocab]"""
        slots = self._table.send([row.slot for row in rows])
        positions = self._table.send([row.start + row.count for row in rows], torch.int32)
        return self.complete(rows, self.draw(logits, slots, positions), logits)

    def complete(
        self, rows: list[Row], token_ids: torch.Tensor, logits: torch.Tensor, on_host: memoryview[int] | None = None
    ) -> Sampled:
        """What the draw leaves to do: draw biased rows again and look up log-probabilities.

        `on_host` is where the step leaves its tokens by itself; it holds only if nothing is drawn again.
        """
        if not self._to_complete or self._to_complete.isdisjoint(row.slot for row in rows):
            return Sampled(token_ids, [None] * len(rows), on_host=on_host)
        biased = [index for index, row in enumerate(rows) if needs_torch_sampler(self._table.request(row.slot).params)]
        if biased:
            token_ids[biased] = self._torch.draw([rows[index] for index in biased], logits[biased])
        return Sampled(token_ids, self._torch.logprobs(rows, logits, token_ids))

    def _count(self, new: NewRequest) -> None:
        prompt, output = self._table.send(new.token_ids).tensor_split([new.num_prompt_tokens])
        counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=output.device)
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32)).clamp_(max=_MAX_COUNT)
        counts[prompt] += PROMPT  # once, however often a token is named
        self._state.counts[new.slot] = counts.to(torch.int16)

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draw one token per row, append it in the table and count it.

        logits [R, vocab], left unchanged; slots [R] int64; positions [R] int32, of the tokens to be drawn -> [R] int64
        """
        return sample_slots(logits, slots, positions, self._state)


def _settings(params: SamplingParams, vocab_size: int) -> list[float]:
    """As `SlotState.settings` has them."""
    filters: list[float] = [0, 1, 0]
    if params.temperature > 0:
        filters = [params.top_k if 0 < params.top_k < vocab_size else 0, params.top_p, params.min_p]
    penalties = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
    return [params.temperature, *filters, *penalties]
