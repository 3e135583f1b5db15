"""One rank's part of the model, and the steps it computes: every rank runs this code, and the batches it is told.

It sizes the pool, warms up and captures graphs, together with the other ranks where there are any. Knows the hardware;
knows no request and no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.select import make_backends
from mini_sglang.config import EngineConfig
from mini_sglang.execution.model_runner import ModelRunner, Sampled
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.kernels.cpu.linear import CpuMatrix
from mini_sglang.kernels.interface import FP8, Kernels
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.architectures import build_model
from mini_sglang.models.transformer import Transformer
from mini_sglang.parallel.sharding import shard_heads
from mini_sglang.parallel.tensor_parallel import TensorParallel
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import NewPages, NewRow, Row, ScheduledBatch
from mini_sglang.weights.gguf_config import load_model_config
from mini_sglang.weights.hub import ModelSource, resolve_model
from mini_sglang.weights.load import load_dummy_weights, load_weights
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot

if TYPE_CHECKING:  # they need Triton
    from mini_sglang.execution.device_sampler import DeviceSampler
    from mini_sglang.kernels.triton.precompile import CompileAhead


class Rank:
    """Built of a `config` whose every `auto` is resolved; `num_pages` may be open on a GPU, and is known afterwards.

    `check` is called now and then while loading; what it raises ends that. Raises ValueError, naming the field, where
    the configuration does not fit the model or the memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        source: ModelSource,
        parallel: TensorParallel,
        check: Callable[[], None],
    ) -> None:
        self.config = config
        self.model_config = model_config = replace(model_config, context_length=resolved(config.context_length))
        self._parallel = parallel
        self._heads = parallel.heads(model_config.num_heads, model_config.num_kv_heads)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._max_rows = resolved(config.max_running_requests)
        self._device, self._dtype = torch.device(config.device), DTYPES[config.dtype]
        if self._device.type == "cuda":  # the library whose choice for a long K and few rows is better by up to a fifth
            torch.backends.cuda.preferred_blas_library("cublaslt")
        placement = Placement(
            self._device, self._dtype, _kernels(config, self._dtype), config.weights == "packed", parallel
        )
        compiling = self._compile_ahead(placement)
        with _out_of_memory(_WEIGHTS_TOO_LARGE):
            self._model = build_model(model_config, placement)
            slots = {name: _checked(slot, check) for name, slot in self._model.weight_slots().items()}
            show_progress = parallel.rank == 0
            if config.load_format == "dummy":
                load_dummy_weights(slots, seed=config.seed, device=self._device, show_progress=show_progress)
            else:
                load_weights(source, model_config, slots, show_progress=show_progress)
        with _out_of_memory(_STEP_TOO_LARGE[self._device.type]):
            check()
            if compiling is not None:
                compiling.wait()
            self.num_pages = config.num_pages or parallel.minimum(self._measure_pages())
            check()
            self._runner = self._make_runner(self._model, self.num_pages)
            self._warm_up()
        parallel.minimum(0)  # until all ranks have come so far
        check()

    def run(self, batch: ScheduledBatch) -> Sampled:
        """Compute one step. On a CPU it has finished when this returns, on a GPU it has been queued."""
        return self._runner.run(batch)

    def close(self) -> None:
        """Drop the model and the pool."""
        del self._runner, self._model

    def _compile_ahead(self, placement: Placement) -> CompileAhead | None:
        """Begin to compile the kernels of all steps where they are Triton's, so that it goes on while weights load.

        A model of two layers needs the same kernels as the whole: all layers but the last are alike.
        """
        if set(self.config.attention_backend.split(",")) != {"triton"}:
            return None
        from mini_sglang.kernels.triton.precompile import CompileAhead

        with _out_of_memory(_WEIGHTS_TOO_LARGE):
            model = build_model(replace(self.model_config, num_layers=min(2, self.model_config.num_layers)), placement)
            load_dummy_weights(model.weight_slots(), seed=0, device=self._device, show_progress=False)
        tokens, max_rows = self._longest_prefill(), resolved(self.config.cuda_graph_max_bs)
        compiling = CompileAhead()
        with _out_of_memory(_STEP_TOO_LARGE[self._device.type]), compiling.noting():
            runner = self._make_runner(model, self._pages(tokens))
            runner.rehearse([tokens, min(16, tokens), 1], max_rows, self._prefill_graph_tokens())
        del runner, model
        torch.cuda.empty_cache()
        return compiling

    def _make_runner(self, model: Transformer, num_pages: int) -> ModelRunner:
        """A runner of `model` over a pool of `num_pages` pages, and one more for the idle slot of graphs."""
        pool = KVPool(
            num_layers=model.config.num_layers,
            num_pages=num_pages + 1,
            page_size=self.config.page_size,
            num_kv_heads=self._heads.kv.size,
            head_dim=self.model_config.head_dim,
            dtype=kv_dtype(self.config, self.config.dtype),
            device=self._device,
        )
        backends = make_backends(
            self.config.attention_backend,
            pool,
            num_heads=self._heads.queries.size,
            dtype=self._dtype,
            max_rows=self._max_rows,
            deterministic=self.config.deterministic,
            window=self.model_config.sliding_window,
        )
        table = RequestTable(
            self._max_rows,
            self.model_config.context_length,
            self.config.page_size,
            self._device,
            idle_page=num_pages,
        )
        return ModelRunner(model, pool, backends, table, self._make_sampler(table))

    def _make_sampler(self, table: RequestTable) -> DeviceSampler | None:
        """Imported here, since a CPU has no use for Triton."""
        if self._device.type != "cuda":
            return None
        from mini_sglang.execution.device_sampler import DeviceSampler

        return DeviceSampler(table, self.model_config.vocab_size)

    def _measure_pages(self) -> int:
        """Pages that fit into `mem_fraction` of a GPU beside the weights and what the largest step was seen to take."""
        budget, tokens = resolved(self.config.max_prefill_tokens), self._longest_prefill()
        bytes_per_page = page_bytes(self.config, self.model_config, self.config.dtype)
        weight_bytes = torch.cuda.memory_allocated(self._device)
        runner = self._make_runner(self._model, self._pages(tokens))
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        state_bytes = before - weight_bytes - (self._pages(tokens) + 1) * bytes_per_page  # tables, counts, workspaces
        runner.run(self._prefill_step(tokens))
        rows_per_step = -(-budget // tokens)  # the budget may hold several whole contexts
        step_bytes = (torch.cuda.max_memory_allocated(self._device) - before) * rows_per_step
        step_bytes *= 2 if self._prefill_graph_tokens() else 1  # a full step's graph has memory of its own
        step_bytes += 3 * 4 * self._max_rows * self.model_config.vocab_size  # sampling in float32
        graph_rows = resolved(self.config.cuda_graph_max_bs)
        step_bytes += graph_rows * self.model_config.vocab_size * self._dtype.itemsize  # the logits of graphs
        if self._parallel.size > 1:  # and twice before all ranks' parts of them are joined
            step_bytes += 2 * graph_rows * self.model_config.vocab_size * self._dtype.itemsize
        del runner
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        used_bytes = total - free + state_bytes
        kv_bytes = int(total * self.config.mem_fraction) - used_bytes - step_bytes - _GRAPH_BYTES
        pages = kv_bytes // bytes_per_page
        if pages < 2:
            used, step = used_bytes >> 20, step_bytes >> 20
            raise ValueError(
                f"mem_fraction {self.config.mem_fraction} leaves {kv_bytes >> 20} MiB for the KV cache beside {used} "
                f"MiB of weights and tables and {step} MiB of a step; raise it or lower max_prefill_tokens or "
                "max_running_requests"
            )
        return min(pages, self._max_rows * self._pages(self.model_config.context_length))

    def _warm_up(self) -> None:
        """Run what is compiled on first use, in a page that nobody holds yet, and capture graphs."""
        self._runner.run(self._prefill_step(1))
        if self._device.type == "cuda":
            self._runner.run(self._prefill_step(min(self.config.page_size, self.model_config.context_length, 16)))
            max_rows = resolved(self.config.cuda_graph_max_bs)
            if max_rows > 0:
                self._runner.capture_graphs(max_rows, self._prefill_graph_tokens())

    def _longest_prefill(self) -> int:
        """Tokens of the longest prompt that one step computes."""
        return min(resolved(self.config.max_prefill_tokens), self.model_config.context_length)

    def _prefill_graph_tokens(self) -> int:
        """The most tokens of a prompt step that runs as a CUDA graph; 0 where none does."""
        by_triton = self.config.attention_backend.split(",")[0] == "triton"
        return resolved(self.config.max_prefill_tokens) if by_triton and self.config.cuda_graph_max_bs else 0

    def _prefill_step(self, tokens: int) -> ScheduledBatch:
        """A step that computes a prompt of zeros in slot 0, on the first pages."""
        return ScheduledBatch(
            step=0,
            rows=[Row(slot=0, start=0, count=tokens, samples=True)],
            new_rows=[NewRow(0, [0] * tokens, tokens, SamplingParams(temperature=0), seed=0)],
            new_pages=[NewPages(slot=0, first_index=0, page_ids=list(range(self._pages(tokens))))],
            page_copies=[],
        )

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)


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


