"""Paged attention of rows that compute several tokens: prompts, chunks of prompts, drafts that are verified.

Responsible for the Triton kernel and its PyTorch twin. All keys and values, those of the step's own tokens too, are
read from the pool through the page table, so a cached prefix costs nothing extra. Knows tensors only: no request, no
model.

How the work is divided. The query heads of a KV head and consecutive tokens of a row are the rows of one tile
(token-major: tile row i is token i // group, head i % group), so each tile reads its keys and values once for the whole
group. One launch covers every tile of a ragged batch; the longest tiles start first. Within a tile, positions that
every query sees run without a mask; the diagonal follows with one (FlashAttention-2, Dao, arXiv 2307.08691).
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_sglang.kernels.triton.paged_decode import (
    LOG2_E,
    check_heads,
    check_operands,
    pages_of,
    softmax_scale_log2,
    softmax_with_sinks,
)
from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait


@dataclass(frozen=True)
class PrefillTuning:
    """How the work is divided. `block_queries` counts tile rows: tokens times the query heads per KV head."""

    block_queries: int = 128
    block_tokens: int = 64
    num_warps: int = 8
    num_stages: int = 3


def prefill_tuning(
    head_dim: int, page_size: int, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None = None
) -> PrefillTuning:
    """The fastest tiles that fit the device's shared memory (measured on an H100 in bfloat16).

    `dtype` is that of the queries; if `kv_dtype` differs, a tile of keys and one of values must fit in `dtype` too.
    Raises ValueError if nothing fits.
    """
    kv_dtype = kv_dtype or dtype
    limit = 2**20  # no limit in the interpreter
    if device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    dim = triton.next_power_of_2(head_dim)
    wide = PrefillTuning(block_queries=128, block_tokens=128, num_warps=8, num_stages=3)
    candidates = [
        PrefillTuning(block_queries=128, block_tokens=64, num_warps=8, num_stages=3),
        PrefillTuning(block_queries=128, block_tokens=64, num_warps=8, num_stages=2),
        PrefillTuning(block_queries=64, block_tokens=32, num_warps=4, num_stages=2),
        PrefillTuning(block_queries=32, block_tokens=16, num_warps=4, num_stages=2),
    ]
    if dtype.itemsize > 2:  # no tensor cores: every product is unrolled into registers
        candidates = [PrefillTuning(block_queries=32, block_tokens=32 if dim <= 128 else 16, num_warps=4, num_stages=2)]
    elif dim == 128 and page_size % 64:  # page ids are looked up token by token: wider tiles are faster
        candidates.insert(0, wide)
    for tuning in candidates:
        rows = tuning.block_queries + (2 * tuning.block_tokens if kv_dtype != dtype else 0)
        kv_rows = 2 * tuning.num_stages * tuning.block_tokens
        if (rows * dtype.itemsize + kv_rows * kv_dtype.itemsize) * dim <= limit:
            return tuning
    raise ValueError(f"head_dim {head_dim} in {dtype} needs more shared memory than {device}'s {limit} bytes")


def short_prefill_tuning(long: PrefillTuning, head_dim: int, dtype: torch.dtype) -> PrefillTuning:
    """The fastest tiles for tokens that see at most `SHORT_PREFILL` positions; `long` are those for more.

    Measured on an H200 in bfloat16, heads of 128: a quarter faster for prompts of 100 to 1,024 tokens, half for 64.
    """
    return PrefillTuning(64, 32, num_warps=4, num_stages=3) if dtype.itemsize == 2 and head_dim <= 128 else long


SHORT_PREFILL = 1536  # positions


def prefill_tiles(starts: Sequence[int], counts: Sequence[int], group: int, tuning: PrefillTuning) -> list[int]:
    """The tiles of rows that compute `counts` tokens from positions `starts` on: row * 2^20 + first token of the tile.

    Rows of count 0 have no tiles. Tiles that see the most positions come first, so that the last to run are short.
    """
    step = tuning.block_queries // group
    tiles = [(starts[row] + first, row, first) for row, count in enumerate(counts) for first in range(0, count, step)]
    tiles.sort(key=lambda tile: -tile[0])
    return [(row << 20) + first for _, row, first in tiles]


def paged_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    q_starts: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    page_size: int,
    tuning: PrefillTuning,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend causally from every token of the rows that have `tiles`; other tokens stay unchanged in `out`.

    q [T, heads, head_dim], only its first dimension may be strided; keys, values [num_cells, kv_heads, head_dim];
    page_table [rows, max pages] int32 or int64; starts, counts, q_starts [rows] int32: the position of a row's first
    token, its number of tokens, and the index of the first one in q and out; tiles [n] int64, made with the same
    tuning; out [T, heads, head_dim] contiguous, of q's dtype. With `window`, a query sees the last `window` positions
    only, its own included. `sinks` [heads] float32 are scores of no position, which take their share of the softmax.
    """
    check_operands(q, keys, values, out)
    num_heads, num_kv_heads, head_dim = q.shape[1], keys.shape[1], q.shape[2]
    check_heads(num_heads, num_kv_heads, head_dim)
    _prefill_kernel[(tiles.shape[0] * num_kv_heads,)](
        q,
        keys,
        values,
        page_table,
        starts,
        counts,
        q_starts,
        tiles,
        sinks,
        out,
        q.stride(0),
        page_table.stride(0),
        softmax_scale_log2(head_dim),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        PAGE_SIZE=page_size,
        BLOCK_QUERIES=tuning.block_queries,
        BLOCK=tuning.block_tokens,
        WINDOW=window or 0,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        **pdl_launch(q.device),
    )


