"""Reproducible exponential noise: it depends on (seed, position, token) alone, never on order, batch or device.

The samplers draw with it. This module defines the numbers; `triton/sampling.py` computes the same ones on a GPU. It
knows no request and no logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK64 = (1 << 64) - 1


def row_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> torch.Tensor:
    """Hash the (seed, position) of each row -> [R] int32."""
    pairs = zip(seeds, positions, strict=True)
    keys = [_mix64(_mix64(seed) + position) & 0xFFFFFFFF for seed, position in pairs]
    return torch.tensor([_signed32(key) for key in keys], dtype=torch.int32, device=device)


def exponential_noise(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Noise > 0 of each token in each row, exponentially distributed with rate 1, float32.

    token_ids [R, n] or [n] int32, keys [R] int32 -> [R, n].
    """
    bits = _hash(token_ids * _signed32(0x9E3779B9) + keys.unsqueeze(1)) & 0x7FFFFFFF
    uniform = (bits.float() + 0.5) * 2.0**-31  # in (0, 1], finest near 0, where the winners of the tail lie
    uniform.clamp_max_(1 - 2.0**-24)  # infinite noise would score -inf, as a masked token does, and that might be drawn
    return uniform.neg_().log1p_().neg_()


def _mix64(x: int) -> int:
    """SplitMix64's step (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _hash(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser (Appleby, public domain) on int32, whose arithmetic wraps as uint32's does."""
    x = x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed32(0x85EBCA6B))
    x = x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(_signed32(0xC2B2AE35))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x
