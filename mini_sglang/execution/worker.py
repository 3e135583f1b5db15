"""Builds one rank's part of the model and what runs steps on it: the same code on every rank.

It loads, sizes the pool, warms up and captures graphs, together with the other ranks where there are any. Knows the
hardware; knows no request and no policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.select import Backends, graph_backends, make_backends
from mini_sglang.config import ResolvedConfig
from mini_sglang.execution.drafting import Drafter, DraftingRunner, DraftMemory
from mini_sglang.execution.load_drafter import DraftSource, load_drafter
from mini_sglang.execution.measured_cost import measured_cost, prompt_step
from mini_sglang.execution.model_runner import ModelRunner, Runner
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.resolve import DTYPES, kv_dtype, page_bytes
from mini_sglang.execution.sampler import TorchSampler
from mini_sglang.kernels.cpu.linear import CpuMatrix
from mini_sglang.kernels.interface import Kernels
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.architectures import build_model
from mini_sglang.models.transformer import Transformer
from mini_sglang.parallel.tensor_parallel import TensorParallel
from mini_sglang.scheduling.batch import MOST_VERIFIED, ScheduledBatch
from mini_sglang.scheduling.step_cost import StepCost
from mini_sglang.weights.dummy import load_dummy_weights
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.load import load_weights
from mini_sglang.weights.quantize import QUANTIZERS
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot

if TYPE_CHECKING:  # they need Triton
    from mini_sglang.execution.device_sampler import DeviceSampler
    from mini_sglang.kernels.triton.precompile import Precompile


@dataclass(frozen=True)
class Eager:
    """A runner without graphs, and the parts of it that graphs are captured from."""

    runner: ModelRunner
    sampler: DeviceSampler | None  # None on a CPU
    backends: Backends


class Worker:
    """`runner` computes steps, over a pool of `num_pages` pages.

    With `fit_pages` the pool gets as many of `config.num_pages` pages as fit into a GPU's memory. `check` is called now
    and then while loading; what it raises ends that. Raises ValueError, naming the field, where the configuration does
    not fit the model or the memory.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model_config: ModelConfig,
        source: ModelSource,
        draft: DraftSource | None,
        parallel: TensorParallel,
        check: Callable[[], None],
        *,
        fit_pages: bool,
    ) -> None:
        self.config = config
        self.model_config = model_config = replace(model_config, context_length=config.context_length)
        self._parallel = parallel
        self._draft = draft
        torch.set_num_threads(config.num_threads)
        self._device, self._dtype = torch.device(config.device), DTYPES[config.dtype]
        if self._device.type == "cuda":  # the library whose choice for a long K and few rows is better by up to a fifth
            torch.backends.cuda.preferred_blas_library("cublaslt")
        kernels = _kernels(config, self._dtype)
        packed, quantize = config.weights == "packed", QUANTIZERS[config.quantization]
        placement = Placement(self._device, self._dtype, kernels, packed, quantize, parallel)
        precompiled = self._precompile(placement)
        with _out_of_memory(_WEIGHTS_TOO_LARGE):
            model = build_model(model_config, placement)
            slots = {name: _checked(slot, check) for name, slot in model.weight_slots().items()}
            show_progress = parallel.rank == 0
            if config.load_format == "dummy":
                load_dummy_weights(slots, seed=config.seed, device=self._device, show_progress=show_progress)
            else:
                load_weights(source, model_config, slots, show_progress=show_progress)
            self._drafter: Drafter | None = None
            if self._draft is not None:
                checked = partial(_checked, check=check)
                self._drafter = load_drafter(self._draft, config, model, placement, checked)
        with _out_of_memory(_STEP_TOO_LARGE[self._device.type]):
            check()
            if precompiled is not None:
                precompiled.wait()
            self.num_pages = parallel.minimum(self._fitting_pages(model)) if fit_pages else config.num_pages
            check()
            eager = self._make_eager(model, self.num_pages)
            self.runner = self._with_drafts(self._warmed_up(eager), eager)
            needs_cost = config.max_step_ms or config.speculative != "none"
            self.step_cost = self._measured_cost(slots.values()) if needs_cost else None
        parallel.barrier()
        check()

    def _precompile(self, placement: Placement) -> Precompile | None:
        """Begin to compile the kernels of all steps where they are Triton's, so that it goes on while weights load.

        A model of two layers needs the same kernels as the whole, where all layers but the last are alike; what others
        need is compiled when it first runs.
        """
        if set(self.config.attention_backend.split(",")) != {"triton"}:
            return None
        from mini_sglang.execution.graph_runner import launch_all
        from mini_sglang.kernels.triton.precompile import Precompile

        with _out_of_memory(_WEIGHTS_TOO_LARGE):
            model = build_model(replace(self.model_config, num_layers=min(2, self.model_config.num_layers)), placement)
            load_dummy_weights(model.weight_slots(), seed=0, device=self._device, show_progress=False)
        tokens, max_rows = self._longest_prefill, self.config.cuda_graph_max_bs
        precompiled = Precompile()
        with _out_of_memory(_STEP_TOO_LARGE[self._device.type]), precompiled.recording():
            eager = self._make_eager(model, self._pages(tokens))
            if eager.sampler is not None:
                graphs = graph_backends(eager.backends) if max_rows else None
                prompts = [tokens, min(16, tokens), 1]
                most, budget = most_samples(self.config, max_rows), self.config.max_prefill_tokens
                launch_all(eager.runner, eager.sampler, graphs, prompts, max_rows, budget, most)
        del eager, model
        torch.cuda.empty_cache()
        return precompiled

    def _make_eager(self, model: Transformer, num_pages: int) -> Eager:
        """A runner of `model` over a pool of `num_pages` pages, and one more for the idle slot of graphs."""
        config, max_rows = self.config, self.config.max_running_requests
        pool, backends = self._make_pool(model.config, self._parallel, num_pages)
        table = RequestTable(max_rows, config.context_length, config.page_size, self._device, idle_page=num_pages)
        if self._device.type == "cpu":
            return Eager(ModelRunner(model, pool, backends, table, TorchSampler(table)), None, backends)
        from mini_sglang.execution.device_sampler import DeviceSampler  # Triton: only where there is a GPU

        sampler = DeviceSampler(table, self.model_config.vocab_size)
        return Eager(ModelRunner(model, pool, backends, table, sampler), sampler, backends)

    def _make_pool(self, model: ModelConfig, parallel: TensorParallel, num_pages: int) -> tuple[KVPool, Backends]:
        """A pool for a model's layers, as far as they are this rank's, and what attends over it."""
        config, heads = self.config, parallel.heads(model.num_heads, model.num_kv_heads)
        pool = KVPool(
            num_layers=model.num_layers,
            num_pages=num_pages + 1,
            page_size=config.page_size,
            num_kv_heads=heads.kv.size,
            head_dim=model.head_dim,
            dtype=kv_dtype(config, config.dtype),
            device=self._device,
        )
        backends = make_backends(
            config.attention_backend,
            pool,
            num_heads=heads.queries.size,
            dtype=self._dtype,
            max_rows=config.max_running_requests,
            deterministic=config.deterministic,
            window=model.sliding_window,
            full_layers=model.full_attention_layers,
            sinks=model.attention_sinks,
        )
        return pool, backends

    def _with_drafts(self, runner: Runner, eager: Eager) -> Runner:
        """`runner`, whose steps the model drafts for that `speculative` names, if it names one."""
        if self._draft is None or self._drafter is None:
            return runner
        layers, parallel = self._draft.layers, self._draft.parallel(self._parallel)
        memory = DraftMemory(
            *self._make_pool(layers, parallel, self.num_pages), eager.runner.table, eager.runner.sampler
        )
        return DraftingRunner(runner, self._drafter, memory)

    def _fitting_pages(self, model: Transformer) -> int:
        """Pages that fit into `mem_fraction` of a GPU beside the weights and what the largest step was seen to take."""
        config, tokens = self.config, self._longest_prefill
        bytes_per_page = page_bytes(config, self.model_config, config.dtype)
        weight_bytes = torch.cuda.memory_allocated(self._device)
        eager = self._make_eager(model, self._pages(tokens))
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        state_bytes = before - weight_bytes - (self._pages(tokens) + 1) * bytes_per_page  # tables, counts, workspaces
        eager.runner.run(self._prefill_step(tokens))
        rows_per_step = -(-config.max_prefill_tokens // tokens)  # the budget may hold several whole contexts
        step_bytes = (torch.cuda.max_memory_allocated(self._device) - before) * rows_per_step
        logits = self.model_config.vocab_size * most_samples(config, config.cuda_graph_max_bs)
        logit_bytes = logits * self._dtype.itemsize  # of graphs
        if config.cuda_graph_max_bs and graph_backends(eager.backends).prefill is not None:
            step_bytes *= 2  # a full step's graph has memory of its own
        step_bytes += 3 * 4 * config.max_running_requests * self.model_config.vocab_size  # sampling in float32
        step_bytes += logit_bytes * (3 if self._parallel.size > 1 else 1)  # twice more before ranks' parts are joined
        del eager
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        used_bytes = total - free + state_bytes
        kv_bytes = int(total * config.mem_fraction) - used_bytes - step_bytes - _GRAPH_BYTES
        pages = kv_bytes // page_bytes(config, self.model_config, config.dtype, self._draft)
        if pages < 2:
            raise ValueError(
                f"mem_fraction {config.mem_fraction} leaves {kv_bytes >> 20} MiB for the KV cache beside "
                f"{used_bytes >> 20} MiB of weights and tables and {step_bytes >> 20} MiB of a step; raise it or lower "
                "max_prefill_tokens or max_running_requests"
            )
        return min(pages, config.num_pages)

    def _warmed_up(self, eager: Eager) -> Runner:
        """Run what is compiled on first use, in a page that nobody holds yet, and capture graphs."""
        runner = eager.runner
        runner.run(self._prefill_step(1))
        if eager.sampler is None:
            return runner
        runner.run(self._prefill_step(min(self.config.page_size, self.config.context_length, 16)))
        if self.config.cuda_graph_max_bs == 0:
            return runner
        from mini_sglang.execution.graph_runner import GraphRunner  # Triton: only where there is a GPU

        graphs, config = graph_backends(eager.backends), self.config
        rows, tokens = config.cuda_graph_max_bs, config.max_prefill_tokens
        return GraphRunner(runner, eager.sampler, graphs, rows, tokens, most_samples(config, rows))

    def _measured_cost(self, weights: Iterable[WeightSlot]) -> StepCost:
        return measured_cost(
            self.runner,
            self.model_config,
            self.config.device,
            self.config.page_size,
            most_tokens=min(self._longest_prefill, self.num_pages * self.config.page_size),
            num_parameters=sum(math.prod(slot.shape) for slot in weights),
            drafts=self._drafter is not None,
        )

    @property
    def _longest_prefill(self) -> int:
        """Tokens of the longest prompt that one step computes."""
        return min(self.config.max_prefill_tokens, self.config.context_length)

    def _prefill_step(self, tokens: int) -> ScheduledBatch:
        return prompt_step(tokens, self.config.page_size)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)


