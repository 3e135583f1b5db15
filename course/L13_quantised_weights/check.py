"""Checks of L13: rounding, what a scale belongs to, formats, shards, activations, and a small model that is quantised.

What is expected is computed here weight by weight (`by_hand`), in loops that are slow and have nothing to get wrong.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.kernels.interface import FP8, Norm, Residual
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.kernels.triton.quantize_rows import quantize_rows_reference
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.placement import Placement
from mini_sglang.learn.checking import expect, expect_close, guards
from mini_sglang.parallel.sharding import Shard, shard_evenly, whole
from mini_sglang.quantize import quantize_model
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.weights.gguf import _unpack
from mini_sglang.weights.gguf_types import TensorType
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.quantization import as_stored
from mini_sglang.weights.quantization_config import Layout, Scheme
from mini_sglang.weights.quantize import quantize_fp8, quantize_int4
from mini_sglang.weights.quantized_weight import QuantizedWeight
from mini_sglang.weights.tensor import CheckpointTensor

CPU = torch.device("cpu")


def by_hand(stored: QuantizedWeight) -> list[list[float]]:
    """scale * q + minimum of each weight, by the scale and minimum of its group."""
    q, scale = stored.q.double().tolist(), stored.scale.double().tolist()
    minimum = None if stored.minimum is None else stored.minimum.double().tolist()
    size = stored.group_size
    return [
        [
            scale[row][i // size] * value + (0.0 if minimum is None else minimum[row][i // size])
            for i, value in enumerate(of_row)
        ]
        for row, of_row in enumerate(q)
    ]


def steps_off(stored: QuantizedWeight, w: torch.Tensor) -> torch.Tensor:
    """How far each weight is from what is stored, in steps of its group."""
    step = [[row[i // stored.group_size] for i in range(w.shape[1])] for row in stored.scale.double().tolist()]
    return (torch.tensor(by_hand(stored), dtype=torch.float64) - w.double()).abs() / torch.tensor(step)


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def weight(rows: int, columns: int, group: int, *, minimum: bool = True, seed: int = 0) -> QuantizedWeight:
    """Random weights of 4 bits, each group with a scale of its own; without minimums, of 8 bits."""
    random = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    q = torch.randint(0, 16, (rows, columns), generator=random) - (0 if minimum else 8)
    scale = torch.rand(rows, groups, generator=random) + 0.1
    minimums = torch.randn(rows, groups, generator=random) if minimum else None
    return QuantizedWeight(q.to(torch.uint8 if minimum else torch.int8), scale, minimums, group)


# -- rounding ---------------------------------------------------------------------------------------------------------


@guards("zero-block")
def test_zeros_stay_zeros() -> None:
    stored = quantize_int4(torch.zeros(2, 8), 4)
    rule = "a block of zeros has scale 1: 0 / 0 is no number"
    expect(stored.q.tolist(), [[8] * 8] * 2, "q of zeros", invariant=rule, read="L13: A scale for each block")
    expect(stored.scale.tolist(), [[1.0] * 2] * 2, "their scales", invariant=rule, read="L13: A scale for each block")


@guards("sixteen-in-four-bits")
def test_every_value_fits_into_four_bits() -> None:
    stored = quantize_int4(random_matrix(32, 64), 16)
    expect(
        (stored.q.dtype, int(stored.q.max())),
        (torch.uint8, 15),
        "dtype and largest q of 2,048 random weights",
        invariant="0 <= q <= 15: the bit of a 16 falls into the neighbour when two are packed into a byte",
        read="L13: Round to nearest",
    )


@guards("one-scale-for-the-row")
def test_a_large_weight_costs_only_its_own_group() -> None:
    w = torch.tensor([[100.0, 0.1, 0.2, 0.3, 1.0, -0.5, 0.75, 0.25]])
    off = steps_off(quantize_int4(w, 4), w)[:, 4:] * float(quantize_int4(w, 4).scale[0, 1])
    expect(
        bool((off <= 0.14).all()),
        True,
        f"the weights 1, -0.5, 0.75, 0.25 beside a group with a 100 are off by at most a step of their own, 2 / 15 "
        f"(the worst is {float(off.max()):.2f})",
        invariant="a group's scale depends on that group alone",
        read="L13: A scale for each block",
    )


@guards("toward-zero")
def test_a_weight_becomes_the_nearest_value() -> None:
    w = random_matrix(16, 128)
    stored = quantize_int4(w, 32)
    inner = steps_off(stored, w)[w.abs() < 6.5 * stored.scale.repeat_interleave(32, 1)]
    expect(
        float(inner.max()) <= 0.501,
        True,
        f"no weight within the range is further than half a step from its value (one is {float(inner.max()):.2f} off)",
        invariant="round to nearest: at most half a step",
        read="L13: Round to nearest",
    )


@guards("largest-cut-off")
def test_the_largest_weight_is_no_further_off_than_the_others() -> None:
    w = random_matrix(16, 128)
    most = float(steps_off(quantize_int4(w, 32), w).max())
    expect(
        most <= 0.501,
        True,
        f"no weight at all is further off than half a step (one is {most:.2f} off)",
        invariant="the largest weight of a group is 7.5 steps: half a step from 7, and from -8",
        read="L13: Round to nearest",
    )


@guards("scale-rounded-late")
def test_weights_are_divided_by_the_scale_that_is_stored() -> None:
    w = random_matrix(64, 128)
    stored = quantize_int4(w, 32, scale_dtype=torch.bfloat16)
    expect(bool((stored.scale.bfloat16().float() == stored.scale).all()), True, "whether bfloat16 holds every scale")
    q = (w / stored.scale.repeat_interleave(32, 1)).round().clamp(-8, 7) + 8
    expect(
        int((stored.q.float() != q).sum()),
        0,
        "weights that are not the nearest value of the scale that is stored",
        invariant="a scale is rounded before anything is divided by it",
        read="L13: Round to nearest",
    )


def test_scales_are_never_so_small_that_they_lose_bits() -> None:
    w = random_matrix(4, 32) * 1e-6
    most = float(steps_off(quantize_int4(w, 32, scale_dtype=torch.float16), w).max())
    expect(
        most <= 0.501,
        True,
        f"weights around 10^-6 with scales in float16 are off by at most half a step ({most:.2f})",
        invariant="a scale is at least the smallest normal number of its dtype",
        read="L13: A scale for each block",
    )


def test_a_group_by_hand() -> None:
    w = torch.tensor([[-1.875, 0.6, 0.125, 1.0, 3.75, -0.5]])
    stored = quantize_int4(w, 4)
    read = "L13: Round to nearest"
    expect(stored.scale.tolist(), [[0.25, 0.5]], "scales of -1.875, 0.6, 0.125, 1 and of 3.75, -0.5", read=read)
    expect(stored.q.tolist(), [[0, 10, 8, 12, 15, 7]], "q: -8, 2, 0, 4 and 7, -1, and 8 more", read=read)
    expect(None if stored.minimum is None else stored.minimum.tolist(), [[-2.0, -4.0]], "minimums", read=read)
    expect(stored.group_size, 4, "inputs that share a scale", read=read)


@guards("scale-of-another-block")
def test_a_block_of_rows_shares_its_scale() -> None:
    w = torch.ones(5, 6)
    w[2:4] = 2.0
    w[:, 4:] *= 100
    w[4, 5] = -448.0
    expect_close(
        quantize_fp8(w, (2, 4)).scale * 448,
        [[1, 100], [1, 100], [2, 200], [2, 200], [1, 448]],
        "largest magnitudes of blocks of 2 rows and 4 inputs of a matrix [5, 6], by rows",
        invariant="row o has the scales of block o // rows",
        read="L13: A scale for each block",
    )


# -- back again -------------------------------------------------------------------------------------------------------


def test_a_weight_is_its_scale_times_q_plus_its_minimum() -> None:
    for minimum in (True, False):
        stored = weight(3, 12, 4, minimum=minimum)
        what = f"dense weights of groups of 4 of 12 inputs, {'with' if minimum else 'without'} minimums"
        expect_close(stored.dense(), by_hand(stored), what, read="L13: One form for all")


@guards("group-from-shapes")
def test_the_last_group_may_be_smaller() -> None:
    for minimum in (True, False):
        stored = weight(3, 9, 4, minimum=minimum)
        expect_close(
            stored.dense(),
            by_hand(stored),
            f"dense weights of groups of 4 of 9 inputs, {'with' if minimum else 'without'} minimums",
            invariant="input i belongs to group i // group_size: 4, 4 and 1 of them",
            read="L13: One form for all",
        )


# -- formats ----------------------------------------------------------------------------------------------------------


def gguf_rows(blocks: list[list[tuple[list[float], list[int]]]]) -> Any:
    """Rows of blocks as a file has them: float16s, then 16 bytes of the 32 weights (i in the low half, i + 16 high)."""

    def block(floats: list[float], q: list[int]) -> bytes:
        return np.array(floats, np.float16).tobytes() + bytes(q[i] | q[i + 16] << 4 for i in range(16))

    return np.frombuffer(b"".join(block(*one) for row in blocks for one in row), np.uint8).reshape(len(blocks), -1)


UP, DOWN, TWOS = [i // 2 for i in range(32)], [15 - i // 2 for i in range(32)], [2] * 32


@guards("nibbles-in-turn")
def test_a_block_has_its_first_half_in_the_low_bits() -> None:
    rows = gguf_rows([[([0.5, -1.0], UP), ([0.25, 2.0], DOWN)], [([1.0, 0.0], TWOS), ([2.0, -3.0], UP)]])
    q, scale, minimum = _unpack(rows, TensorType.Q4_1)
    rule, read = "16 bytes hold weights 0 to 15 in their low halves, 16 to 31 in their high halves", "L13: GGUF"
    expect(q.tolist(), [UP + DOWN, TWOS + UP], "weights of two rows of two blocks of Q4_1", invariant=rule, read=read)
    expect(scale.tolist(), [[0.5, 0.25], [1.0, 2.0]], "their scales", read=read)
    expect(minimum.tolist(), [[-1.0, 2.0], [0.0, -3.0]], "their minimums", read=read)


@guards("minus-eight-forgotten")
def test_q4_0_counts_from_minus_eight() -> None:
    q, scale, minimum = _unpack(gguf_rows([[([0.5], UP), ([-0.25], DOWN)]]), TensorType.Q4_0)
    expect(
        (q.tolist(), scale.tolist()), ([UP + DOWN], [[0.5, -0.25]]), "q and scales of a row of Q4_0", read="L13: GGUF"
    )
    expect(
        minimum.tolist(),
        [[-4.0, 2.0]],
        "its minimums",
        invariant="w = d (q - 8) = d q - 8 d",
        read="L13: GGUF",
    )


def words(values: Sequence[Sequence[int]], bits: int = 4) -> torch.Tensor:
    """Rows of small integers, 32 / bits of them to an int32, the first in the lowest bits."""
    in_word = 32 // bits
    packed = [
        [sum(value << bits * i for i, value in enumerate(row[at : at + in_word])) for at in range(0, len(row), in_word)]
        for row in values
    ]
    return torch.tensor(packed, dtype=torch.int64).to(torch.int32)


def integers(rows: int, columns: int, most: int = 15) -> list[list[int]]:
    return [[(7 * row + 3 * i + row * i) % (most + 1) for i in range(columns)] for row in range(rows)]


def expect_stored(
    scheme: Scheme, parts: Mapping[str, torch.Tensor], wanted: list[list[float]], what: str, rule: str
) -> QuantizedWeight:
    stored = as_stored(scheme, parts, (len(wanted), len(wanted[0])))
    expect_close(by_hand(stored), wanted, what, invariant=rule, read="L13: Words of safetensors")
    return stored


def from_zeros(
    q: list[list[int]], zero: list[list[int]], scale: list[list[float]], rows: int, columns: int
) -> list[list[float]]:
    """scale * (q - zero) with scales and zeros of blocks of so many rows and columns."""
    return [
        [scale[o // rows][i // columns] * (value - zero[o // rows][i // columns]) for i, value in enumerate(of_row)]
        for o, of_row in enumerate(q)
    ]


def test_float8_has_no_minimum_and_the_scale_of_its_block() -> None:
    q, scale = integers(5, 6), [[0.5, 2.0], [3.0, 0.25], [1.5, 4.0]]
    parts = {"weight": torch.tensor(q, dtype=torch.float32).to(FP8), "weight_scale": torch.tensor(scale)}
    zeros = [[0, 0]] * 3
    scheme = Scheme(layout=Layout.SCALED, bits=8, is_float=True, block=(2, 4))
    rule = "row o has the scales of block o // rows"
    stored = expect_stored(scheme, parts, from_zeros(q, zeros, scale, 2, 4), "float8 in blocks of 2 by 4", rule)
    expect((stored.minimum, stored.group_size), (None, 4), "minimum and group of float8", read="L13: One form for all")
    for of_all in ([[0.5]], [[0.5], [1.0], [2.0], [0.25], [3.0]]):
        scheme = Scheme(layout=Layout.SCALED, bits=8, is_float=True, block=None)
        parts["weight_scale"] = torch.tensor(of_all)
        wanted = from_zeros(q, [[0]] * 5, of_all, 5 // len(of_all), 6)
        stored = expect_stored(scheme, parts, wanted, f"float8 with {len(of_all)} scales for 5 rows", rule)
        expect(stored.group_size, 6, "inputs that share a scale of a row", read="L13: One form for all")


@guards("zero-not-scaled")
def test_words_along_the_inputs() -> None:
    q, scale = integers(2, 16), [[0.5, 2.0], [3.0, 0.25]]
    parts = {"weight_packed": words(q), "weight_scale": torch.tensor(scale)}
    expect_stored(
        Scheme(layout=Layout.PACKED, bits=4, block=(1, 8)),
        parts,
        from_zeros(q, [[8, 8]] * 2, scale, 1, 8),
        "compressed-tensors' words [2, 2], symmetric, groups of 8",
        "scale (q - zero) = scale q + minimum, so the minimum is -scale times zero",
    )


def gptq(
    q: list[list[int]], zeros: list[list[int]], scale: list[list[float]], bits: int = 4
) -> dict[str, torch.Tensor]:
    """The tensors of q [out, in]; zeros and scale [out, groups]."""
    down = [list(column) for column in zip(*zeros, strict=True)]
    return {
        "qweight": words(q, bits).T.contiguous(),
        "qzeros": words(down, bits),
        "scales": torch.tensor(scale).T.contiguous(),
    }


@guards("zero-less-one")
def test_gptq_stores_zeros_less_one() -> None:
    q, zeros = integers(8, 16), [[o + 1, 8 - o] for o in range(8)]
    scale = [[0.5 + o, 2.0 - o / 8] for o in range(8)]
    scheme = Scheme(layout=Layout.GPTQ, bits=4, block=(1, 8), symmetric=False, zeros_less_one=True)
    less_one = [[zero - 1 for zero in row] for row in zeros]
    expect_stored(
        scheme,
        gptq(q, less_one, scale),
        from_zeros(q, zeros, scale, 1, 8),
        "GPTQ's first format, zeros 1 to 8 that are stored as 0 to 7",
        "zero = what the bits say, plus 1 (checkpoint_format gptq; gptq_v2 has them as they are)",
    )


@guards("order-instead-of-inverse")
def test_awq_packs_eight_outputs_in_an_order_of_its_own() -> None:
    q, zeros = integers(8, 4), [[o, 15 - o] for o in range(8)]
    scale = [[0.5 + o, 2.0 - o / 8] for o in range(8)]

    def packed(values: list[list[int]]) -> torch.Tensor:  # [out, n] -> [n, out / 8]
        return words([[column[o] for o in (0, 2, 4, 6, 1, 3, 5, 7)] for column in zip(*values, strict=True)])

    parts = {"qweight": packed(q), "qzeros": packed(zeros), "scales": torch.tensor(scale).T.contiguous()}
    expect_stored(
        Scheme(layout=Layout.AWQ, bits=4, block=(1, 2), symmetric=False),
        parts,
        from_zeros(q, zeros, scale, 1, 2),
        "AWQ's words [4, 1] of 8 outputs and 4 inputs",
        "a word has outputs 0, 2, 4, 6, 1, 3, 5, 7; so output 1 is the fifth, not the third",
    )


@guards("moved-without-its-zero")
def test_unsigned_bytes_become_signed_ones() -> None:
    q, zeros = integers(4, 8, most=255), [[100, 1], [128, 255], [3, 200], [64, 128]]
    scale = [[0.5, 2.0], [1.0, 0.25], [3.0, 1.5], [0.125, 4.0]]
    scheme = Scheme(layout=Layout.GPTQ, bits=8, block=(1, 4), symmetric=False)
    wanted = from_zeros(q, zeros, scale, 1, 4)
    rule = "(q - 128) - (zero - 128) = q - zero"
    stored = expect_stored(scheme, gptq(q, zeros, scale, 8), wanted, "GPTQ in 8 bits", rule)
    expect(stored.q.dtype, torch.int8, "dtype of 8 bits", read="L13: One form for all")


# -- parts of one matrix ----------------------------------------------------------------------------------------------


@guards("one-scale-for-all")
def test_parts_keep_their_scales() -> None:
    parts = [weight(rows, 8, 4, seed=rows) for rows in (3, 2)]
    expect_close(
        by_hand(QuantizedWeight.stacked(parts)),
        [*by_hand(parts[0]), *by_hand(parts[1])],
        "3 rows and 2 rows with scales of their own as one matrix",
        invariant="a scale belongs to a row: what stands above it changes nothing",
        read="L13: One matrix of q, k and v",
    )


@guards("minimum-forgotten")
def test_a_part_without_minimums_leaves_those_of_others() -> None:
    with_minimum = weight(3, 8, 4)
    without = QuantizedWeight(with_minimum.q[:2], with_minimum.scale[:2], None, 4)
    for parts in ([without, with_minimum], [with_minimum, without]):
        expect_close(
            by_hand(QuantizedWeight.stacked(parts)),
            [row for part in parts for row in by_hand(part)],
            "parts with and without minimums as one matrix",
            invariant="no minimum is a minimum of 0",
            read="L13: One matrix of q, k and v",
        )
    expect(QuantizedWeight.stacked([without, without]).minimum, None, "minimum of two parts without any")


# -- shards -----------------------------------------------------------------------------------------------------------


def expect_part(stored: QuantizedWeight, rows: Shard, columns: Shard, what: str, rule: str) -> QuantizedWeight | None:
    """A rank's part must be that part of the matrix, and zeros beyond it; None is left to the caller."""
    part = stored.shard(rows, columns)
    if part is not None:
        wanted = torch.zeros(rows.size, columns.size, dtype=torch.float64)
        held = torch.tensor(by_hand(stored))[rows.start : rows.stop, columns.start : columns.stop]
        wanted[: held.shape[0], : held.shape[1]] = held
        expect_close(by_hand(part), wanted, what, invariant=rule, read="L13: Shards that cut a group")
    return part


