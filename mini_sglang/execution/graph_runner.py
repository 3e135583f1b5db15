"""A runner whose steps of common sizes are CUDA graphs; the others it leaves to the runner that it wraps.

What a graph computes follows from tensors that stay in place: slots for a step of decodes, a list of integers for one
that holds chunks. Needs a GPU, and Triton.
"""

from __future__ import annotations

import torch

from mini_sglang.attention.select import GraphBackends
from mini_sglang.execution.cuda_graph import DecodeGraphs, GraphStep, graph_sizes
from mini_sglang.execution.device_sampler import DeviceSampler
from mini_sglang.execution.drafts import accept, draws
from mini_sglang.execution.model_runner import ModelRunner
from mini_sglang.execution.pinned_ring import PinnedRing
from mini_sglang.execution.prefill_graph import (
    PrefillGraphs,
    PrefillInputs,
    packed_inputs,
    prefill_graphs,
    prefill_sizes,
)
from mini_sglang.execution.sampler import Sampled
from mini_sglang.kernels.triton.decode_step import decode_inputs
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.scheduling.batch import Row, ScheduledBatch


class GraphRunner:
    """Captures decodes of every number of rows up to `max_rows`, and prompts of up to `max_tokens` in all.

    Prompts are left out where their attention backend cannot lie in a graph.
    """

    @torch.inference_mode()
    def __init__(
        self,
        eager: ModelRunner,
        sampler: DeviceSampler,
        backends: GraphBackends,
        max_rows: int,
        max_tokens: int,
        most_samples: int,
    ) -> None:
        self._eager, self._sampler, self._table = eager, sampler, eager.table
        memory = torch.cuda.graph_pool_handle()
        steps = GraphSteps(eager, sampler, backends, max(max_rows, most_samples))
        self._prefills: list[PrefillGraphs] = []
        if backends.prefill is not None:
            inputs = packed_inputs(self._table, backends.prefill, max_rows, max_tokens, most_samples)
            self._prefills = prefill_graphs(steps.prefill, inputs, max_tokens, memory)
        ring = PinnedRing(self._table.page_table, max_rows)
        self._decodes = DecodeGraphs(steps.decode, ring, self._table.idle_slot, memory)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> Sampled:
        """Compute the batch's rows, by a graph where one fits."""
        rows, pages = batch.rows, self._eager.take(batch)
        if batch.is_decode and len(rows) <= self._decodes.max_rows:
            return self._decode(rows, pages)
        self._table.write_pages(pages)
        graphs = next((graphs for graphs in self._prefills if graphs.fits(rows)), None)
        if graphs is None or self._table.ask_prompt_logprobs(rows):
            return self._eager.compute(batch)
        step = graphs.replay(rows)
        sampled = self._sampler.complete(draws(rows), step.token_ids, step.logits)
        if batch.drafts:
            accept(self._table, batch, sampled.token_ids)
        return sampled

    def _decode(self, rows: list[Row], pages: dict[int, int]) -> Sampled:
        if len(pages) > self._decodes.max_rows:  # requests with equal answers have changed over to each other's pages
            self._table.write_pages(pages)
            pages = {}
        step = self._decodes.replay(tuple(row.slot for row in rows), pages)
        return self._sampler.complete(rows, step.token_ids, step.logits, self._decodes.on_host(len(rows)))


class GraphSteps:
    """Whole steps, from inputs that lie on the device to the appended tokens: what graphs capture.

    Logits of all of them go into the first rows of one tensor: what each graph keeps for itself adds up.
    """

    def __init__(self, eager: ModelRunner, sampler: DeviceSampler, backends: GraphBackends, most_samples: int) -> None:
        self._model, self._table, self._sampler = eager.model, eager.table, sampler
        self._backend = backends.decode
        self.logits = eager.model.empty_logits(most_samples)

    def prefill(self, inputs: PrefillInputs) -> GraphStep:
        """Compute any step, and append what its rows sample."""
        logits = self._model(inputs.forward, self.logits)
        return GraphStep(self._sampler.draw(logits, inputs.slots, inputs.positions), logits)

    def decode(self, slots: torch.Tensor) -> GraphStep:
        """Compute the next token of each slot, by what the device knows alone, and append it. slots [R] int64

        The draw writes the token and moves `num_computed` on, so the next replay finds its inputs.
        """
        table = self._table
        inputs = decode_inputs(slots, table.num_computed, table.tokens, table.page_table, table.page_size)
        plan = self._backend.plan_decode(inputs.page_table, inputs.cells, inputs.lengths)
        logits = self._model(ForwardBatch(inputs.input_ids, inputs.positions, None, plan), self.logits)
        return GraphStep(self._sampler.draw(logits, slots, inputs.lengths), logits)


@torch.inference_mode()
def launch_all(
    eager: ModelRunner,
    sampler: DeviceSampler,
    backends: GraphBackends | None,
    prompts: list[int],
    max_rows: int,
    max_tokens: int,
    most_samples: int,
) -> None:
    """Launch the kernels of prompts of these lengths, of sampling, and of what a GraphRunner captures, if there is one.

    All of it goes into a graph that is thrown away: nothing is computed, so nothing has to be right.
    """
    logits = eager.model.empty_logits(max(1, max_rows))
    slots = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    batches = [eager.forward_batch([Row(slot=0, start=0, count=count, samples=1)]) for count in prompts]
    square = torch.zeros(16, 16, dtype=logits.dtype, device=logits.device)
    torch.mm(square, square)  # cuBLAS cannot be set up within a capture
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"):  # kernels may be loaded in it
        sampler.draw(logits, slots, slots.int())  # takes the longest to compile, so it comes first
        for batch in batches:
            eager.model(batch)
        if backends is not None:
            steps = GraphSteps(eager, sampler, backends, most_samples)
            _launch_graphs(steps, eager, backends, slots, max_tokens, most_samples)


def _launch_graphs(
    steps: GraphSteps,
    eager: ModelRunner,
    backends: GraphBackends,
    slots: torch.Tensor,
    max_tokens: int,
    most_samples: int,
) -> None:
    ring = PinnedRing(eager.table.page_table, len(slots))
    if backends.prefill is not None:
        for inputs in packed_inputs(eager.table, backends.prefill, len(slots), max_tokens, most_samples):
            for size in _some_of(prefill_sizes(max_tokens)):
                steps.prefill(inputs.of_size(size))
    ring.take()
    for size in _some_of(graph_sizes(len(slots))):
        ring.leave(steps.decode(slots[:size]).token_ids)


def _some_of(sizes: list[int]) -> list[int]:
    """Those of ascending `sizes` at which kernels may be cut differently: few rows, and whole tiles of more.

    A kernel that this misses is compiled when its graph is captured.
    """
    return [size for size in sizes if size <= 64 or size % (32 if size <= 256 else 512) == 0 or size == sizes[-1]]
