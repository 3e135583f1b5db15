"""All-reduce in one kernel over the GPUs of one node: each writes its tensor into the others' memory and sums theirs.

A word of 4 bytes is sent as 8, together with the number of the sum. Memory writes 8 bytes at once, so a reader that
finds the number has found the data, and needs neither fences nor separate flags (the "LL" protocol of NVIDIA's NCCL).
This sends twice the bytes on the shortest way: one trip over the link. It uses nothing but 8-byte stores to peers'
memory. The PyTorch twin is a sum.

An inbox holds two sums: [2, ranks, words] int64. A rank writes sum n to where sum n - 2 was. It begins n after its
n - 1, which needed what every rank had sent; a rank sends n - 1 when its kernel of n - 2 has ended, so n - 2 is read.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait

_BLOCK = 512  # words of 4 bytes that a program sends or adds up at a time
_PROGRAMS = 528  # at most: all are on the GPU at once, and they are few that poll for the others' words


def one_shot_all_reduce(
    x: torch.Tensor,
    inbox: torch.Tensor,
    inboxes: torch.Tensor,
    count: torch.Tensor,
    rank: int,
    residual: torch.Tensor | None = None,
) -> None:
    """Replace x by its sum over the ranks, added in their order in float32 and rounded once. All ranks call it alike.

    x bfloat16 or float32, contiguous, of 4 n bytes; inbox [2, ranks, capacity >= n] int64, this rank's own, at first
    zero; inboxes [ranks] int64: the addresses of all ranks' inboxes; count [2] int32, at first zero: sums so far, and
    programs that have finished the present one; residual like x, the same on all ranks, is added before the rounding.
    Raises ValueError if x exceeds the inbox.
    """
    words = x.view(-1).view(torch.int32)
    ranks, capacity = inbox.shape[1:]
    if len(words) > capacity:
        raise ValueError(f"a sum of {x.nbytes} bytes exceeds the inbox's {4 * capacity}")
    _one_shot_all_reduce_kernel[(min(triton.cdiv(len(words), _BLOCK), _PROGRAMS),)](
        words,
        words if residual is None else residual.view(x.shape).view(-1).view(torch.int32),
        inbox,
        inboxes,
        count,
        len(words),
        RANK=rank,
        RANKS=ranks,
        CAPACITY=capacity,
        BLOCK=_BLOCK,
        PAIRS=x.dtype == torch.bfloat16,
        RESIDUAL=residual is not None,
        num_warps=4,
        **pdl_launch(x.device),
    )


@triton.jit(do_not_specialize=["num_words"])
def _one_shot_all_reduce_kernel(
    words,
    residual,
    inbox,
    inboxes,
    count,
    num_words,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program sends all its blocks, and then adds them up. With PAIRS a word holds two bfloat16, else one float32.

    With RESIDUAL the residual is the last term.
    """
    first_word = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    pdl_wait(PDL)
    this_sum = tl.load(count) + 1
    half = (this_sum & 1) * (RANKS * CAPACITY)
    flag = this_sum.to(tl.int64)
    for start in range(first_word, num_words, step):
        offsets = start + tl.arange(0, BLOCK)
        valid = offsets < num_words
        flagged = (flag << 32) | (tl.load(words + offsets, mask=valid, other=0).to(tl.int64) & 0xFFFFFFFF)
        for distance in tl.static_range(1, RANKS):  # no two ranks begin with the same peer
            peer = tl.load(inboxes + (RANK + distance) % RANKS).to(tl.pointer_type(tl.int64))
            tl.store(peer + half + RANK * CAPACITY + offsets, flagged, mask=valid)
    for start in range(first_word, num_words, step):
        offsets = start + tl.arange(0, BLOCK)
        valid = offsets < num_words
        own = tl.load(words + offsets, mask=valid, other=0)
        if RESIDUAL:  # loaded while the others' words are on their way
            kept = tl.load(residual + offsets, mask=valid, other=0)
        first = tl.zeros([BLOCK], tl.float32)
        second = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(RANKS + 1 if RESIDUAL else RANKS):
            word = own
            if source == RANKS:
                word = kept
            elif source != RANK:
                place = inbox + half + source * CAPACITY + offsets
                arrived = tl.load(place, mask=valid, other=0, volatile=True)
                while tl.max(tl.where(valid & ((arrived >> 32) != flag), 1, 0), 0) > 0:
                    arrived = tl.load(place, mask=valid, other=0, volatile=True)
                word = arrived.to(tl.int32)
            if PAIRS:  # a bfloat16 is the upper half of a float32
                first += (word << 16).to(tl.float32, bitcast=True)
                second += (word & -65536).to(tl.float32, bitcast=True)
            else:
                first += word.to(tl.float32, bitcast=True)
        if PAIRS:
            low = first.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            high = second.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
            tl.store(words + offsets, low | high, mask=valid)
        else:
            tl.store(words + offsets, first.to(tl.int32, bitcast=True), mask=valid)
    if tl.atomic_add(count + 1, 1) == tl.num_programs(0) - 1:
        tl.store(count + 1, 0)
        tl.store(count, this_sum)