def test_outputs_are_cut_as_they_are() -> None:
    for rank in range(3):
        what = f"outputs of rank {rank} of 3, of 7 in all"
        part = expect_part(weight(7, 40, 16), shard_evenly(7, rank, 3), whole(40), what, "rows take their scales along")
        expect(part is not None and part.group_size, 16, f"group size of {what}", read="L13: Shards that cut a group")


@guards("groups-from-the-first")
def test_a_rank_has_the_scales_of_its_own_inputs() -> None:
    for rank in range(2):
        part = expect_part(
            weight(3, 64, 16),
            whole(3),
            shard_evenly(64, rank, 2),
            f"inputs of rank {rank} of 2, of 64 in groups of 16",
            "the part from input 32 on begins with the scale of group 2",
        )
        expect(part is not None and part.group_size, 16, "group size, where the cut is a border")


@guards("cut-group-keeps-its-size")
def test_a_group_that_is_cut_becomes_smaller_ones() -> None:
    parts = [
        expect_part(
            weight(3, 384, 128),
            whole(3),
            shard_evenly(384, rank, 2),
            f"inputs of rank {rank} of 2, of 384 in groups of 128",
            "the cut at 192 goes through the group from 128 to 255: both ranks need its scale",
        )
        for rank in range(2)
    ]
    expect(
        [None if part is None else part.group_size for part in parts],
        [64, 64],
        "group sizes of both ranks: 192 is three times 64",
        invariant="one size on every rank, which divides the old one and the part",
        read="L13: Shards that cut a group",
    )


