"""Random quantised weights of every kind that GPU kernels read."""

from __future__ import annotations

import torch

from mini_sglang.kernels.triton.quantized_gemv import PackedWeight, pack
from mini_sglang.weights.quantized_weight import QuantizedWeight

KINDS = ("float8", "int8", "symmetric 4 bit", "4 bit")
SHAPES = [(8, 64, 64), (24, 96, 32), (6, 256, 128), (20, 192, 192)]  # outputs, inputs, group


def random_weight(kind: str, n: int, k: int, group: int) -> QuantizedWeight:
    random = torch.Generator().manual_seed(n + k)
    scale = torch.rand(n, -(-k // group), generator=random) * 0.02
    if kind == "float8":
        return QuantizedWeight(torch.randn(n, k, generator=random).to(torch.float8_e4m3fn), scale, None, group)
    if kind == "int8":
        q = torch.randint(-127, 128, (n, k), generator=random, dtype=torch.int8)
        return QuantizedWeight(q, scale, None, group)
    q = torch.randint(0, 16, (n, k), generator=random, dtype=torch.uint8)
    minimum = -8 * scale if kind == "symmetric 4 bit" else -torch.rand(scale.shape, generator=random)
    return QuantizedWeight(q, scale, minimum, group)


def packed(kind: str, n: int, k: int, group: int, device: torch.device) -> PackedWeight:
    weight = pack(random_weight(kind, n, k, group).to(device))
    assert weight is not None
    return weight
