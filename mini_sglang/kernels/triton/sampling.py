"""Draws one token per row from its logits, on a GPU, without a sort: penalties, temperature, top-k, top-p, min-p, draw.

The draw is an exponential race (the Gumbel-max trick): token i finishes after noise(seed, position, i) / exp(logit i),
and the first is the sample. A filter keeps the upper end of one order (logit descending, token id ascending). So if the
winner among all tokens is kept, it also wins among the kept; if not, nothing at or below it is kept, and the tokens
above it race again.

1. `_race_kernel`, several programs per row: the winner of each block of tokens and, for rows with a filter, the mass of
   the block and the largest logit of every 32 tokens (a group).
2. `_choose_kernel`, one program per row: the winner of all blocks. For rows with a filter it looks only into groups
   whose largest logit reaches the winner's: usually a handful, which say how many tokens and how much mass lie above.

A row is sampled by the state of its slot. `execution/sampler.py` has the definition, which is also the PyTorch twin.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait

_PROGRAMS = 2112  # that race at the same time: sixteen on each multiprocessor of an H100
_BLOCK = 2048  # tokens that share one winner
_GROUP = 32  # tokens that share one entry in the list of largest logits
_TILE = 64  # groups that are read at a time
_LOG2_E = tl.constexpr(1.4426950408889634)
_ON_GPU = tl.constexpr(torch.cuda.is_available())  # else in the interpreter, which has no libdevice

NUM_SETTINGS = 7  # temperature, top_k, top_p, min_p, repetition, presence and frequency penalty
PROMPT = -(2**15)  # the bit of a count that marks a token of the prompt


@dataclass(frozen=True)
class SlotState:
    """What sampling reads and writes of each slot: how its request is sampled, and its tokens."""

    settings: torch.Tensor  # [slots, NUM_SETTINGS] float64; top_k 0, top_p 1, min_p 0 mean off, as for temperature 0
    seeds: torch.Tensor  # [slots] int64
    counts: torch.Tensor  # [slots, vocab] int16: times in the output, at most 32,767; plus PROMPT; for penalties
    tokens: torch.Tensor  # [slots, context + 1] int32
    num_computed: torch.Tensor  # [slots] int64
    idle_slot: int  # pads batches, perhaps with several rows; nothing is drawn for it: it gets token 0


def sample_slots(logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Draw one token per row, write it at its position, count it, and mark all tokens before it as computed.

    logits [R, vocab], any float dtype, tokens of a row contiguous, left unchanged; slots [R] int64; positions [R]
    int32, those of the tokens to be drawn -> token ids [R] int64. Logits that are NaN are never drawn.
    On a GPU the preceding kernel may write the logits, but nothing else that this reads.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("the logits of a row must be contiguous")
    blocks, groups = triton.cdiv(vocab, _BLOCK), triton.cdiv(vocab, _GROUP)
    blocks_per_program = triton.cdiv(blocks, max(1, _PROGRAMS // rows))
    device = logits.device
    # of each block: the winner's score, the largest logit, the mass
    block_stats = torch.empty(rows, blocks, 3, dtype=torch.float32, device=device)
    winners = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    group_maxima = torch.empty(rows, groups, dtype=torch.float32, device=device)
    group_list = torch.empty(rows, groups, dtype=torch.int32, device=device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    _race_kernel[(rows, triton.cdiv(blocks, blocks_per_program))](
        logits,
        slots,
        positions,
        state.settings,
        state.seeds,
        state.counts,
        block_stats,
        winners,
        group_maxima,
        vocab,
        groups,
        blocks_per_program,
        logits.stride(0),
        state.idle_slot,
        BLOCK=_BLOCK,
        GROUP=_GROUP,
        SETTINGS=NUM_SETTINGS,
        num_warps=4,
        **pdl_launch(device),
    )
    _choose_kernel[(rows,)](
        logits,
        slots,
        positions,
        state.settings,
        state.seeds,
        state.counts,
        block_stats,
        winners,
        group_maxima,
        group_list,
        state.tokens,
        state.num_computed,
        token_ids,
        vocab,
        groups,
        logits.stride(0),
        state.tokens.stride(0),
        state.idle_slot,
        BLOCKS=blocks,
        BLOCKS_PAD=triton.next_power_of_2(blocks),
        GROUPS_PAD=triton.next_power_of_2(groups),
        GROUP=_GROUP,
        TILE=_TILE,
        SETTINGS=NUM_SETTINGS,
        num_warps=16,
        **pdl_launch(device),
    )
    return token_ids


@triton.jit(do_not_specialize=["slots", "positions", "blocks_per_program", "idle_slot"])
def _race_kernel(
    logits,
    slots,
    positions,
    settings,
    seeds,
    counts,
    block_stats,
    winners,
    group_maxima,
    vocab,
    num_groups,
    blocks_per_program,
    stride,
    idle_slot,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SETTINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program finds the winners of consecutive blocks of a row, skipping blocks that cannot hold the row's winner.

    A block's scores and mass are relative to its largest logit, so that no temperature overflows and no bit depends on
    how many programs share a row. Skipping a block takes two instructions per token instead of two logarithms: a time
    -log(1 - u) is at least u, so a token whose u is too large to beat the best score so far has lost.
    """
    row, first_block = tl.program_id(0).to(tl.int64), tl.program_id(1) * blocks_per_program
    slot = tl.load(slots + row)
    setting = settings + slot * SETTINGS
    temperature = tl.load(setting).to(tl.float32)
    sharpness = _sharpness(temperature)
    filtered = _is_filtered(setting)
    repetition, presence, frequency = _penalties(setting)
    key = _row_key(tl.load(seeds + slot), tl.load(positions + row))
    pdl_wait(PDL)
    if slot == idle_slot:
        return
    blocks = tl.cdiv(vocab, BLOCK)
    best_score = tl.full((), -float("inf"), tl.float32)  # so far, relative to `best_top`
    best_top = tl.full((), -1e30, tl.float32)
    for block in range(first_block, tl.minimum(first_block + blocks_per_program, blocks)):
        token = block * BLOCK + tl.arange(0, BLOCK)
        x = _read(logits + row * stride, counts + slot * vocab, token, token < vocab, repetition, presence, frequency)
        top = tl.maximum(tl.max(x, 0), -1e30)
        score = (x - top) * sharpness
        mass = tl.full((), 0.0, tl.float32)
        if filtered:
            mass = tl.sum(tl.exp(score), 0)
            group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            maxima = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
            tl.store(group_maxima + row * num_groups + group, maxima, mask=group < num_groups)
        level = best_score + (best_top - top) * sharpness
        if temperature > 0:
            # u < exp(score - level), both sides times 2^31, by fewer instructions; 0.002 is a margin for rounding
            bits_limit = tl.exp2((x - top) * (sharpness * _LOG2_E) + (31.002 - level * _LOG2_E))
            may_win = _bits(token, key).to(tl.float32) < bits_limit
        else:
            may_win = x > best_top
        best = tl.full((), -float("inf"), tl.float32)
        winner = tl.minimum(block * BLOCK, vocab - 1)
        if tl.max(may_win.to(tl.int32), 0) > 0:
            if temperature > 0:
                score -= _log(_exponential(_uniform(token, key)))
            best, winner = _first(score, token, vocab)
            if best > level:
                best_score = best
                best_top = top
        result = row * blocks + block
        tl.store(winners + result, winner)
        tl.store(block_stats + result * 3, best)
        tl.store(block_stats + result * 3 + 1, top)
        tl.store(block_stats + result * 3 + 2, mass)