@guards("row-scale-in-crumbs")
def test_a_scale_of_a_whole_row_holds_for_any_part() -> None:
    for rank in range(2):
        part = expect_part(
            weight(3, 90, 90, minimum=False),
            whole(3),
            shard_evenly(90, rank, 2, 16),
            f"inputs of rank {rank} of 2, of 90 with one scale for each row",
            "a part of a row has the row's scale",
        )
        expect(
            part is not None and part.group_size,
            48,
            f"group size on rank {rank}, with room for 48",
            invariant="one scale on each rank: gcd(90, 48) = 6 would be a scale for every 6 inputs",
            read="L13: Shards that cut a group",
        )


@guards("minimum-in-the-padding")
def test_a_group_with_a_minimum_is_not_padded() -> None:
    rule = "in a group with a minimum there is no q that means 0"
    columns = shard_evenly(160, 1, 2, 64)  # 32 inputs, and room for 128
    for group, held in ((32, True), (64, False)):
        part = expect_part(weight(3, 160, group), whole(3), columns, f"a padded part in groups of {group}", rule)
        expect(part is not None, held, f"whether the part is kept packed, in groups of {group}", invariant=rule)
    part = expect_part(weight(3, 160, 64, minimum=False), whole(3), columns, "a padded part without minimums", rule)
    expect(part is not None, True, "whether a part without minimums is kept packed")


