"""Dense matrices to few bits, round to nearest: each weight becomes the closest value that its block's scale allows.

Pure functions of one matrix, on whatever device it lies. They know no file format, and read no activations: methods
that calibrate (GPTQ, AWQ) are other programs' business.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mini_sglang.weights.quantized_weight import QuantizedWeight

_FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def quantize_fp8(
    w: torch.Tensor, block: tuple[int, int] | None = None, *, scale_dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """w [out, in] in any float dtype -> float8 e4m3 with a scale for each row, or for each block of rows and columns.

    Scales have the precision of `scale_dtype`. A block of zeros has scale 1.
    """
    rows, columns = block or (1, w.shape[1])
    values = w.float()
    scale = _scales(values, rows, columns, _FP8_LARGEST, scale_dtype)
    q = (values / _spread(scale, columns, w.shape[1])).clamp_(-_FP8_LARGEST, _FP8_LARGEST)
    return QuantizedWeight(q.to(torch.float8_e4m3fn), scale, None, columns)


def quantize_int4(w: torch.Tensor, group_size: int, *, scale_dtype: torch.dtype = torch.float32) -> QuantizedWeight:
    """w [out, in] in any float dtype -> scale * (q - 8), q of 4 bits, with a scale for each group of a row's inputs.

    The largest weight of a group comes to lie between two steps, 7 and 8, of which only -8 exists: so no weight is
    further off than half a step, and steps are smaller than if it were 7.
    """
    values = w.float()
    scale = _scales(values, 1, group_size, 7.5, scale_dtype)
    q = (values / _spread(scale, group_size, w.shape[1])).round_().clamp_(-8, 7).add_(8)
    return QuantizedWeight(q.to(torch.uint8), scale, scale * -8, group_size)


def _scales(values: torch.Tensor, rows: int, columns: int, steps: float, dtype: torch.dtype) -> torch.Tensor:
    """What makes the largest magnitude of each block `steps` steps -> [out, blocks along the inputs] float32"""
    height, width = values.shape
    padded = F.pad(values, (0, -width % columns, 0, -height % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    largest = blocks.abs().amax((1, 3))
    scale = (largest / steps).clamp_min(torch.finfo(dtype).tiny)  # of smaller ones, the scale itself would lose bits
    scale = torch.where(largest == 0, 1.0, scale).to(dtype).float()
    return scale.repeat_interleave(rows, 0)[:height]


def _spread(scale: torch.Tensor, columns: int, width: int) -> torch.Tensor:
    return scale.repeat_interleave(columns, 1)[:, :width] if scale.shape[1] > 1 else scale
