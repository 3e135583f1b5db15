"""The draw of one token per row as a race (Gumbel-max), on a GPU in one pass over the logits, beside its PyTorch twin.

Each token's noise is a hash of (seed, position, token): the winner is a sample of softmax(logits / temperature) that no
other row, batch or order of additions changes. Temperature 0 runs without noise: the argmax.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mini_sglang.kernels.noise import exponential_times, row_keys

_SPLITS = 16  # programs per row: one alone would take a long vocabulary too slowly
_BLOCK = 2048


def race(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """logits [R, vocab], any float dtype; temperatures [R] float32; seeds, positions [R] int64 -> [R] int64"""
    rows, vocab = logits.shape
    values = torch.empty(rows, _SPLITS, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, _SPLITS, dtype=torch.int64, device=logits.device)
    winners = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _heat_kernel[(rows, _SPLITS)](
        logits, temperatures, seeds, positions, values, indices, vocab, logits.stride(0), SPLITS=_SPLITS, BLOCK=_BLOCK
    )
    _final_kernel[(rows,)](values, indices, winners, SPLITS=_SPLITS)
    return winners


def race_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The twin of `race`."""
    keys = row_keys(seeds.tolist(), positions.tolist(), logits.device)
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    scores = logits.float() / temperatures.unsqueeze(1) - exponential_times(token_ids, keys).log_()
    return torch.where(temperatures > 0, scores.argmax(-1), logits.float().argmax(-1))


@triton.jit
def _mix64(x):
    """SplitMix64's step, as in `noise.py`."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _heat_kernel(
    logits, temperatures, seeds, positions, values, indices, vocab, stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program finds the best of one split of a row."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    key = (_mix64(_mix64(seed) + position) & 0xFFFFFFFF).to(tl.uint32)
    temperature = tl.load(temperatures + row)
    size = tl.cdiv(tl.cdiv(vocab, SPLITS), BLOCK) * BLOCK
    best = -float("inf")
    winner = tl.full((), 0, tl.int32) + tl.minimum(split * size, vocab - 1).to(tl.int32)
    for start in range(split * size, tl.minimum((split + 1) * size, vocab), BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < vocab
        score = tl.load(logits + row * stride + token, mask=there, other=-float("inf")).to(tl.float32)
        if temperature > 0:
            bits = token.to(tl.uint32) * 0x9E3779B9 + key
            bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
            bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
            bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
            uniform = (bits.to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
            # -log(1 - u): by its series where the difference from 1 would be lost
            series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0)))
            time = tl.where(uniform < 0.005, series, -tl.log(tl.maximum(1.0 - uniform, 1e-30)))
            score = tl.where(there, score / temperature - tl.log(time), -float("inf"))
        block_best, block_winner = tl.max(score, 0, return_indices=True)
        better = block_best > best
        best = tl.where(better, block_best, best)
        winner = tl.where(better, start + block_winner, winner)
    tl.store(values + row * SPLITS + split, best)
    tl.store(indices + row * SPLITS + split, winner.to(tl.int64))


@triton.jit
def _final_kernel(values, indices, winners, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    winner = tl.argmax(tl.load(values + row * SPLITS + splits), 0)
    tl.store(winners + row, tl.load(indices + row * SPLITS + winner))
