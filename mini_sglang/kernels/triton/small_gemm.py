"""How matrix products of more than two rows are computed where the library's way is not the fastest.

A matrix product of a small model takes a few microseconds, most of them to begin and to end: reading its weights takes
one or two. Our kernels begin while the previous kernel still runs (`pdl.py`), and save launches: gate and up are
combined where they are computed, and the partial sums of a split K are added up by the norm that follows. A larger
product may gain from that too, when the library computes both halves of K at once. The order of additions then depends
on the number of rows.

On an H200 in bfloat16, a layer of Qwen3-0.6B without attention took 32.5, 34.2, 36.0 and 39.7 µs for 16, 64, 128 and
256 rows with the library alone, and takes 23.9, 25.3, 27.2 and 33.4. The out and down projections of Qwen3-8B with the
norms after them took 44.5, 59.4, 64.4 and 68.0 µs for 4, 160, 192 and 256 rows, and take 42.5, 53.1, 55.1 and 63.2.
"""

from __future__ import annotations

import torch
import triton

from mini_sglang.kernels.triton.matmul import MatmulTile, matmul_partials, matmul_tile

_MAX_ROWS = 256
_MAX_SPLITS = 8
_FEW_ROWS = MatmulTile(16, 64, num_warps=4, num_stages=6)  # for fewer than the 64 rows of Hopper's matrix instruction
_MORE_ROWS = MatmulTile(64, 64, num_warps=4, num_stages=6)


def gated_tile(rows: int, weight: torch.Tensor) -> MatmulTile | None:
    """The tile of a gated product with `weight` [2 n, K], or None where the library followed by a gate is faster."""
    columns, depth = weight.shape
    pays = rows * depth <= 1 << 16 or (depth <= 1024 and rows <= _MAX_ROWS)
    if not pays or not _is_supported(weight):
        return None
    return _FEW_ROWS if rows < _MORE_ROWS.rows else matmul_tile(rows, columns, weight.dtype)


def split_k_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Partial sums of x [rows, K] times weight [n, K] -> [splits, rows, n] float32, or None if split-K is slower.

    Our kernel computes them if the weight is narrow, so that two programs for each multiprocessor of an H100 take few
    steps along K; it reads at a lower rate if there are fewer rows than a tile has. The library computes them, in two
    halves, where the whole of K would leave it too little to do at once.
    """
    rows = len(x)
    columns, depth = weight.shape
    if rows > _MAX_ROWS or not _is_supported(weight):
        return None
    is_narrow = columns < 4096
    if is_narrow and rows >= _FEW_ROWS.rows:
        tile = _FEW_ROWS if rows < _MORE_ROWS.rows else _MORE_ROWS
        splits = min(_MAX_SPLITS, 256 // (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)))
        if splits > 1 and depth <= 2048 * splits:
            return matmul_partials(x, weight, splits, tile=tile)
    in_halves = is_narrow or rows < _FEW_ROWS.rows or rows > 112
    return _halves(x, weight) if in_halves and weight.is_cuda else None  # PyTorch gives float32 results only on GPUs


def _halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, depth = x.shape
    halves_of_x = x.view(rows, 2, depth // 2).transpose(0, 1)
    halves = weight.view(len(weight), 2, depth // 2).permute(1, 2, 0)
    return torch.bmm(halves_of_x, halves, out_dtype=torch.float32)


def _is_supported(weight: torch.Tensor) -> bool:
    """Whether `matmul` takes the weight, at the rate of the tensor cores."""
    return weight.dtype.itemsize == 2 and weight.shape[1] % 16 == 0
