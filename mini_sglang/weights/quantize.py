"""Dense matrices to few bits, round to nearest: each weight becomes the closest value that its block's scale allows.

Pure functions of one matrix, on whatever device it lies. They know no file format, and read no activations: methods
that calibrate (GPTQ, AWQ) are other programs' business.
"""

from __future__ import annotations

import torch

from mini_sglang.weights.quantized_weight import QuantizedWeight

_FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def quantize_fp8(w: torch.Tensor) -> QuantizedWeight:
    """w [out, in] in any float dtype -> float8 e4m3 with a scale for each row; a row of zeros has scale 1."""
    values = w.float()
    scale = _scale(values.abs().amax(1, keepdim=True), _FP8_LARGEST)
    q = (values / scale).clamp_(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn)
    return QuantizedWeight(q, scale, None, w.shape[1])


def _scale(largest: torch.Tensor, steps: float) -> torch.Tensor:
    """What `largest`, the greatest magnitudes of blocks, is divided by to become `steps`."""
    tiny = torch.finfo(torch.float32).tiny  # of magnitudes so small, the scale itself would lose bits
    return torch.where(largest > 0, (largest / steps).clamp_min(tiny), 1.0)