def test_what_cannot_be_cut_well_is_not_cut() -> None:
    stored = weight(3, 384, 128)
    read = "L13: Shards that cut a group"
    tries = {"0 to 47": Shard(384, 0, 48, 48), "0 to 55": Shard(384, 0, 56, 56), "24 to 87": Shard(384, 24, 88, 64)}
    kept = {name: stored.shard(whole(3), columns) is not None for name, columns in tries.items()}
    expect(
        kept,
        {"0 to 47": True, "0 to 55": False, "24 to 87": False},
        "inputs whose part is kept packed, of groups of 128: gcd 16, gcd 8, and a begin within a group of 64",
        invariant="groups of at least 16, and none that begins on another rank",
        read=read,
    )
    small = weight(3, 64, 8).shard(whole(3), shard_evenly(64, 0, 2))
    expect(small is not None, True, "whether groups that were small from the start are kept", read=read)
    expect_part(weight(3, 64, 32), whole(3), shard_evenly(64, 2, 3, 64), "a rank without inputs", "zeros")


# -- activations ------------------------------------------------------------------------------------------------------


@guards("row-of-zeros")
def test_a_row_of_zeros_is_zeros() -> None:
    x = torch.zeros(2, 256)
    x[0] = 1.0
    for grouped in (False, True):
        q, scale = quantize_rows_reference(x, grouped=grouped)
        expect(
            [value != value for value in q[1].float().tolist() + scale[:, 1].tolist()],
            [False] * (256 + len(scale)),
            "which values of a row of zeros are no numbers",
            invariant="a rank without features hands on zeros, and 0 / 0 is NaN",
            read="L13: Activations",
        )


