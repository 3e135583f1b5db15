"""From the fused qkv to attention's inputs in one pass: QK-norm, rotation, and the store into the KV pool.

q is written out rotated; k and v go straight to their cells of the pool, so neither is written twice. The rotation is
half-split (Su et al., arXiv 2104.09864). The PyTorch twin stands beside the kernel; neither knows a model or a page.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mini_sglang.kernels.interface import to_kv_dtype
from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait

_HEADS = 16  # heads per program, whatever the number of tokens: another tile would add in another order


def rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cells: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Normalise (if q_norm and k_norm are given) and rotate q and k, store k and v, return q [T, heads, head_dim].

    qkv [T, (heads + 2 * kv_heads) * head_dim] contiguous: q, k, v; positions [T] int32 or int64; cells [T] likewise:
    page id * page_size + offset; cos, sin [context, head_dim / 2] of any float dtype; keys, values [num_cells,
    kv_heads, head_dim] contiguous, of the pool's dtype (float8_e4m3fn saturates at ±448); q_norm, k_norm [head_dim].
    Computed in float32, rounded once. Raises ValueError for other layouts.
    """
    num_kv_heads, head_dim = keys.shape[1], keys.shape[2]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if not (qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("qkv, keys and values must be contiguous")
    if not (cos.is_contiguous() and sin.is_contiguous()) or cos.shape[1] != head_dim // 2:
        raise ValueError(f"cos and sin must be contiguous [context, {head_dim // 2}], got {tuple(cos.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given together")
    q = torch.empty(qkv.shape[0], num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _rope_store_kernel[(qkv.shape[0], triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS))](
        qkv,
        positions,
        cells,
        cos,
        sin,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        q,
        keys,
        values,
        eps,
        NUM_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=_HEADS,
        NORM=q_norm is not None,
        num_warps=4,
        **pdl_launch(qkv.device),
    )
    return q


def rope_store_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cells: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """The twin of `rope_store`, in float32: writes keys and values too."""
    num_kv_heads, head_dim = keys.shape[1], keys.shape[2]
    heads = qkv.float().view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    cosines, sines = cos[positions].float().unsqueeze(1), sin[positions].float().unsqueeze(1)  # [T, 1, head_dim / 2]

    def rotate(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)

    keys[cells.long()] = to_kv_dtype(rotate(k, k_norm), keys.dtype)
    values[cells.long()] = to_kv_dtype(v, values.dtype)
    return rotate(q, q_norm).to(qkv.dtype)


@triton.jit
def _to_kv_dtype(x, pool):
    """x in the dtype that `pool` points to; float8_e4m3fn saturates at its largest number."""
    if pool.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(pool.dtype.element_ty)


@triton.jit(do_not_specialize=["positions", "cells"])
def _rope_store_kernel(
    qkv,
    positions,
    cells,
    cos,
    sin,
    q_norm,
    k_norm,
    q,
    keys,
    values,
    eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program takes BLOCK_HEADS heads of one token, as two tiles: the first and the second halves of the heads."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, HALF_PAD)
    fits = (dims < HALF)[None, :]
    is_q = (heads < NUM_HEADS)[:, None]
    is_k = (heads >= NUM_HEADS)[:, None] & (heads < NUM_HEADS + KV_HEADS)[:, None]
    is_v = (heads >= NUM_HEADS + KV_HEADS)[:, None] & (heads < NUM_HEADS + 2 * KV_HEADS)[:, None]
    source = (token * (NUM_HEADS + 2 * KV_HEADS) + heads)[:, None] * (2 * HALF) + dims[None, :]
    valid = fits & (heads < NUM_HEADS + 2 * KV_HEADS)[:, None]
    position = tl.load(positions + token).to(tl.int64)
    cell = tl.load(cells + token).to(tl.int64)
    cosines = tl.load(cos + position * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(sin + position * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    if NORM:
        q_a = tl.load(q_norm + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
        q_b = tl.load(q_norm + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
        k_a = tl.load(k_norm + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
        k_b = tl.load(k_norm + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    pdl_wait(PDL)  # positions and cells were written when the step began
    raw_a = tl.load(qkv + source, mask=valid, other=0.0)
    raw_b = tl.load(qkv + source + HALF, mask=valid, other=0.0)
    a = raw_a.to(tl.float32)
    b = raw_b.to(tl.float32)
    if NORM:
        inverse_rms = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = a * inverse_rms * tl.where(is_q, q_a, k_a)
        b = b * inverse_rms * tl.where(is_q, q_b, k_b)
    rotated_a = a * cosines - b * sines
    rotated_b = b * cosines + a * sines
    to_q = (token * NUM_HEADS + heads)[:, None] * (2 * HALF) + dims[None, :]
    tl.store(q + to_q, rotated_a.to(q.dtype.element_ty), mask=is_q & fits)
    tl.store(q + to_q + HALF, rotated_b.to(q.dtype.element_ty), mask=is_q & fits)
    to_k = (cell * KV_HEADS + heads - NUM_HEADS)[:, None] * (2 * HALF) + dims[None, :]
    tl.store(keys + to_k, _to_kv_dtype(rotated_a, keys), mask=is_k & fits)
    tl.store(keys + to_k + HALF, _to_kv_dtype(rotated_b, keys), mask=is_k & fits)
    to_v = to_k - KV_HEADS * (2 * HALF)
    tl.store(values + to_v, _to_kv_dtype(raw_a, values), mask=is_v & fits)
    tl.store(values + to_v + HALF, _to_kv_dtype(raw_b, values), mask=is_v & fits)
