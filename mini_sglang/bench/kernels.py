"""The GPU's kernels one by one: how long each takes, and which share of the hardware's ceiling that is.

Every kernel runs as the model calls it, inside a CUDA graph, on several sets of inputs that are larger together than
the L2 cache. `cases` says what there is, with the bytes and FLOPs that each cannot avoid; `time_case` runs one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.triton_backend import TritonBackend
from mini_sglang.bench.hardware import seconds_in_graph
from mini_sglang.bench.kernel_time import KernelTime
from mini_sglang.bench.roofline import Ceilings
from mini_sglang.kernels.interface import KVCells, Norm, Rotation
from mini_sglang.kernels.triton.kernels import TritonKernels
from mini_sglang.kernels.triton.sampling import SlotState, sample_slots
from mini_sglang.model_config import ExpertsConfig, ModelConfig

_PROMPTS = (1024, 4096, 8192, 16384)
_ROWS = (1, 8, 64, 256)
_CUDNN = "cuDNN SDPA"
_SAMPLING = {  # temperature, top-k, top-p, min-p, repetition, presence and frequency penalty
    "sample": [0.6, 0, 1, 0, 1, 0, 0],
    "sample, top-k 20, top-p 0.95": [0.6, 20, 0.95, 0, 1, 0, 0],
    "sample, top-p 0.9": [0.6, 0, 0.9, 0, 1, 0, 0],
    "sample, penalties": [0.6, 0, 1, 0, 1.1, 0.5, 0.5],
}


@dataclass(frozen=True)
class Case:
    """One kernel on one shape. Each of `calls` does the same work on inputs of its own."""

    group: str  # one of kernel_time.GROUPS
    kernel: str
    shape: str
    bytes: int  # that it has to read and write
    flops: int
    calls: Sequence[Callable[[], object]]


def measure_kernels(
    model: ModelConfig, ceilings: Ceilings, *, groups: Sequence[str], page_size: int, dtype: torch.dtype
) -> list[KernelTime]:
    """Time every case of `groups` for this model's sizes on the current GPU."""
    device = torch.device("cuda")
    times: list[KernelTime] = []
    cudnn: dict[str, float] = {}
    for case in cases(model, groups=groups, page_size=page_size, device=device, dtype=dtype):
        seconds = seconds_in_graph(case.calls, device)
        if case.kernel == _CUDNN:
            cudnn[case.shape] = seconds
        times.append(
            KernelTime(
                case.group,
                case.kernel,
                case.shape,
                seconds * 1e6,
                case.bytes,
                case.flops,
                of_ceiling=ceilings.seconds(case.bytes, case.flops) / seconds,
                of_cudnn=cudnn[case.shape] / seconds if case.shape in cudnn else None,
            )
        )
    return times


def cases(
    model: ModelConfig,
    *,
    groups: Sequence[str],
    page_size: int,
    device: torch.device,
    dtype: torch.dtype,
    decode_lengths: dict[str, list[int]] | None = None,
    prompts: Sequence[int] = _PROMPTS,
    rows: Sequence[int] = _ROWS,
) -> Iterator[Case]:
    """All cases of `groups`; each is made when it is asked for, and may be dropped before the next."""
    maker = _CaseMaker(model, page_size, device, dtype, TritonKernels())
    if "decode" in groups:
        for name, lengths in (decode_lengths or ragged_lengths()).items():
            yield maker.decode(name, lengths)
    if "prefill" in groups:
        for tokens in prompts:
            yield maker.cudnn(tokens)
            yield maker.prefill(tokens)
    if "linear" in groups:
        for count in rows:
            yield from maker.products(count)
    if "experts" in groups and model.experts is not None:
        for count in (*rows, *prompts):
            yield from maker.experts(model.experts, count)
    if "small" in groups:
        for count in rows:
            yield from maker.between_products(count)


def ragged_lengths() -> dict[str, list[int]]:
    """Name -> KV lengths of the rows of a decode step."""
    rng = random.Random(0)
    return {
        "256 x 100-2000": [rng.randint(100, 2000) for _ in range(256)],
        "64 x 100-2000": [rng.randint(100, 2000) for _ in range(64)],
        "8 x 8000": [8000] * 8,
        "1 x 8000": [8000],
    }