def find_model(config: EngineConfig) -> tuple[ModelSource, ModelConfig]:
    """Where the model lies on this machine, fetched if need be, and its shape."""
    source = resolve_model(
        config.model,
        source=config.model_source,
        revision=config.revision,
        weights_needed=config.load_format != "dummy",
    )
    return source, load_model_config(source)


def _checked(slot: WeightSlot, check: Callable[[], None]) -> WeightSlot:
    def load(tensor: CheckpointTensor) -> None:
        check()
        slot.load(tensor)

    return WeightSlot(slot.shape, load)


def _kernels(config: EngineConfig, dtype: torch.dtype) -> Kernels:
    """The other kernels of a device, which go with its attention backend; imported where they are of use."""
    if config.attention_backend == "reference":
        return TorchKernels(prepack=config.device == "cpu" and CpuMatrix.available(dtype))
    if config.attention_backend == "cpu":
        from mini_sglang.kernels.cpu.kernels import CpuKernels

        return CpuKernels(dtype)
    from mini_sglang.kernels.triton.kernels import TritonKernels

    return TritonKernels(deterministic=config.deterministic)


def page_bytes(config: EngineConfig, model: ModelConfig, dtype: str) -> int:
    """Of one page in the pool of each rank."""
    kv_heads = shard_heads(model.num_heads, model.num_kv_heads, 0, config.tp).kv.size
    return KVPool.bytes_per_page(model.num_layers, config.page_size, kv_heads, model.head_dim, kv_dtype(config, dtype))


def kv_dtype(config: EngineConfig, dtype: str) -> torch.dtype:
    return FP8 if config.kv_cache_dtype == "fp8" else DTYPES[dtype]


def resolved(value: int | None) -> int:
    if value is None:
        raise ValueError("the configuration was not resolved")
    return value


_WEIGHTS_TOO_LARGE = "the weights do not fit: use a smaller model or dtype, or a larger tp"
_STEP_TOO_LARGE = {  # by device
    "cpu": "the KV cache, the tables or a step do not fit: lower kv_cache_bytes, num_pages, max_running_requests, "
    "context_length or max_prefill_tokens",
    "cuda": "the KV cache or a step does not fit: lower mem_fraction, num_pages, max_prefill_tokens, "
    "max_running_requests or cuda_graph_max_bs",
}
_GRAPH_BYTES = 1 << 30  # left to CUDA graphs and the allocator's own rounding
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
