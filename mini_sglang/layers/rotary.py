"""Rotary position embedding (Su et al., arXiv 2104.09864) in the half-split layout, with its context extensions.

The angles of every position are tabulated once, in float32, and rounded to the model's dtype; the kernels look them up.
"""

from __future__ import annotations

import math

import torch

from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig, RopeScaling

RotaryTable = tuple[torch.Tensor, torch.Tensor]  # cos and sin of every position, [context_length, head_dim / 2]


def rotary_tables(config: ModelConfig, context_length: int, placement: Placement) -> list[RotaryTable]:
    """The table of each layer, which layers share.

    A layer without rotation (NoPE, Kazemnejad et al., arXiv 2305.19466) has one of angles 0.
    """
    inverse, amplitude = inverse_frequencies(config)
    rotated = _table(inverse, amplitude, context_length, placement)
    if not config.unrotated_layers:
        return [rotated] * config.num_layers
    still = _table(torch.zeros_like(inverse), 1.0, context_length, placement)
    return [still if layer in config.unrotated_layers else rotated for layer in range(config.num_layers)]


def _table(inverse: torch.Tensor, amplitude: float, context_length: int, placement: Placement) -> RotaryTable:
    """cos and sin of positions 0 to `context_length` - 1"""
    angles = torch.outer(torch.arange(context_length, dtype=torch.float32), inverse)
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    return cos.to(placement.device, placement.dtype), sin.to(placement.device, placement.dtype)


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair, [head_dim / 2] float32, and the factor on cos and sin (1 but for YaRN)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse, 1.0
    if scaling.kind == "linear":
        return inverse / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(inverse, scaling, config)
    raise ValueError(f"rope_scaling type must be linear, llama3 or yarn, got {scaling.kind!r}")


def _llama3(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow down long wavelengths, keep short ones, blend in between (Llama 3.1's published rule)."""
    wavelengths = 2 * math.pi / inverse
    turns = scaling.original_context_length / wavelengths  # full turns within the trained context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inverse / scaling.factor + blend * inverse


def _yarn(inverse: torch.Tensor, scaling: RopeScaling, config: ModelConfig) -> tuple[torch.Tensor, float]:
    """NTK-by-parts interpolation: dimensions that turn often keep their speed, slow ones are stretched (YaRN)."""

    def dimension_of(turns: float) -> float:
        ratio = scaling.original_context_length / (turns * 2 * math.pi)
        return config.head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch = ramp.clamp(0, 1)
    amplitude = scaling.attention_factor
    if amplitude is None:
        amplitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return inverse / scaling.factor * stretch + inverse * (1 - stretch), amplitude