@guards("scale-of-the-batch")
def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    x = random_matrix(3, 256) * torch.tensor([[1.0], [1000.0], [0.01]])
    for grouped in (False, True):
        together, _ = quantize_rows_reference(x, grouped=grouped)
        for row in range(3):
            alone, _ = quantize_rows_reference(x[row : row + 1], grouped=grouped)
            expect(
                alone[0].float().tolist(),
                together[row].float().tolist(),
                f"row {row} alone and beside others, with one scale {'per 128 inputs' if grouped else 'per row'}",
                invariant="a row's scale depends on that row alone",
                read="L13: Activations",
            )


def test_the_largest_of_a_group_becomes_the_largest_of_float8() -> None:
    x = torch.zeros(2, 256)
    x[0, :3], x[0, 128:130] = torch.tensor([4.0, -2.0, 0.5]), torch.tensor([-44.8, 11.2])
    x[1, 255] = 8.96
    q, scale = quantize_rows_reference(x, grouped=True)
    read = "L13: Activations"
    expect((q.dtype, tuple(q.shape)), (FP8, (2, 256)), "dtype and shape of activations in float8", read=read)
    wanted = [[4 / 448, 1.0], [0.1, 0.02]]
    expect_close(scale, wanted, "scales [groups, rows] of groups of 128", read=read)
    expect(q[0, [0, 1, 2, 128, 129]].float().tolist(), [448.0, -224.0, 56.0, -448.0, 112.0], "row 0", read=read)
    expect(q[1, 255].float().item(), 448.0, "the last of row 1", read=read)
    q, scale = quantize_rows_reference(x, grouped=False)
    expect_close(scale, [[0.1, 0.02]], "one scale for each row", read=read)
    expect(q[0, [0, 128]].float().tolist(), [40.0, -448.0], "4 and -44.8 with one scale of 0.1", read=read)