@triton.jit(do_not_specialize=["slots", "positions"])
def _choose_kernel(
    logits,
    slots,
    positions,
    settings,
    seeds,
    counts,
    block_stats,
    winners,
    group_maxima,
    group_list,
    tokens,
    num_computed,
    token_ids,
    vocab,
    num_groups,
    stride,
    tokens_stride,
    idle_slot,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    SETTINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program finds the winner of a row's blocks, races again while a filter rejects it, and writes it."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    setting = settings + slot * SETTINGS
    sharpness = _sharpness(tl.load(setting).to(tl.float32))
    repetition, presence, frequency = _penalties(setting)
    pdl_wait(PDL)
    if slot == idle_slot:
        tl.store(token_ids + row, 0)
        return
    block = tl.arange(0, BLOCKS_PAD)
    valid = block < BLOCKS
    result = row * BLOCKS + block
    largest = tl.load(block_stats + result * 3 + 1, mask=valid, other=-1e30)
    top = tl.max(largest, 0)
    rescaled = (largest - top) * sharpness
    scores = tl.load(block_stats + result * 3, mask=valid, other=-float("inf")) + rescaled
    _, winner = _first(scores, tl.load(winners + result, mask=valid, other=vocab), vocab)
    if _is_filtered(setting):
        masses = tl.load(block_stats + result * 3 + 2, mask=valid, other=0.0) * tl.exp(rescaled)
        winner = _filter(
            logits + row * stride,
            counts + slot * vocab,
            group_maxima + row * num_groups,
            group_list + row * num_groups,
            setting,
            winner,
            top,
            tl.sum(masses.to(tl.float64), 0),
            _row_key(tl.load(seeds + slot), position),
            vocab,
            num_groups,
            GROUPS_PAD,
            GROUP,
            TILE,
        )
    winner = tl.minimum(winner, vocab - 1)
    tl.store(token_ids + row, winner.to(tl.int64))
    tl.store(tokens + slot * tokens_stride + position, winner)
    tl.store(num_computed + slot, position.to(tl.int64))
    if _is_penalised(repetition, presence, frequency):
        count = tl.load(counts + slot * vocab + winner)
        tl.store(counts + slot * vocab + winner, tl.where((count & 0x7FFF) < 0x7FFF, count + 1, count))


@triton.jit
def _filter(
    logits,
    counts,
    group_maxima,
    group_list,
    setting,
    winner,
    top,
    total,
    key,
    vocab,
    num_groups,
    GROUPS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Race among ever fewer tokens until top-k, top-p and min-p keep the winner.

    A token is kept if fewer than top_k tokens lie above it, with less than top_p of the mass, and if its weight is at
    least min_p. Weights are relative to the most likely token's. With top-k, top-p is a share of the mass of the top k
    tokens. That mass is not known at first, but it is at least what lies above the winner, and the winner. Mostly this
    bound decides; if not, the mass is computed.
    """
    sharpness = _sharpness(tl.load(setting).to(tl.float32))
    repetition, presence, frequency = _penalties(setting)
    top_k = tl.load(setting + 1).to(tl.int32)
    top_p = tl.load(setting + 2)
    min_p = tl.load(setting + 3)
    limit = tl.where(top_k > 0, top_k, vocab)
    mass_known = top_k == 0
    kept_mass = total
    floor_token = winner
    floor = _read(logits, counts, winner, winner < vocab, repetition, presence, frequency)
    if not mass_known:
        index = tl.arange(0, GROUPS_PAD)
        maxima = tl.load(group_maxima + index, mask=index < num_groups, other=-float("inf"))
        if tl.sum((maxima > floor).to(tl.int32), 0) >= limit:  # the winner is far too low: start at the k-th logit
            floor, kept_mass = _kth_largest(
                logits, counts, group_maxima, group_list, limit, top, sharpness, repetition, presence, frequency,
                vocab, num_groups, GROUPS_PAD, GROUP, TILE,
            )  # fmt: skip
            floor_token = vocab
            mass_known = True
    searching = True
    while searching:
        listed = _list_groups(group_maxima, group_list, num_groups, floor, GROUPS_PAD)
        count, mass, runner_up = _race_above(
            logits, counts, group_list, listed, floor, floor_token, top, sharpness, repetition, presence, frequency,
            key, vocab, GROUP, TILE,
        )  # fmt: skip
        weight = tl.exp(((floor - top) * sharpness).to(tl.float64))
        if not mass_known:
            kept_mass = mass + weight
            if (count >= limit) | ((top_p < 1) & (mass >= top_p * kept_mass)):
                _, kept_mass = _kth_largest(
                    logits, counts, group_maxima, group_list, limit, top, sharpness, repetition, presence, frequency,
                    vocab, num_groups, GROUPS_PAD, GROUP, TILE,
                )  # fmt: skip
                mass_known = True
        kept = (count < limit) & ((top_p >= 1) | (mass < top_p * kept_mass)) & (weight >= min_p)
        searching = (count > 0) & (not kept)
        if searching:
            floor_token = runner_up
            floor = _read(logits, counts, runner_up, runner_up < vocab, repetition, presence, frequency)
    return floor_token


@triton.jit
def _list_groups(group_maxima, group_list, num_groups, floor, GROUPS_PAD: tl.constexpr):
    """List the groups that have a logit of at least `floor`; returns their number."""
    index = tl.arange(0, GROUPS_PAD)
    maxima = tl.load(group_maxima + index, mask=index < num_groups, other=-float("inf"))
    listed = (maxima >= floor) & (index < num_groups)
    place = tl.cumsum(listed.to(tl.int32), 0) - 1
    tl.debug_barrier()  # all warps have read the previous list
    tl.store(group_list + place, index, mask=listed)
    tl.debug_barrier()
    return tl.sum(listed.to(tl.int32), 0)


@triton.jit
def _listed_tokens(group_list, start, listed, vocab, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Tokens [TILE, GROUP] of the listed groups `start` and on; those past the end are `vocab` or more."""
    offsets = start + tl.arange(0, TILE)
    group = tl.load(group_list + offsets, mask=offsets < listed, other=vocab)
    return group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _race_above(
    logits,
    counts,
    group_list,
    listed,
    floor,
    floor_token,
    top,
    sharpness,
    repetition,
    presence,
    frequency,
    key,
    vocab,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Number, mass (float64) and race winner of the tokens above `floor_token`, whose logit is `floor`."""
    number = tl.zeros((TILE, GROUP), tl.int32)
    mass = tl.zeros((TILE, GROUP), tl.float32)
    best = tl.full((TILE, GROUP), -float("inf"), tl.float32)
    winner = tl.zeros((TILE, GROUP), tl.int32) + vocab
    for start in range(0, listed, TILE):
        token = _listed_tokens(group_list, start, listed, vocab, GROUP, TILE)
        x = _read(logits, counts, token, token < vocab, repetition, presence, frequency)
        above = ((x > floor) | ((x == floor) & (token < floor_token))) & (token < vocab)
        tempered = (x - top) * sharpness
        number += above.to(tl.int32)
        mass += tl.where(above, tl.exp(tempered), 0.0)
        score = tl.where(above, tempered - _log(_exponential(_uniform(token, key))), -float("inf"))
        winner = tl.where(score > best, token, winner)
        best = tl.maximum(best, score)
    _, first = _first(tl.reshape(best, (TILE * GROUP,)), tl.reshape(winner, (TILE * GROUP,)), vocab)
    return tl.sum(tl.sum(number, 1), 0), tl.sum(tl.sum(mass.to(tl.float64), 1), 0), first


@triton.jit
def _kth_largest(
    logits,
    counts,
    group_maxima,
    group_list,
    limit,
    top,
    sharpness,
    repetition,
    presence,
    frequency,
    vocab,
    num_groups,
    GROUPS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The `limit`-th largest logit or a value between it and the next, and the mass of the `limit` largest.

    Found by bisection over float32's ordered bits: first for the `limit`-th largest of the groups' largest logits, a
    lower bound, then among the logits of the few groups that reach this bound.
    """
    index = tl.arange(0, GROUPS_PAD)
    maxima = tl.load(group_maxima + index, mask=index < num_groups, other=-float("inf"))
    keys = _ordered(maxima)
    low = _ordered(tl.full((), -float("inf"), tl.float32)).to(tl.int64)
    end = _ordered(top).to(tl.int64) + 1
    high = end
    number = num_groups
    while (number > limit + limit // 4) & (high - low > 1):
        middle = (low + high) >> 1
        reaching = tl.sum((keys >= middle).to(tl.int32), 0)
        if reaching >= limit:
            low = middle
            number = reaching
        else:
            high = middle
    listed = _list_groups(group_maxima, group_list, num_groups, _unordered(low), GROUPS_PAD)
    high = end
    middle = low + 0  # after `middle = low`, Triton would not see that the loop changes `low`
    number = vocab
    mass = tl.full((), 0.0, tl.float64)
    searching = True
    while searching:
        reaching_of_lane = tl.zeros((TILE, GROUP), tl.int32)
        mass_of_lane = tl.zeros((TILE, GROUP), tl.float32)
        for start in range(0, listed, TILE):
            token = _listed_tokens(group_list, start, listed, vocab, GROUP, TILE)
            x = _read(logits, counts, token, token < vocab, repetition, presence, frequency)
            reaches = (_ordered(x) >= middle) & (token < vocab)
            reaching_of_lane += reaches.to(tl.int32)
            mass_of_lane += tl.where(reaches, tl.exp((x - top) * sharpness), 0.0)
        reaching = tl.sum(tl.sum(reaching_of_lane, 1), 0)
        if reaching >= limit:
            low = middle
            number = reaching
            mass = tl.sum(tl.sum(mass_of_lane.to(tl.float64), 1), 0)
        else:
            high = middle
        middle = (low + high) >> 1
        searching = (number > limit) & (middle > low)
    kth = _unordered(low)
    ties = tl.where(number > limit, number - limit, 0).to(tl.float64)  # beyond the limit, all of the k-th's weight
    return kth, mass - ties * tl.exp(((kth - top) * sharpness).to(tl.float64))


@triton.jit
def _read(logits, counts, token, valid, repetition, presence, frequency):
    """float32 logits of one row's tokens after the penalties; -inf where not `valid`. The pointers are the row's."""
    x = tl.load(logits + token, mask=valid, other=-float("inf")).to(tl.float32)
    if _is_penalised(repetition, presence, frequency):
        count = tl.load(counts + token, mask=valid, other=0).to(tl.int32)
        x = tl.where(count != 0, tl.where(x > 0, x / repetition, x * repetition), x)
        times = count & 0x7FFF
        x = tl.where(times > 0, x - tl.fma(frequency, times.to(tl.float32), presence), x)
    return x


@triton.jit
def _penalties(setting):
    repetition, presence, frequency = tl.load(setting + 4), tl.load(setting + 5), tl.load(setting + 6)
    return repetition.to(tl.float32), presence.to(tl.float32), frequency.to(tl.float32)


@triton.jit
def _is_penalised(repetition, presence, frequency):
    return (repetition != 1) | (presence != 0) | (frequency != 0)


@triton.jit
def _is_filtered(setting):
    return (tl.load(setting + 1) > 0) | (tl.load(setting + 2) < 1) | (tl.load(setting + 3) > 0)


@triton.jit
def _sharpness(temperature):
    """The factor on logits: 1 / temperature, or 1 for temperature 0, where the largest logit wins with any factor."""
    return tl.where(temperature > 0, 1.0 / tl.maximum(temperature, 1e-30), 1.0)


@triton.jit
def _first(scores, tokens, vocab):
    """The largest score and the smallest token id that has it."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, tokens, vocab), 0)


@triton.jit
def _ordered(x):
    """float32 -> int32 in the same order"""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(key):
    """The inverse of `_ordered`, from int64."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _row_key(seed, position):
    """As `row_keys` in `noise.py`."""
    mixed = _mix64(seed.to(tl.uint64, bitcast=True)) + position.to(tl.int64).to(tl.uint64, bitcast=True)
    return (_mix64(mixed) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _mix64(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(token, key):
    """The uniform number in (0, 1) behind a token's noise; never rounded to 1."""
    return tl.minimum((_bits(token, key).to(tl.float32) + 0.5) * (1.0 / 2147483648.0), 1.0 - 1.0 / 16777216.0)


@triton.jit
def _bits(token, key):
    """31 random bits, as in `noise.py`."""
    bits = token.to(tl.uint32) * 0x9E3779B9 + key
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return ((bits ^ (bits >> 16)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _exponential(uniform):
    """As `exponential_noise` in `noise.py`."""
    # -log(1 - u): by its series where the difference from 1 would be lost
    series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0 + uniform * (0.25 + uniform * 0.2))))
    return tl.where(uniform < 0.03, series, -_log(1.0 - uniform))


@triton.jit
def _log(x):
    """The natural logarithm to within 2e-7, in a fifth of the instructions of `tl.log`."""
    if _ON_GPU:
        return libdevice.fast_logf(x)
    return tl.log(x)
