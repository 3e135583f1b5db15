"""The blocks of GGUF's types of 5, 6 and 8 bits and of the K types, as `QuantizedWeight` holds them.

`gguf.py` has the two types of 4 bits; the layouts are those of llama.cpp's ggml-quants. Every product of scales is
exact in float32, so a weight has the bits that the `gguf` package's `dequantize` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from mini_sglang.weights.gguf_types import TensorType
from mini_sglang.weights.quantized_weight import QuantizedWeight

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float32]
Parts = tuple[npt.NDArray[np.generic], Numbers, Numbers | None]  # q [blocks, weights], scales and minimums of groups


def unpack_blocks(rows: Bytes, kind: TensorType) -> QuantizedWeight:
    """A matrix of one of `BLOCK_TYPES`, by its stored bytes [rows, bytes per row]."""
    q, scale, minimum = BLOCK_TYPES[kind](rows.reshape(-1, kind.block_bytes))
    group = q.shape[1] // scale.shape[1]

    def by_row(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.reshape(rows.shape[0], -1)))

    return QuantizedWeight(by_row(q), by_row(scale), None if minimum is None else by_row(minimum), group)


def _q8_0(blocks: Bytes) -> Parts:
    """float16 d, 32 int8: w = d * q"""
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q5_0(blocks: Bytes) -> Parts:
    """float16 d, 32 fifth bits, 16 bytes of nibbles: w = d * (q - 16)"""
    return _five_bits(blocks[:, 2:]) - np.int8(16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    """float16 d and m, 32 fifth bits, 16 bytes of nibbles: w = d * q + m"""
    return _five_bits(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _five_bits(blocks: Bytes) -> npt.NDArray[np.int8]:
    high = np.unpackbits(blocks[:, :4], axis=1, bitorder="little")
    low = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    q: npt.NDArray[np.int8] = (low | high << 4).view(np.int8)
    return q


def _q4_k(blocks: Bytes) -> Parts:
    """float16 d and e, 12 bytes of scales, 128 bytes of nibbles: w = d * scale * q - e * minimum by groups of 32"""
    scale, minimum = _k_scales(blocks)
    return _k_nibbles(blocks[:, 16:]), scale, minimum


def _q5_k(blocks: Bytes) -> Parts:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of byte i is that of weight i of group g."""
    scale, minimum = _k_scales(blocks)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (_k_nibbles(blocks[:, 48:]) | high.reshape(len(blocks), -1) << 4).view(np.int8), scale, minimum


def _k_nibbles(nibbles: Bytes) -> Bytes:
    """32 bytes hold two groups of 32: one in the low halves, the next in the high halves."""
    pairs = nibbles.reshape(len(nibbles), 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(len(nibbles), -1)


def _k_scales(blocks: Bytes) -> tuple[Numbers, Numbers]:
    """Eight scales and eight minimums of 6 bits, the upper two of the last four each above the first four."""
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=1)
    minimum = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=1)
    return _half(blocks, 0) * scale, -_half(blocks, 2) * minimum


def _q6_k(blocks: Bytes) -> Parts:
    """128 bytes of nibbles, 64 of upper bits, 16 int8 scales, float16 d: w = d * scale * (q - 32) by groups of 16

    Each half of a block is 64 bytes of nibbles, low halves first, and 32 bytes of four times two upper bits.
    """
    nibbles = blocks[:, :128].reshape(-1, 2, 64)
    low = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    q = (low | upper.reshape(low.shape) << 4).reshape(len(blocks), -1).view(np.int8) - np.int8(32)
    return q, _half(blocks, 208) * blocks[:, 192:208].view(np.int8), None


def _half(blocks: Bytes, at: int) -> Numbers:
    """The float16 at a byte of every block [blocks, 1]"""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


BLOCK_TYPES: Mapping[TensorType, Callable[[Bytes], Parts]] = {
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
}