@dataclass(frozen=True)
class _CaseMaker:
    model: ModelConfig
    page_size: int
    device: torch.device
    dtype: torch.dtype
    kernels: TritonKernels

    def decode(self, name: str, lengths: list[int]) -> Case:
        """One layer of a decode step, pages in random order. Bytes are those of keys and values."""
        model = self.model
        read = sum(lengths) * self._kv_bytes
        sets = self._sets(read)
        table, backend = self._pool(lengths, layers=sets)
        cells = torch.zeros(len(lengths), dtype=torch.int64, device=self.device)
        plan = backend.plan_decode(table, cells, torch.tensor(lengths, dtype=torch.int32, device=self.device))
        q = self._random(len(lengths), model.num_heads, model.head_dim)
        flops = 4 * sum(lengths) * model.num_heads * model.head_dim
        calls = [partial(plan.attend, q, layer) for layer in range(sets)]
        return Case("decode", "decode attention", name, read, flops, calls)

    def prefill(self, tokens: int) -> Case:
        """One layer of one prompt from its beginning. FLOPs count the lower triangle."""
        sets = self._sets(self._prompt_bytes(tokens))
        table, backend = self._pool([tokens], layers=sets)
        cells = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        plan = backend.plan(AttentionMetadata(starts=[0], counts=[tokens], page_table=table, cells=cells))
        q = self._random(tokens, self.model.num_heads, self.model.head_dim)
        calls = [partial(plan.attend, q, layer) for layer in range(sets)]
        return self._prompt_case("prefill attention", tokens, calls)

    def cudnn(self, tokens: int) -> Case:
        """The same through PyTorch's cuDNN attention, on contiguous tensors."""
        model = self.model
        sets = [
            (
                self._random(1, model.num_heads, tokens, model.head_dim),
                *self._random(2, 1, model.num_kv_heads, tokens, model.head_dim),
            )
            for _ in range(self._sets(self._prompt_bytes(tokens)))
        ]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return self._prompt_case(_CUDNN, tokens, [partial(attend, *qkv) for qkv in sets])

    def products(self, rows: int) -> Iterator[Case]:
        """The products of one layer and of the output head, with the norms, the gate and the residual around them.

        Where the norm is made with the sum before it (`Residual`), it is part of both products.
        """
        model, item = self.model, self.dtype.itemsize
        q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        norm = Norm(self._random(model.hidden_size), model.rms_norm_eps)
        mlp = [
            ("norm, gate_up, gate", model.hidden_size, 2 * model.intermediate_size),
            ("down + residual", model.intermediate_size, model.hidden_size),
        ]
        for name, inputs, outputs in (
            ("norm, qkv", model.hidden_size, q_size + 2 * kv_size),
            ("out + residual", q_size, model.hidden_size),
            *(mlp if model.experts is None else []),
            ("norm, head", model.hidden_size, model.vocab_size),
        ):
            gated, adds = name.endswith("gate"), name.endswith("residual")
            written = rows * (outputs // 2 if gated else outputs)
            moved = (inputs * outputs + rows * inputs + written * (1 + adds)) * item
            weights = [0.02 * self._random(outputs, inputs) for _ in range(self._sets(moved))]
            matrices = [self.kernels.matrix(weight, None) for weight in weights]
            x, residual = self._random(rows, inputs), self._random(rows, outputs)
            calls: list[Callable[[], object]]
            if adds:
                calls = [partial(matrix.add_to, residual, x, norm) for matrix in matrices]
            else:
                calls = [partial(matrix.gated if gated else matrix.matmul, x, norm) for matrix in matrices]
            yield Case("linear", name, f"{rows} x {inputs} -> {outputs}", moved, 2 * rows * inputs * outputs, calls)

    def experts(self, experts: ExpertsConfig, tokens: int) -> Iterator[Case]:
        """Routing, and all that experts do to one layer's tokens. Bytes are those of the experts that are chosen."""
        hidden, size, top_k = self.model.hidden_size, experts.intermediate_size, experts.experts_per_token
        item, each = self.dtype.itemsize, 3 * hidden * size
        route = partial(self.kernels.route, top_k=top_k, normalize=experts.normalize_weights)
        moved = tokens * (experts.num_experts * item + top_k * 8)
        logits = [self._random(tokens, experts.num_experts) for _ in range(self._sets(moved))]
        yield Case("experts", "route", f"{tokens} tokens", moved, 0, [partial(route, step) for step in logits])
        weights = self.kernels.experts(
            0.02 * self._random(experts.num_experts, 2 * size, hidden),
            0.02 * self._random(experts.num_experts, hidden, size),
        )
        x, residual = self._random(2, tokens, hidden)
        routed = [route(step) for step in logits]
        chosen = sum(ids.unique().numel() for ids, _ in routed) // len(routed)
        yield Case(
            "experts",
            "experts + residual",
            f"{tokens} x {top_k} of {experts.num_experts}, {hidden} -> {size} -> {hidden}",
            (chosen * each + 3 * tokens * hidden) * item,
            2 * tokens * top_k * each,
            [partial(weights.add_to, residual, x, ids, shares) for ids, shares in routed],
        )

    def between_products(self, rows: int) -> Iterator[Case]:
        """What lies between the products where it is a kernel of its own, and the draw of tokens."""
        model, kernels = self.model, self.kernels
        weight = self._random(model.hidden_size)
        places = torch.arange(rows, device=self.device)
        yield self._small(
            "rms_norm", rows, (rows, model.hidden_size), rows * model.hidden_size,
            lambda x: kernels.rms_norm(x, weight, model.rms_norm_eps),
        )  # fmt: skip
        yield self._rope_store(rows, places)
        yield self._small(
            "silu_mul", rows, (rows, 2 * model.intermediate_size), rows * model.intermediate_size, kernels.silu_mul
        )
        for name, settings in _SAMPLING.items():
            draw = partial(sample_slots, slots=places, positions=places.int(), state=self._slot_state(rows, settings))
            yield self._small(name, rows, (rows, model.vocab_size), 0, draw)

    def _small(
        self, name: str, rows: int, shape: tuple[int, int], written: int, call: Callable[[torch.Tensor], object]
    ) -> Case:
        """`call` on inputs of `shape`, of which all is read, with `written` values written."""
        moved = (shape[0] * shape[1] + written) * self.dtype.itemsize
        inputs = [self._random(*shape) for _ in range(self._sets(moved))]
        return Case("small", name, f"{rows} rows", moved, 0, [partial(call, x) for x in inputs])

    def _slot_state(self, rows: int, settings: list[float]) -> SlotState:
        return SlotState(
            settings=torch.tensor(settings, dtype=torch.float64, device=self.device).repeat(rows, 1),
            seeds=torch.zeros(rows, dtype=torch.int64, device=self.device),
            counts=torch.zeros(rows, self.model.vocab_size, dtype=torch.int16, device=self.device),
            tokens=torch.zeros(rows, rows + 1, dtype=torch.int32, device=self.device),
            num_computed=torch.zeros(rows, dtype=torch.int64, device=self.device),
            idle_slot=rows,
        )

    def _rope_store(self, rows: int, places: torch.Tensor) -> Case:
        model = self.model
        width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        moved = 2 * rows * width * self.dtype.itemsize
        angles = self._random(rows, model.head_dim // 2)
        rotation, norm = Rotation(angles, angles, places), self._random(model.head_dim)
        calls = []
        for _ in range(self._sets(moved)):
            keys, values = self._random(2, rows, model.num_kv_heads, model.head_dim)
            target, qkv = KVCells(keys, values, places), self._random(rows, width)
            calls.append(partial(self.kernels.rope_store, qkv, rotation, target, norm, norm, model.rms_norm_eps))
        return Case("small", "rope_store", f"{rows} rows", moved, 0, calls)

    def _prompt_case(self, kernel: str, tokens: int, calls: Sequence[Callable[[], object]]) -> Case:
        flops = 2 * tokens * tokens * self.model.num_heads * self.model.head_dim
        return Case("prefill", kernel, f"{tokens} tokens", self._prompt_bytes(tokens), flops, calls)

    def _prompt_bytes(self, tokens: int) -> int:
        return tokens * (self._kv_bytes + 2 * self.model.num_heads * self.model.head_dim * self.dtype.itemsize)

    @property
    def _kv_bytes(self) -> int:
        """Of one token in one layer"""
        return 2 * self.model.num_kv_heads * self.model.head_dim * self.dtype.itemsize

    def _sets(self, num_bytes: int) -> int:
        """The number of sets of inputs: from 8 to 64, four times the L2 cache together if that suffices."""
        if self.device.type != "cuda":
            return 1
        cache: int = torch.cuda.get_device_properties(self.device).L2_cache_size
        return min(max(-(-4 * cache // num_bytes), 8), 64)

    def _pool(self, lengths: list[int], *, layers: int) -> tuple[torch.Tensor, TritonBackend]:
        """A page table [rows, max pages] int64 in random order, and the backend over a pool of random values."""
        model = self.model
        pages = [-(-length // self.page_size) for length in lengths]
        pool = KVPool(
            num_layers=layers,
            num_pages=sum(pages),
            page_size=self.page_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        for layer in pool.layers:
            layer.normal_()
        ids = torch.randperm(sum(pages)).split(pages)
        table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).to(self.device)
        return table, TritonBackend(pool, num_heads=model.num_heads, dtype=self.dtype, max_rows=len(lengths))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)
