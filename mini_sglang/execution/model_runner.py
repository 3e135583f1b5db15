"""One rank's forward pass: a scheduled batch in, sampled tokens out. Obeys the batch, decides nothing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from mini_sglang.attention.base import DecodeGraphBackend, PrefillGraphBackend
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.select import Backends
from mini_sglang.execution.cuda_graph import DecodeGraphs, GraphStep, graph_sizes
from mini_sglang.execution.prefill_graph import PackedInputs, PrefillGraphs, PrefillInputs, prefill_sizes
from mini_sglang.execution.prompt_logprobs import asked_of, look_up_prompts
from mini_sglang.execution.request_table import RequestTable, StepInputs
from mini_sglang.execution.sampler import is_biased, sample, token_logprobs
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.models.transformer import Transformer
from mini_sglang.outputs import TokenLogprobs
from mini_sglang.scheduling.batch import Row, ScheduledBatch

if TYPE_CHECKING:  # it needs Triton
    from mini_sglang.execution.device_sampler import DeviceSampler


class Sampled(NamedTuple):
    """What a step sampled, one entry per sampling row. The tokens may still be on their way on the device."""

    token_ids: torch.Tensor  # [S] int64
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # of the rows that ask, by slot
    arriving: memoryview[int] | None = None  # [S] on the host, where the step leaves token_ids by itself


class ModelRunner:
    """The model, the KV pool and the request table of one device. Without `sampler` PyTorch draws the tokens."""

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        backends: Backends,
        table: RequestTable,
        sampler: DeviceSampler | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._backends = backends
        self._table = table
        self._sampler = sampler
        self._graphs: DecodeGraphs | None = None
        self._prompts: PrefillGraphs | None = None

    @torch.inference_mode()
    def capture_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Run steps of up to `max_rows` rows as CUDA graphs from here on, and if `max_tokens` is not 0 prompts too.

        TypeError if attention cannot.
        """
        table = self._table
        memory = torch.cuda.graph_pool_handle()
        logits = self._model.empty_logits(max_rows)  # of all graphs: what each keeps for itself adds up
        compute = partial(self.compute, out=logits)
        if max_tokens:
            backend = self._backends.prefill
            if not isinstance(backend, PrefillGraphBackend):
                raise TypeError(f"{type(backend).__name__} cannot plan prompts inside a CUDA graph")
            sizes = prefill_sizes(max_tokens)
            self._prompts = PrefillGraphs(compute, table, backend, max_rows, sizes, memory)
        self._graphs = DecodeGraphs(partial(self.decode, out=logits), max_rows, table, memory)

    @torch.inference_mode()
    def rehearse(self, prompts: list[int], max_rows: int, max_tokens: int) -> None:
        """Launch the kernels of prompts of so many tokens, of what `capture_graphs` captures, and of sampling.

        All of it goes into a graph that is thrown away: nothing is computed, so nothing has to be right.
        """
        from mini_sglang.execution.pinned_ring import PinnedRing  # Triton: only where there is a GPU

        table, backend = self._table, self._backends.prefill
        if self._sampler is None or not isinstance(backend, PrefillGraphBackend):
            raise TypeError(f"{type(backend).__name__} with sampler {self._sampler} cannot lie in a graph")
        chunks = [table.expand([Row(slot=0, start=0, count=count, samples=True)]) for count in prompts]
        batches = [self._forward_batch(inputs, inputs.logit_rows) for inputs in chunks]
        logits = self._model.empty_logits(max(1, max_rows))
        slots = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        ring = PinnedRing(table.page_table, len(logits))
        square = torch.zeros(16, 16, dtype=logits.dtype, device=logits.device)
        torch.mm(square, square)  # cuBLAS cannot be set up within a capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):  # kernels may be loaded in it
            self._sampler.draw(logits, slots, slots.int())  # takes the longest to compile, so it comes first
            for batch in batches:
                self._model(batch)
            if max_tokens:
                order = PackedInputs(table, backend, max_rows, max_tokens)
                for size in _rehearsed(prefill_sizes(max_tokens)):
                    self.compute(order.inputs(size), logits)
            ring.take()
            for size in _rehearsed(graph_sizes(max_rows)) if max_rows else ():
                ring.leave(self.decode(slots[:size], logits).token_ids)

    def compute(self, inputs: PrefillInputs, out: torch.Tensor | None = None) -> GraphStep:
        """Compute any step whose inputs lie on the device, and append what its rows sample. What a graph captures.

        Logits go into the first rows of `out` where that is given.
        """
        if self._sampler is None:
            raise TypeError("without a device sampler no step can be computed from the device alone")
        logits = self._model(inputs.forward, out)
        return GraphStep(self._sampler.draw(logits, inputs.slots, inputs.positions), logits)

    def decode(self, slots: torch.Tensor, out: torch.Tensor | None = None) -> GraphStep:
        """Compute the next token of each slot, by what the device knows alone, and append it. slots [R] int64

        What a graph captures; logits go into the first rows of `out` where that is given. TypeError if attention cannot
        be planned this way, or the device cannot sample.
        """
        from mini_sglang.kernels.triton.decode_step import decode_inputs  # Triton: only where there is a GPU

        backend, table = self._backends.decode, self._table
        if not isinstance(backend, DecodeGraphBackend) or self._sampler is None:
            raise TypeError(f"{type(backend).__name__} with sampler {self._sampler} cannot decode from slots alone")
        inputs = decode_inputs(slots, table.num_computed, table.tokens, table.page_table, table.page_size)
        plan = backend.plan_decode(inputs.page_table, inputs.cells, inputs.lengths)
        logits = self._model(ForwardBatch(inputs.input_ids, inputs.positions, None, plan), out)
        return GraphStep(self._sampler.draw(logits, slots, inputs.lengths), logits)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> Sampled:
        """Compute the batch's rows and sample those that reached the end of their known tokens."""
        self._table.take_rows(batch)
        if self._sampler is not None:
            self._sampler.take(batch.new_rows)
        self._pool.copy_pages(batch.page_copies)
        pages = self._table.places_of(batch)
        rows = batch.rows
        if self._graphs is not None and batch.is_decode and len(rows) <= self._graphs.max_rows:
            return self._replay(rows, pages, self._graphs)
        self._table.write_pages(pages)
        asked = asked_of(batch, self._table)
        if self._prompts is not None and not asked and self._prompts.fits(rows):
            return self._complete([row for row in rows if row.samples], *self._prompts.replay(rows))
        inputs = self._table.expand(rows)
        logit_rows, num_sampling = inputs.logit_rows, len(inputs.logit_rows)
        if asked:
            indices = [index for part in asked for index in range(part.first, part.first + part.count)]
            logit_rows = torch.cat((logit_rows, self._table.send(indices)))
        hidden = self._model.hidden(self._forward_batch(inputs, logit_rows))
        sampled = Sampled(inputs.logit_rows, [], {})
        if num_sampling:
            sampled = self._sample([row for row in rows if row.samples], self._model.logits(hidden[:num_sampling]))
        if asked:
            found = look_up_prompts(asked, hidden[num_sampling:], self._model.logits, self._table)
            sampled = sampled._replace(prompt_logprobs=found)
        return sampled

    def _forward_batch(self, inputs: StepInputs, logit_rows: torch.Tensor) -> ForwardBatch:
        return ForwardBatch(inputs.input_ids, inputs.positions, logit_rows, self._backends.plan(inputs.attention))

    def _replay(self, rows: list[Row], pages: dict[int, int], graphs: DecodeGraphs) -> Sampled:
        if len(pages) > graphs.max_rows:  # requests with equal answers have changed over to each other's pages
            self._table.write_pages(pages)
            pages = {}
        slots = tuple(row.slot for row in rows)
        step = graphs.replay(slots, pages)
        if not self._table.want_only_tokens(slots):
            return self._complete(rows, *step)
        return Sampled(step.token_ids, [None] * len(rows), {}, graphs.arriving(len(rows)))

    def _sample(self, rows: list[Row], logits: torch.Tensor) -> Sampled:
        if self._sampler is not None:
            slots = self._table.send([row.slot for row in rows])
            positions = self._table.send([row.start + row.count for row in rows], torch.int32)
            return self._complete(rows, self._sampler.draw(logits, slots, positions), logits)
        token_ids = self._draw(rows, logits)
        return Sampled(token_ids, token_logprobs(logits, token_ids, self._table.params_of(rows)), {})

    def _complete(self, rows: list[Row], token_ids: torch.Tensor, logits: torch.Tensor) -> Sampled:
        """What the device's draw leaves to do: draw biased rows again and look log-probabilities up."""
        if self._table.want_only_tokens([row.slot for row in rows]):
            return Sampled(token_ids, [None] * len(rows), {})
        params = self._table.params_of(rows)
        biased = [index for index in range(len(rows)) if is_biased(params[index])]
        if biased:
            token_ids[biased] = self._draw([rows[index] for index in biased], logits[biased])
        return Sampled(token_ids, token_logprobs(logits, token_ids, params), {})

    def _draw(self, rows: list[Row], logits: torch.Tensor) -> torch.Tensor:
        """Draw one token per row with PyTorch and append it."""
        token_ids = sample(logits, self._table.sampling(rows))
        self._table.append(rows, token_ids)
        return token_ids


def _rehearsed(sizes: list[int]) -> list[int]:
    """Those of ascending `sizes` at which kernels may be cut differently: few rows, and whole tiles of more.

    A kernel that this misses is compiled when its graph is captured.
    """
    return [size for size in sizes if size <= 64 or size % (32 if size <= 256 else 512) == 0 or size == sizes[-1]]