def most_samples(config: ResolvedConfig, rows: int) -> int:
    """The most tokens that a step of `rows` rows samples: one for each, and as many as drafts can have."""
    if config.speculative == "none":
        return rows
    return max(rows, min(MOST_VERIFIED, rows * (1 + config.speculative_tokens)))


@contextmanager
def _out_of_memory(advice: str) -> Iterator[None]:
    """Turn the device's out-of-memory error at start-up into one that says which setting to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        if not on_gpu and not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error):
            raise  # PyTorch has no type of its own for what its allocator on a CPU raises
        raise ValueError(f"out of {'GPU ' if on_gpu else ''}memory: {advice} ({error})") from error


def _checked(slot: WeightSlot, check: Callable[[], None]) -> WeightSlot:
    def load(tensor: CheckpointTensor) -> None:
        check()
        slot.load(tensor)

    return WeightSlot(slot.shape, load)


def _kernels(config: ResolvedConfig, dtype: torch.dtype) -> Kernels:
    """The other kernels of a device, which go with its attention backend; imported where they are of use."""
    if config.attention_backend == "reference":
        return TorchKernels(prepack=config.device == "cpu" and CpuMatrix.available(dtype))
    if config.attention_backend == "cpu":
        from mini_sglang.kernels.cpu.kernels import CpuKernels

        return CpuKernels(dtype)
    from mini_sglang.kernels.triton.kernels import TritonKernels

    return TritonKernels(deterministic=config.deterministic)


_WEIGHTS_TOO_LARGE = "the weights do not fit: use a smaller model or dtype, or a larger tp"
_STEP_TOO_LARGE = {  # by device
    "cpu": "the KV cache, the tables or a step do not fit: lower kv_cache_bytes, num_pages, max_running_requests, "
    "context_length or max_prefill_tokens",
    "cuda": "the KV cache or a step does not fit: lower mem_fraction, num_pages, max_prefill_tokens, "
    "max_running_requests or cuda_graph_max_bs",
}
_GRAPH_BYTES = 1 << 30  # left to CUDA graphs and the allocator's own rounding