def test_a_norm_comes_first() -> None:
    x, norm = torch.full((1, 128), 3.0), Norm(torch.linspace(0.5, 2, 128), 0.0)
    q, scale = quantize_rows_reference(x, norm, grouped=False)
    got = q.float() * scale[0, 0]
    expect_close(got, norm.weight[None], "a row of equal values, normalised", tolerance=0.0625, read="L13: Activations")


# -- all of it --------------------------------------------------------------------------------------------------------


def test_ranks_together_compute_the_product_of_the_whole_matrix() -> None:
    parts = {"q": weight(6, 384, 128, seed=1), "k": weight(3, 384, 128, seed=2), "v": weight(2, 384, 128, seed=3)}
    x = random_matrix(2, 384)
    wanted = x.double() @ torch.tensor([row for part in parts.values() for row in by_hand(part)]).double().T
    placement = Placement(CPU, torch.float32, TorchKernels(), packed=True)
    for ranks in (1, 2, 3, 5):
        total = torch.zeros(2, 11)
        for rank in range(ranks):
            inputs = shard_evenly(384, rank, ranks)
            layer = Linear(inputs, {name: len(part.q) for name, part in parts.items()}, placement)
            for name, slot in layer.weight_slots("").items():
                part = parts[name.removesuffix(".weight")]
                slot.load(
                    CheckpointTensor(name, (len(part.q), 384), part.dense, partial(QuantizedWeight.to, part, CPU))
                )
            own = torch.zeros(2, inputs.size)
            own[:, : inputs.stop - inputs.start] = x[:, inputs.start : inputs.stop]
            total += layer(Residual(own))
        expect_close(
            total,
            wanted,
            f"x W^T of q, k and v with scales of their own, summed over {ranks} ranks that have cut the inputs",
            tolerance=1e-4,
            invariant="each rank's part is that part of the matrix",
            read="L13: Shards that cut a group",
        )


SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def random_checkpoint(folder: Path) -> None:
    h, m, q, kv, vocab = 96, 224, 96, 32, 131
    shapes = {"self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h)}
    shapes |= {"self_attn.o_proj": (h, q), "mlp.gate_proj": (m, h), "mlp.up_proj": (m, h), "mlp.down_proj": (h, m)}
    tensors = {"model.embed_tokens.weight": random_matrix(vocab, h, 1), "lm_head.weight": random_matrix(vocab, h, 2)}
    tensors["model.norm.weight"] = torch.ones(h)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for i, (name, shape) in enumerate(shapes.items()):
            tensors[f"{prefix}.{name}.weight"] = random_matrix(*shape, 10 * layer + i + 3) / 8
        tensors |= {f"{prefix}.{name}_layernorm.weight": torch.ones(h) for name in ("input", "post_attention")}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SHAPE))


def dequantise_by_hand(quantised: Path, folder: Path) -> None:
    """The same checkpoint, dense: each packed matrix read bit by bit, as compressed-tensors says."""
    stored = load_file(next(quantised.glob("*.safetensors")))
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            shifts = torch.arange(0, 32, 4)
            q = (tensor[:, :, None] >> shifts & 15).flatten(1).float()
            scale = stored[f"{module}.weight_scale"].float()
            dense[f"{module}.weight"] = (q - 8) * scale.repeat_interleave(q.shape[1] // scale.shape[1], 1)
        elif part == "weight":
            dense[name] = tensor
    folder.mkdir()
    save_file(dense, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SHAPE))


@contextmanager
def checkpoints() -> Iterator[tuple[Path, Path]]:
    """A small checkpoint in 4 bits, as `mini-sglang quantize` writes it, and what it says in float32."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        threads = torch.get_num_threads()
        random_checkpoint(folder / "model")
        source = ModelSource("model", folder / "model", "safetensors")
        quantize_model(source, folder / "quantised", "w4a16", show_progress=False)
        torch.set_num_threads(threads)
        dequantise_by_hand(folder / "quantised", folder / "dense")
        yield folder / "quantised", folder / "dense"


def generate(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """12 greedy tokens after each prompt, all in one batch."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        attention_backend="reference",
        num_pages=32,
        max_running_requests=4,
        num_threads=1,
    )
    engine = Engine(config)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    engine.close()
    return list(tokens.values())


def test_a_quantised_checkpoint_says_what_its_weights_say() -> None:
    prompts = [[5, 17, 99], [1, 2, 3, 4, 5, 6, 7]]
    with checkpoints() as (quantised, dense):
        wanted = generate(dense, prompts)
        expect(generate(quantised, prompts), wanted, "greedy tokens of the 4-bit checkpoint, against the dense one")
        alone = [generate(quantised, [prompt])[0] for prompt in prompts]
        expect(alone, wanted, "the same, alone", invariant="a request's tokens do not depend on the batch")
