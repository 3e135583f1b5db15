"""Paged decode attention: one query token per row, or a few, against the keys and values of its pages.

Responsible for the Triton kernels, their workspace and the PyTorch twin. Knows tensors only: no request, no model, no
backend. Grids depend on static maxima and lengths are read on the device, so every launch can be captured in a CUDA
graph.

How the work is divided. If every program that the GPU holds at once got an equal share of the step, they would end
together: rows are cut into splits of that length (longer ones for long rows, so that no row has more than
`max_splits`). A work item is one split of one KV head; the query heads that share it are the rows of one tile, padded
to the 16 that a tensor core takes. Programs walk the list of items: whole splits first, then the last split of each
row, the longest first. There are more programs than the GPU holds at once, so that the next one starts wherever one has
ended early. The program that finishes a row's last split merges the splits in their order ("split-KV", Dao et al.,
Flash-Decoding, 2023).

    row 0  |split 0|split 1|split 2|last|        items: 0.0 0.1 0.2 1.0 | 2.0 0.3 1.1, times KV heads
    row 1  |split 0|la|
    row 2  |last  |

With `max_splits` 1 rows are not cut, so that the order of additions depends on no other row, and the kernel computes
prompts too: an item holds up to 16 // group consecutive tokens of a row (tile row i is token i // group, head i %
group), each of which sees one position more than the token before it. A block of positions after a token's own leaves
its sums as they are, so a token has the same bits whichever item it is in, decoded alone or as part of any chunk.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_trigger, pdl_wait, pdl_wait_only

_FIELDS = 8  # int32 per item: row, token, begin, end, split, splits, length (of its first token), unused
_FEW_ROWS = 16  # planned by a smaller kernel; one for each number of rows would take seconds to compile
_MIN_SPLIT = 32  # tokens; shorter splits are not worth their merge
LOG2_E = tl.constexpr(math.log2(math.e))
_WARPS_PER_SM = 8  # that fit into the registers of one multiprocessor


@dataclass(frozen=True)
class DecodeTuning:
    """How the work is divided. `num_stages` and `programs_per_sm` change no bit of the results.

    Programs of one warp need no barriers among warps. Eight warps fit into the registers of an H200's multiprocessor;
    with 24 programs for each, of which the next begins where one ends, it reads 3 to 8 % faster than with 8.
    """

    block_tokens: int = 16  # tokens of K and V per iteration
    max_splits: int = 32
    num_warps: int = 1
    num_stages: int = 3  # depth of the software pipeline that loads K and V ahead
    programs_per_sm: int = 24  # at most; never more than a step can have items

    def __post_init__(self) -> None:
        for name in ("max_splits", "block_tokens"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.block_tokens < 16:
            raise ValueError(f"a tensor core takes at least 16 tokens, got block_tokens {self.block_tokens}")


def decode_tuning(head_dim: int, dtype: torch.dtype) -> DecodeTuning:
    """The fastest tuning, measured on an H200 in bfloat16; wide heads need the registers of more warps."""
    if dtype.itemsize > 2:
        return DecodeTuning(num_warps=4, num_stages=2, programs_per_sm=6)
    if head_dim > 128:
        return DecodeTuning(num_warps=2, programs_per_sm=12)
    return DecodeTuning()


class PagedDecode:
    """The workspace of decode attention for up to `max_rows` rows: `plan` once per step, `run` once per layer.

    All its tensors are allocated here, so both calls can be captured; the largest takes max_rows * max_splits *
    num_heads * head_dim * 4 bytes. Steps must follow each other on one stream.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        device: torch.device,
        tuning: DecodeTuning,
        window: int | None = None,
    ) -> None:
        """`window`: each query sees only the last `window` positions, its own included."""
        check_heads(num_heads, num_kv_heads, head_dim)
        self._tuning = tuning
        self._max_rows = max_rows
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._page_size = page_size
        self._window = window or 0
        splits = tuning.max_splits
        self.tile_tokens = 16 * num_kv_heads // num_heads if splits == 1 else 1
        self._items = torch.zeros(max_rows * splits, _FIELDS, dtype=torch.int32, device=device)
        self._num_items = torch.zeros(1, dtype=torch.int32, device=device)
        self._planned = self._items, self._num_items, 0
        # finished splits of a row, per KV head; the program that finishes the last one resets it to 0
        self._splits_done = torch.zeros(max_rows, num_kv_heads, dtype=torch.int32, device=device)
        self._partial = torch.empty(max_rows, splits, num_heads, head_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(max_rows, splits, num_heads, dtype=torch.float32, device=device)
        self._max_programs, self._resident_programs = 4, 16  # for the interpreter: enough to reach every case
        if device.type == "cuda":
            sms = torch.cuda.get_device_properties(device).multi_processor_count
            self._max_programs = sms * tuning.programs_per_sm
            self._resident_programs = sms * _WARPS_PER_SM // tuning.num_warps

    def plan(self, lengths: torch.Tensor, q_starts: torch.Tensor) -> None:
        """List the step's work items.

        lengths [rows] int32: tokens that each row's query sees, its own included, 0 to skip the row; q_starts [rows]
        int32: the index of each row's token in q and out. Raises ValueError for more rows than the workspace has.
        """
        rows = lengths.shape[0]
        if rows > self._max_rows:
            raise ValueError(f"{rows} rows exceed the workspace's {self._max_rows}")
        _plan_kernel[(rows,)](
            lengths,
            q_starts,
            self._items,
            self._num_items,
            rows,
            ROWS=_FEW_ROWS if rows <= _FEW_ROWS else triton.next_power_of_2(self._max_rows),
            KV_HEADS=self._num_kv_heads,
            RESIDENT_PROGRAMS=self._resident_programs,
            MIN_SPLIT=_MIN_SPLIT,
            MAX_SPLITS=self._tuning.max_splits,
            BLOCK=self._tuning.block_tokens,
            WINDOW=self._window,
            FIELDS=_FIELDS,
            num_warps=4,
            **pdl_launch(lengths.device),
        )
        self._planned = self._items, self._num_items, rows * self._tuning.max_splits

    def plan_tiles(
        self, starts: torch.Tensor, counts: torch.Tensor, q_starts: torch.Tensor, tiles: torch.Tensor
    ) -> None:
        """List the work items of a step whose rows may compute several tokens each; rows are not cut into splits.

        starts, counts, q_starts [rows] int32: the position of a row's first token, its number of tokens, and the index
        of the first one in q and out; tiles [n] int64: row * 2^20 + first token of the tile, one tile for every
        `tile_tokens` tokens of a row. Tiles that see the most positions should come first; tiles of rows without tokens
        compute nothing. Raises ValueError unless `max_splits` is 1.
        """
        if self._tuning.max_splits != 1:
            raise ValueError(f"tiles need max_splits 1, got {self._tuning.max_splits}")
        items = torch.empty(len(tiles), _FIELDS, dtype=torch.int32, device=tiles.device)
        num_items = torch.empty(1, dtype=torch.int32, device=tiles.device)
        _plan_tiles_kernel[(triton.cdiv(len(tiles), 128),)](
            starts,
            counts,
            q_starts,
            tiles,
            items,
            num_items,
            len(tiles),
            TOKENS=self.tile_tokens,
            BLOCK=self._tuning.block_tokens,
            WINDOW=self._window,
            FIELDS=_FIELDS,
            num_warps=4,
        )
        self._planned = items, num_items, len(tiles)

    def run(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        page_table: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend as planned; `out` keeps what it holds for tokens of other rows.

        q [T, heads, head_dim], only its first dimension may be strided; keys, values [num_cells, kv_heads, head_dim];
        page_table [rows, max pages] int32 or int64; out [T, heads, head_dim] contiguous, of q's dtype;
        sinks [heads] float32: scores of no position, which take their share of each head's softmax.
        """
        check_operands(q, keys, values, out)
        group = self._num_heads // self._num_kv_heads
        items, num_items, max_items = self._planned
        _decode_kernel[(min(self._max_programs, max_items * self._num_kv_heads),)](
            q,
            keys,
            values,
            page_table,
            items,
            num_items,
            self._splits_done,
            self._partial,
            self._partial_lse,
            sinks,
            out,
            q.stride(0),
            page_table.stride(0),
            items.shape[0] - 1,
            softmax_scale_log2(self._head_dim),
            KV_HEADS=self._num_kv_heads,
            GROUP=group,
            GROUP_PAD=triton.next_power_of_2(group),
            TOKENS=self.tile_tokens,
            HEAD_DIM=self._head_dim,
            DIM_PAD=triton.next_power_of_2(self._head_dim),
            PAGE_SIZE=self._page_size,
            MAX_SPLITS=self._tuning.max_splits,
            BLOCK=self._tuning.block_tokens,
            WINDOW=self._window,
            STAGES=self._tuning.num_stages,
            FIELDS=_FIELDS,
            num_warps=self._tuning.num_warps,
            **pdl_launch(q.device),
        )


def paged_decode_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    q_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    page_size: int,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """The twin of `PagedDecode.plan` and `run`, in float64, row by row."""
    group = q.shape[1] // keys.shape[1]
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        positions = torch.arange(max(0, length - window) if window else 0, length, device=q.device)
        cells = page_table[row, positions // page_size].long() * page_size + positions % page_size
        k = keys[cells].double().repeat_interleave(group, 1)  # [length, heads, head_dim]
        v = values[cells].double().repeat_interleave(group, 1)
        token = int(q_starts[row])
        scores = torch.einsum("hd,nhd->hn", q[token].double(), k) / math.sqrt(q.shape[2])
        out[token] = torch.einsum("hn,nhd->hd", softmax_with_sinks(scores, sinks), v).to(out.dtype)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """scores [heads, ..., n], with those of `sinks` [heads] beside them if there are any -> weights [heads, ..., n]"""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(-1, *[1] * (scores.dim() - 1)).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def softmax_scale_log2(head_dim: int) -> float:
    """The factor on q·k for a softmax in powers of two: log2(e) / sqrt(head_dim)"""
    return math.log2(math.e) / math.sqrt(head_dim)


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ValueError for shapes that the attention kernels do not take."""
    if num_heads % num_kv_heads or num_heads // num_kv_heads > 16:
        raise ValueError(f"num_heads must be 1 to 16 times num_kv_heads, got {num_heads} and {num_kv_heads}")
    if head_dim % 16 or not 16 <= head_dim <= 256:
        raise ValueError(f"head_dim must be a multiple of 16 from 16 to 256, got {head_dim}")


def check_operands(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError for layouts that the attention kernels would misread."""
    if q.stride()[1:] != (q.shape[2], 1):
        raise ValueError(f"the heads of a query token must be contiguous, got strides {q.stride()}")
    if not (keys.is_contiguous() and values.is_contiguous() and out.is_contiguous()):
        raise ValueError("keys, values and out must be contiguous")


@triton.jit
def _first_seen(length, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """The first position that a row of `length` tokens reads; for one row or a vector of rows."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK
    return first


@triton.jit
def _split_of(seen, size, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """(tokens per split, splits, tokens of the last one) of a row that sees `seen` tokens; for one row or a vector."""
    size = tl.maximum(size, tl.cdiv(seen, MAX_SPLITS * BLOCK) * BLOCK)
    splits = tl.cdiv(seen, size)
    return size, splits, seen - tl.maximum(splits - 1, 0) * size


@triton.jit(do_not_specialize=["lengths", "q_starts", "rows"])
def _plan_kernel(
    lengths,
    q_starts,
    items,
    num_items,
    rows,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    RESIDENT_PROGRAMS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row writes its items: whole splits of long rows come first, then the last splits by length."""
    pdl_wait_only(PDL)
    row = tl.program_id(0)
    others = tl.arange(0, ROWS)
    length = tl.load(lengths + row)
    token = tl.load(q_starts + row)
    other_lengths = tl.load(lengths + others, mask=others < rows, other=0)
    first = _first_seen(length, BLOCK, WINDOW)
    other_seen = other_lengths - _first_seen(other_lengths, BLOCK, WINDOW)
    even_share = tl.cdiv(tl.sum(other_seen) * KV_HEADS, RESIDENT_PROGRAMS)
    wanted = tl.maximum(tl.cdiv(even_share, BLOCK) * BLOCK, MIN_SPLIT)
    size, splits, last = _split_of(length - first, wanted, MAX_SPLITS, BLOCK)
    _, other_splits, other_last = _split_of(other_seen, wanted, MAX_SPLITS, BLOCK)
    before = (other_lengths > length) | ((other_lengths == length) & (others < row))
    whole = tl.maximum(other_splits - 1, 0)
    whole_before = tl.sum(tl.where(before, whole, 0))
    last_before = tl.sum(((other_last > last) | ((other_last == last) & (others < row))).to(tl.int32))
    split = tl.arange(0, MAX_SPLITS)
    item = tl.where(split == splits - 1, tl.sum(whole) + last_before, whole_before + split)
    valid = split < splits
    begin = first + split * size
    fields = items + item * FIELDS
    tl.store(fields, row, mask=valid)
    tl.store(fields + 1, token, mask=valid)
    tl.store(fields + 2, begin, mask=valid)
    tl.store(fields + 3, tl.minimum(begin + size, length), mask=valid)
    tl.store(fields + 4, split, mask=valid)
    tl.store(fields + 5, splits, mask=valid)
    tl.store(fields + 6, length, mask=valid)
    tl.store(num_items, tl.sum(other_splits), mask=row == 0)
    pdl_trigger(PDL)  # attention reads the first items before it waits


@triton.jit(do_not_specialize=["starts", "counts", "q_starts", "tiles", "num_tiles"])
def _plan_tiles_kernel(
    starts,
    counts,
    q_starts,
    tiles,
    items,
    num_items,
    num_tiles,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Each program turns 128 tiles into items of one split."""
    place = tl.program_id(0) * 128 + tl.arange(0, 128)
    valid = place < num_tiles
    tile = tl.load(tiles + place, mask=valid, other=0)
    row = (tile >> 20).to(tl.int32)
    first = (tile & ((1 << 20) - 1)).to(tl.int32)
    start = tl.load(starts + row, mask=valid, other=0)
    count = tl.load(counts + row, mask=valid, other=0)
    length = start + first + 1
    fields = items + place * FIELDS
    tl.store(fields, row, mask=valid)
    tl.store(fields + 1, tl.load(q_starts + row, mask=valid, other=0) + first, mask=valid)
    tl.store(fields + 2, _first_seen(length, BLOCK, WINDOW), mask=valid)
    tl.store(fields + 3, tl.minimum(start + count, length + TOKENS - 1), mask=valid)
    tl.store(fields + 4, 0, mask=valid)
    tl.store(fields + 5, 1, mask=valid)
    tl.store(fields + 6, length, mask=valid)
    tl.store(num_items, num_tiles, mask=tl.program_id(0) == 0)


@triton.jit
def _read_item(items, item, FIELDS: tl.constexpr):
    """row, token, begin, end, split, splits, length"""
    fields = items + item * FIELDS
    return (
        tl.load(fields),
        tl.load(fields + 1),
        tl.load(fields + 2),
        tl.load(fields + 3),
        tl.load(fields + 4),
        tl.load(fields + 5),
        tl.load(fields + 6),
    )


@triton.jit(do_not_specialize=["last_item"])
def _decode_kernel(
    q,
    keys,
    values,
    page_table,
    items,
    num_items,
    splits_done,
    partial,
    partial_lse,
    sinks,
    out,
    q_stride,
    table_stride,
    last_item,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes every num_programs-th item; neighbouring programs read the KV heads of the same tokens."""
    heads = tl.arange(0, 16)  # query heads of the group, padded
    dims = tl.arange(0, DIM_PAD)
    q_mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    in_q = heads * HEAD_DIM  # offsets of the tile's rows in q and in out, from its first token and head on
    in_out = heads * HEAD_DIM
    if TOKENS > 1:
        token_of_row = heads // GROUP
        in_q = token_of_row * q_stride + heads % GROUP * HEAD_DIM
        in_out = token_of_row * (KV_HEADS * GROUP * HEAD_DIM) + heads % GROUP * HEAD_DIM
    first_work = tl.program_id(0)
    total = tl.load(num_items) * KV_HEADS
    # items are loaded one ahead, the first one together with num_items, so that no item starts with a chain of loads
    row, token, begin, end, split, splits, length = _read_item(
        items, tl.minimum(first_work // KV_HEADS, last_item), FIELDS
    )
    pdl_wait(PDL)  # the list was visible before: see pdl_trigger in _plan_kernel
    for work in range(first_work, total, tl.num_programs(0)):
        kv_head = work % KV_HEADS
        token_place = token.to(tl.int64)
        lengths = length
        if TOKENS > 1:
            lengths = tl.minimum(length + token_of_row, end)  # spare rows copy the last token's
            q_mask = (length + token_of_row <= end)[:, None] & (dims < HEAD_DIM)[None, :]
        elif MAX_SPLITS == 1:  # an idle tile of a prefill step is an item without positions
            q_mask = (heads < tl.where(begin < end, GROUP, 0))[:, None] & (dims < HEAD_DIM)[None, :]
        first_head = kv_head * (GROUP * HEAD_DIM)
        q_places = token_place * q_stride + first_head + in_q[:, None] + dims[None, :]
        q_tile = tl.load(q + q_places, mask=q_mask, other=0.0)
        highest = tl.full([16], float("-inf"), tl.float32)
        total_weight = tl.zeros([16], tl.float32)
        if sinks is not None:  # noqa: SIM102  (known when compiled, the other is not)
            if split == 0:  # once for each row
                head = kv_head * GROUP + heads % GROUP
                highest = tl.load(sinks + head) * LOG2_E
                total_weight += 1.0
        acc, total_weight, highest = _attend(
            highest,
            total_weight,
            q_tile,
            keys + kv_head * HEAD_DIM,
            values + kv_head * HEAD_DIM,
            page_table + row.to(tl.int64) * table_stride,
            begin,
            end,
            lengths,
            scale_log2,
            TOKENS,
            KV_HEADS,
            HEAD_DIM,
            DIM_PAD,
            PAGE_SIZE,
            BLOCK,
            WINDOW,
            STAGES,
        )
        next_item = tl.minimum((work + tl.num_programs(0)) // KV_HEADS, last_item)
        next_row, next_token, next_begin, next_end, next_split, next_splits, next_length = _read_item(
            items, next_item, FIELDS
        )
        acc = acc / total_weight[:, None]
        if splits == 1:
            places = token_place * (KV_HEADS * GROUP * HEAD_DIM) + first_head + in_out[:, None] + dims[None, :]
            tl.store(out + places, acc.to(out.dtype.element_ty), mask=q_mask)
        else:
            first_partial = row.to(tl.int64) * (MAX_SPLITS * KV_HEADS * GROUP) + kv_head * GROUP
            partial_row = first_partial + split * (KV_HEADS * GROUP)
            tl.store(partial + (partial_row + heads[:, None]) * HEAD_DIM + dims[None, :], acc, mask=q_mask)
            tl.store(partial_lse + partial_row + heads, highest + tl.log2(total_weight), mask=heads < GROUP)
            tl.debug_barrier()  # all threads have stored before one of them counts the split
            counter = splits_done + row * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.store(counter, 0)
                _merge(
                    partial + first_partial * HEAD_DIM,
                    partial_lse + first_partial,
                    out + (token_place * KV_HEADS + kv_head) * (GROUP * HEAD_DIM),
                    splits,
                    KV_HEADS * GROUP,
                    GROUP,
                    GROUP_PAD,
                    HEAD_DIM,
                    DIM_PAD,
                    MAX_SPLITS,
                )
        row, token, begin, end = next_row, next_token, next_begin, next_end
        split, splits, length = next_split, next_splits, next_length


@triton.jit
def _attend(
    highest,
    total_weight,
    q_tile,
    keys,
    values,
    pages,
    begin,
    end,
    lengths,
    scale_log2,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Begin an online softmax over positions [begin, end) -> (sum of weighted values, sum of weights, highest score)

    `highest` and `total_weight`: of what has a share of it without being a position.

    `lengths`: how many positions the row's query sees, or with several TOKENS each tile row's. A block of positions
    that a tile row cannot see leaves its sums unchanged: the highest score stays, its decay is 1, and 0 is added.
    """
    dims = tl.arange(0, DIM_PAD)
    acc = tl.zeros([16, DIM_PAD], tl.float32)
    # page ids are loaded one tile ahead, so that the loads of K and V depend on no load of their own iteration
    page = pages_of(pages, begin, end, PAGE_SIZE, BLOCK)
    for tile in tl.range(begin, end, BLOCK, num_stages=STAGES):
        positions = tile + tl.arange(0, BLOCK)
        seen = positions < end
        cells = page.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
        places = cells[:, None] * (KV_HEADS * HEAD_DIM) + dims[None, :]
        page = pages_of(pages, tile + BLOCK, end, PAGE_SIZE, BLOCK)
        # cells beyond the end are not read: they may hold NaN, and 0 * NaN is NaN
        mask = seen[:, None]
        if DIM_PAD != HEAD_DIM:
            mask = mask & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + places, mask=mask, other=0.0)
        v = tl.load(values + places, mask=mask, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k.to(q_tile.dtype)), input_precision="ieee") * scale_log2
        if TOKENS > 1:
            visible = positions[None, :] < lengths[:, None]
            if WINDOW > 0:
                visible = visible & (positions[None, :] >= lengths[:, None] - WINDOW)
        else:
            if WINDOW > 0:
                seen = seen & (positions >= lengths - WINDOW)
            visible = seen[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = new_highest
        if TOKENS > 1 and WINDOW > 0:  # before its window a tile row has seen nothing yet, and -inf - -inf is NaN
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total_weight = total_weight * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q_tile.dtype), v.to(q_tile.dtype), acc * decay[:, None], input_precision="ieee")
        highest = new_highest
    return acc, total_weight, highest


@triton.jit
def pages_of(pages, tile, end, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Page ids of the BLOCK positions from `tile` (a multiple of BLOCK) on: one if they share a page, else one each."""
    if PAGE_SIZE % BLOCK == 0:
        page = tl.load(pages + tile // PAGE_SIZE, mask=tile < end, other=0)
    else:
        positions = tile + tl.arange(0, BLOCK)
        page = tl.load(pages + positions // PAGE_SIZE, mask=positions < end, other=0)
    return page


@triton.jit
def _merge(
    partial,
    partial_lse,
    out,
    splits,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Combine a row's splits, in order, weighted by their share of the softmax, and write the heads of the group."""
    MAX_CHUNK: tl.constexpr = 4096 // (GROUP_PAD * DIM_PAD)  # splits per iteration that registers hold
    CHUNK: tl.constexpr = MAX_CHUNK if MAX_CHUNK < MAX_SPLITS else MAX_SPLITS
    heads = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total_weight = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for chunk in range(0, splits, CHUNK):
        split = chunk + tl.arange(0, CHUNK)
        valid = (split < splits)[:, None] & (heads < GROUP)[None, :]
        # other programs wrote these: read past this multiprocessor's L1 cache
        lse = tl.load(
            partial_lse + split[:, None] * NUM_HEADS + heads[None, :], mask=valid, other=0.0, cache_modifier=".cg"
        )
        lse = tl.where((split < splits)[:, None], lse, float("-inf"))
        values = tl.load(
            partial + split[:, None, None] * (NUM_HEADS * HEAD_DIM) + places[None, :, :],
            mask=(split < splits)[:, None, None] & mask[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - new_highest[None, :])
        decay = tl.exp2(highest - new_highest)
        total_weight = total_weight * decay + tl.sum(weights, 0)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * values, 0)
        highest = new_highest
    tl.store(out + places, (acc / total_weight[:, None]).to(out.dtype.element_ty), mask=mask)
