"""`Kernels` for a CPU: fused kernels on the threads that PyTorch multiplies with.

A decode step of a small model is a few milliseconds of matrix products between hundreds of operations on a few hundred
numbers each: PyTorch takes longer to call such an operation than to compute it. And a prompt's tokens would pass
through memory once for each operation that is fused here. Attention and steps of many rows run on all of PyTorch's
threads; few rows run on one, since waking the others takes as long.
"""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from mini_sglang.kernels.cpu.compiled import compiled_for
from mini_sglang.kernels.cpu.linear import CpuMatrix
from mini_sglang.kernels.cpu.openmp import ParallelKernel
from mini_sglang.kernels.interface import KVCells, Matrix, Rotation
from mini_sglang.kernels.torch_kernels import TorchExperts, TorchKernels, TorchMatrix
from mini_sglang.weights.tensor import QuantizedBlocks

FEW_ROWS = 32  # at most this many rows are computed by one thread


class CpuKernels:
    """`Kernels` for one dtype, float32 or bfloat16. Numba compiles them on first use and caches them on disk."""

    def __init__(self, dtype: torch.dtype) -> None:
        compiled = compiled_for(np.float32 if dtype == torch.float32 else np.uint16)
        self._rms_norm, self._rope_store, self._silu_mul, self._attend = map(ParallelKernel, compiled)
        self._prepack = CpuMatrix.available(dtype)
        self._torch = TorchKernels()

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, blocks: QuantizedBlocks | None = None) -> Matrix:
        return CpuMatrix(self, weight, bias, blocks) if self._prepack else TorchMatrix(self, weight, bias)

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> TorchExperts:
        return TorchExperts(self, gate_up, down)

    def route(self, logits: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self._torch.route(logits, top_k, normalize=normalize)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = weight.shape[0]
        rows = x.numel() // size
        if not x.is_contiguous():
            return self._torch.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        self._rms_norm.run(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, _bits(eps), single_thread=rows <= FEW_ROWS
        )
        return out

    def rope_store(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        target: KVCells,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        tokens, (kv_heads, size) = qkv.shape[0], target.keys.shape[1:]
        if not qkv.is_contiguous():
            return self._torch.rope_store(qkv, rotation, target, q_norm, k_norm, eps)
        num_heads = qkv.shape[1] // size - 2 * kv_heads
        q = qkv.new_empty(tokens, num_heads, size)
        self._rope_store.run(
            qkv.data_ptr(),
            rotation.cos.data_ptr(),
            rotation.sin.data_ptr(),
            rotation.positions.data_ptr(),
            target.keys.data_ptr(),
            target.values.data_ptr(),
            target.cells.data_ptr(),
            q_norm.data_ptr() if q_norm is not None else 0,
            k_norm.data_ptr() if k_norm is not None else 0,
            q.data_ptr(),
            *(tokens, num_heads, kv_heads, size, rotation.cos.shape[0], target.keys.shape[0]),
            _bits(eps),
            single_thread=tokens <= FEW_ROWS,
        )
        return q

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape
        if not gate_up.is_contiguous():
            return self._torch.silu_mul(gate_up)
        out = gate_up.new_empty(tokens, width // 2)
        self._silu_mul.run(gate_up.data_ptr(), out.data_ptr(), tokens, width // 2, single_thread=tokens <= FEW_ROWS)
        return out

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        page_table: torch.Tensor,
        lengths: torch.Tensor,
        page_size: int,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attend one token per row over its row's pages. q [R, heads, head_dim] contiguous -> the same shape.

        keys and values [cells, kv_heads, head_dim] contiguous; page_table [R, pages] int64 contiguous; lengths [R]
        int64: the tokens of each row, its own included. With `window` a row sees only the last `window` of them.
        """
        rows, num_heads, size = q.shape
        out = torch.empty_like(q)
        self._attend.run(
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            page_table.data_ptr(),
            lengths.data_ptr(),
            out.data_ptr(),
            *(rows, num_heads, keys.shape[1], size, keys.shape[0], page_size, page_table.shape[1], window or 0),
        )
        return out


@cache
def _bits(number: float) -> int:
    """The bits of a float64, as an int64."""
    return int(struct.unpack("q", struct.pack("d", number))[0])