def paged_prefill_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    q_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    page_size: int,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """The twin of `paged_prefill`, in float64, row by row; rows of count 0 stay as they are."""
    group = q.shape[1] // keys.shape[1]
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        positions = torch.arange(start + count, device=q.device)
        cells = page_table[row, positions // page_size].long() * page_size + positions % page_size
        k = keys[cells].double().repeat_interleave(group, 1)  # [start + count, heads, head_dim]
        v = values[cells].double().repeat_interleave(group, 1)
        span = slice(int(q_starts[row]), int(q_starts[row]) + count)
        scores = torch.einsum("thd,nhd->htn", q[span].double(), k) / math.sqrt(q.shape[2])
        queries = positions[start:].unsqueeze(1)
        masked = positions > queries
        if window:
            masked |= positions <= queries - window
        weights = softmax_with_sinks(scores.masked_fill(masked, float("-inf")), sinks)
        out[span] = torch.einsum("htn,nhd->thd", weights, v).to(out.dtype)


@triton.jit(do_not_specialize=["starts", "counts", "q_starts", "tiles"])  # they may begin anywhere in a tensor
def _prefill_kernel(
    q,
    keys,
    values,
    page_table,
    starts,
    counts,
    q_starts,
    tiles,
    sinks,
    out,
    q_stride,
    table_stride,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes one tile of queries for one KV head; the longest tiles of all heads start first.

    The idle tiles that pad a graph's list come last, so that they take no multiprocessor from a tile with work.
    """
    TOKENS: tl.constexpr = BLOCK_QUERIES // GROUP
    tile = tl.load(tiles + tl.program_id(0) // KV_HEADS)
    kv_head = tl.program_id(0) % KV_HEADS
    row = (tile >> 20).to(tl.int32)
    first = (tile & ((1 << 20) - 1)).to(tl.int32)  # of the row's tokens
    start = tl.load(starts + row)
    count = tl.load(counts + row)
    queries = tl.arange(0, BLOCK_QUERIES)
    dims = tl.arange(0, DIM_PAD)
    token = first + queries // GROUP
    valid = (queries < TOKENS * GROUP) & (token < count)
    places = (tl.load(q_starts + row) + token).to(tl.int64)
    head_offsets = (kv_head * GROUP + queries % GROUP) * HEAD_DIM
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    pdl_wait(PDL)  # everything read so far was written when the step began
    q_tile = tl.load(q + (places * q_stride + head_offsets)[:, None] + dims[None, :], mask=mask, other=0.0)

    limits = start + tl.minimum(token, count - 1)  # the last position each query sees; spare rows copy a real one
    end = start + tl.minimum(first + TOKENS, count)  # one after the last position that any query sees
    unmasked = (start + first + 1) // BLOCK * BLOCK  # up to here every query sees everything
    begin = start * 0
    if WINDOW > 0:
        begin = tl.maximum(start + first - WINDOW + 1, 0) // BLOCK * BLOCK
        unmasked = begin
    highest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total_weight = tl.zeros([BLOCK_QUERIES], tl.float32)
    if sinks is not None:
        highest = tl.load(sinks + kv_head * GROUP + queries % GROUP) * LOG2_E
        total_weight += 1.0
    acc = tl.zeros([BLOCK_QUERIES, DIM_PAD], tl.float32)
    pages = page_table + row.to(tl.int64) * table_stride
    k_head = keys + kv_head * HEAD_DIM
    v_head = values + kv_head * HEAD_DIM
    if WINDOW == 0:
        acc, total_weight, highest = _attend(
            acc, total_weight, highest, q_tile, k_head, v_head, pages, begin, unmasked, end, limits, scale_log2,
            KV_HEADS, HEAD_DIM, DIM_PAD, PAGE_SIZE, BLOCK, WINDOW, STAGES, False,
        )  # fmt: skip
    acc, total_weight, highest = _attend(
        acc, total_weight, highest, q_tile, k_head, v_head, pages, unmasked, end, end, limits, scale_log2,
        KV_HEADS, HEAD_DIM, DIM_PAD, PAGE_SIZE, BLOCK, WINDOW, STAGES, True,
    )  # fmt: skip
    acc = acc / total_weight[:, None]
    places = places * (KV_HEADS * GROUP * HEAD_DIM) + head_offsets
    tl.store(out + places[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    acc,
    total_weight,
    highest,
    q_tile,
    keys,
    values,
    pages,
    begin,
    until,
    end,
    limits,
    scale_log2,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Continue an online softmax over positions [begin, until); without MASKED every query sees all of them."""
    dims = tl.arange(0, DIM_PAD)
    page = pages_of(pages, begin, end, PAGE_SIZE, BLOCK)
    for tile in tl.range(begin, until, BLOCK, num_stages=STAGES):
        positions = tile + tl.arange(0, BLOCK)
        seen = positions < end
        cells = page.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
        places = cells[:, None] * (KV_HEADS * HEAD_DIM) + dims[None, :]
        page = pages_of(pages, tile + BLOCK, end, PAGE_SIZE, BLOCK)
        if MASKED:
            # cells beyond the end are not read: they may hold NaN, and 0 * NaN is NaN
            mask = seen[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(keys + places, mask=mask, other=0.0)
            v = tl.load(values + places, mask=mask, other=0.0)
        elif DIM_PAD != HEAD_DIM:
            mask = (dims < HEAD_DIM)[None, :]
            k = tl.load(keys + places, mask=mask, other=0.0)
            v = tl.load(values + places, mask=mask, other=0.0)
        else:
            k = tl.load(keys + places)
            v = tl.load(values + places)
        scores = tl.dot(q_tile, tl.trans(k.to(q_tile.dtype)), input_precision="ieee")
        if MASKED:
            visible = positions[None, :] <= limits[:, None]
            if WINDOW > 0:
                visible = visible & (positions[None, :] > limits[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        # before its window a query has seen nothing yet, and -inf - -inf is NaN
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest) if WINDOW > 0 else new_highest
        weights = tl.exp2(scores * scale_log2 - base[:, None])
        decay = tl.exp2(highest - base)
        total_weight = total_weight * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q_tile.dtype), v.to(q_tile.dtype), acc * decay[:, None], input_precision="ieee")
        highest = new_highest
    return acc, total_weight, highest
