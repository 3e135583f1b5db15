"""How products of more rows than one or two are computed where the library's way is not the fastest.

A product of a small model takes a few microseconds, most of them to begin and to end: reading its weights takes one or
two. Ours begin while the kernel before still runs (`pdl.py`), and spare launches: gate and up are gated where they
are made, and what is cut along K (split-K) is added up by the norm behind it. A larger product may gain from that too,
when the library computes both halves of K at once. The order of additions then depends on the number of rows.

On an H200 in bfloat16, a layer of Qwen3-0.6B without attention took 32.5, 34.2, 36.0 and 39.7 µs for 16, 64, 128 and
256 rows by the library alone, and takes 23.9, 25.3, 27.2 and 33.4. Out and down of Qwen3-8B with the norms behind them
took 44.5, 59.4, 64.4 and 68.0 µs for 4, 160, 192 and 256 rows, and take 42.5, 53.1, 55.1 and 63.2.
"""

from __future__ import annotations

import torch
import triton

from mini_sglang.kernels.triton.matmul import MatmulTile, matmul_parts, matmul_tile

_MOST_ROWS = 256
_MOST_PARTS = 8
_FEW_ROWS = MatmulTile(16, 64, num_warps=4, num_stages=6)  # for less than the 64 rows of Hopper's matrix instruction
_MORE_ROWS = MatmulTile(64, 64, num_warps=4, num_stages=6)


def gated_tile(rows: int, weight: torch.Tensor) -> MatmulTile | None:
    """The tile of a gated product with `weight` [2 n, K], or None where the library and a gate are faster."""
    columns, depth = weight.shape
    pays = rows * depth <= 1 << 16 or (depth <= 1024 and rows <= _MOST_ROWS)
    if not pays or not _is_readable(weight):
        return None
    return _FEW_ROWS if rows < _MORE_ROWS.rows else matmul_tile(rows, columns, weight.dtype)


def split_k_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """x [rows, K] times weight [n, K], cut along K -> [parts, rows, n] float32, or None where that would not pay.

    By ours if the weight is narrow, so that two programs for each multiprocessor of an H100 need not walk far; it reads
    fewer rows than a tile has at a lower rate. By the library where it does too little at once for the whole of K.
    """
    rows = len(x)
    columns, depth = weight.shape
    if rows > _MOST_ROWS or not _is_readable(weight):
        return None
    is_narrow = columns < 4096
    if is_narrow and rows >= _FEW_ROWS.rows:
        tile = _FEW_ROWS if rows < _MORE_ROWS.rows else _MORE_ROWS
        parts = min(_MOST_PARTS, 256 // (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)))
        if parts > 1 and depth <= 2048 * parts:
            return matmul_parts(x, weight, parts, tile=tile)
    in_halves = is_narrow or rows < _FEW_ROWS.rows or rows > 112
    return _halves(x, weight) if in_halves and weight.is_cuda else None  # PyTorch has float32 results on GPUs alone


def _halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, depth = x.shape
    halves_of_x = x.view(rows, 2, depth // 2).transpose(0, 1)
    halves = weight.view(len(weight), 2, depth // 2).permute(1, 2, 0)
    return torch.bmm(halves_of_x, halves, out_dtype=torch.float32)


def _is_readable(weight: torch.Tensor) -> bool:
    """By `matmul`, at the rate of the tensor cores."""
    return weight.dtype.itemsize == 2 and weight.shape[1] % 16 == 0
