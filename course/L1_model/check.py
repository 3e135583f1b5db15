"""Checks of L1: each formula on numbers that can be followed by hand, the weights, and at last the built-in model."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.kernels.interface import KVCells, Rotation
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.layers.placement import Placement
from mini_sglang.layers.rotary import inverse_frequencies, rotary_tables
from mini_sglang.learn.checking import expect, guards
from mini_sglang.model_config import ModelConfig, RopeScaling
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.weights.dummy import dummy_tensor
from mini_sglang.weights.gguf import _unpack, half_split_order
from mini_sglang.weights.gguf_types import TensorType
from mini_sglang.weights.load import _match
from mini_sglang.weights.tensor import WeightsError, WeightSlot

KERNELS = TorchKernels()
CPU = torch.device("cpu")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def rounded(x: torch.Tensor, digits: int = 3) -> object:
    """Nested lists of a tensor's values, without -0.0, which reads badly"""
    return (x.double().round(decimals=digits) + 0.0).tolist()


def make_config(*, head_dim: int = 4, theta: float = 10000.0, scaling: RopeScaling | None = None) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=8,
        hidden_size=head_dim,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        context_length=2048,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        rope_scaling=scaling,
    )


# -- RMSNorm --------------------------------------------------------------------------------------------------------


@guards("mean-subtracted")
def test_a_row_is_divided_by_the_root_of_its_mean_square() -> None:
    got = KERNELS.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    expect(
        rounded(got),
        [[0.849, 2.263]],
        "rms_norm of (3, 4) with weight (1, 2) and eps 0",
        invariant="rms = sqrt((9 + 16) / 2) = 3.536; nothing is subtracted",
        read="L1: RMSNorm",
    )


@guards("eps-outside-the-root")
def test_eps_is_added_under_the_root() -> None:
    got = KERNELS.rms_norm(torch.tensor([[0.001, -0.001]]), torch.ones(2), 1e-6)
    expect(
        rounded(got),
        [[0.707, -0.707]],
        "rms_norm of (0.001, -0.001) with eps 1e-6, which is as large as the mean square",
        invariant="x / sqrt(mean(x^2) + eps)",
        read="L1: RMSNorm",
    )


@guards("squares-in-half")
def test_large_activations_in_float16_do_not_overflow() -> None:
    got = KERNELS.rms_norm(torch.tensor([[300.0, 400.0]], dtype=torch.float16), torch.ones(2).half(), 1e-5)
    expect(got.dtype, torch.float16, "dtype of rms_norm of float16", read="L1: RMSNorm")
    expect(
        rounded(got, 2),
        [[0.85, 1.13]],
        "rms_norm of (300, 400) in float16, whose largest number is 65,504",
        invariant="sums and squares are float32, whatever the dtype of x",
        read="L1: RMSNorm",
    )


# -- rotary angles --------------------------------------------------------------------------------------------------


@guards("exponents-halved")
def test_the_frequencies_run_from_1_down_to_almost_1_over_theta() -> None:
    inverse, amplitude = inverse_frequencies(make_config(head_dim=8))
    expect(
        rounded(inverse, 6),
        [1.0, 0.1, 0.01, 0.001],
        "angle per position of the 4 pairs of a head of 8, theta 10,000",
        invariant="pair i turns by theta^(-2i / head_dim)",
        read="L1: RoPE",
    )
    expect(amplitude, 1.0, "the factor on cos and sin without scaling", read="L1: RoPE")


@guards("theta-from-memory")
def test_the_base_comes_from_the_config() -> None:
    inverse, _ = inverse_frequencies(make_config(theta=1e6))
    expect(
        rounded(inverse, 6),
        [1.0, 0.001],
        "angle per position of the 2 pairs of a head of 4, theta 1,000,000",
        invariant="rope_theta comes from the checkpoint: 100,000 in SmolLM2, 500,000 in Llama 3",
        read="L1: RoPE",
    )


def test_linear_scaling_slows_every_pair_down() -> None:
    inverse, _ = inverse_frequencies(make_config(scaling=RopeScaling(kind="linear", factor=4.0)))
    expect(rounded(inverse, 6), [0.25, 0.0025], "frequencies with linear scaling by 4", read="L1: RoPE")
    with pytest.raises(ValueError, match="spiral"):
        inverse_frequencies(make_config(scaling=RopeScaling(kind="spiral", factor=4.0)))


@guards("angles-in-bfloat16")
def test_angles_are_exact_far_from_the_beginning() -> None:
    placement = Placement(CPU, torch.bfloat16, KERNELS)
    [(cos, _)] = rotary_tables(make_config(), 2048, placement)
    expect(cos.dtype, torch.bfloat16, "dtype of the table in a bfloat16 model", read="L1: RoPE")
    expect(
        rounded(cos[1001], 2),
        rounded(torch.tensor([1001.0, 10.01]).cos().bfloat16(), 2),
        "cos of position 1001 in a bfloat16 model, of frequencies 1 and 0.01",
        invariant="angles in float32, the dtype of the model only for the finished cos and sin",
        read="L1: RoPE",
    )


# -- rope_store -----------------------------------------------------------------------------------------------------


def stored(qkv: Sequence[float], kv_heads: int, *, turned: bool) -> tuple[object, object, object]:
    """q, stored keys and values of one token with heads of 4, at cell 2 of 3; `turned`: the first pair by 90 degrees.

    The first pair's cos and sin are then 0 and 1, the second pair stands still.
    """
    angles = torch.tensor([[0.0, 0.0], [torch.pi / 2, 0.0]])
    rotation = Rotation(angles.cos(), angles.sin(), torch.tensor([int(turned)]))
    keys, values = torch.zeros(3, kv_heads, 4), torch.zeros(3, kv_heads, 4)
    target = KVCells(keys, values, torch.tensor([2]))
    q = KERNELS.rope_store(torch.tensor([qkv]), rotation, target, None, None, 1e-5)
    expect(float(keys[:2].abs().sum() + values[:2].abs().sum()), 0.0, "cells that no token of the step has")
    return rounded(q[0]), rounded(keys[2]), rounded(values[2])


@guards("three-equal-parts")
def test_q_has_more_heads_than_k_and_v() -> None:
    qkv = [float(head) for head in range(6) for _ in range(4)]  # 4 heads of q, 1 of k, 1 of v; each full of its index
    q, keys, values = stored(qkv, 1, turned=False)
    invariant = "a row of qkv is heads of q, then kv_heads of k, then kv_heads of v"
    expect(q, [[float(head)] * 4 for head in range(4)], "q of 4 heads beside 1 KV head", invariant=invariant)
    expect(keys, [[4.0] * 4], "the key stored", invariant=invariant, read="L1: GQA")
    expect(values, [[5.0] * 4], "the value stored", invariant=invariant, read="L1: GQA")


@guards("neighbours-rotated")
def test_a_pair_is_an_element_of_each_half() -> None:
    q, _, _ = stored([1.0, 2.0, 3.0, 4.0, *[0.0] * 8], 1, turned=True)
    expect(
        q,
        [[-3.0, 2.0, 1.0, 4.0]],
        "the head (1, 2, 3, 4) with its first pair turned by 90 degrees",
        invariant="with halves (a, b): (a cos - b sin, b cos + a sin); the first pair is elements 0 and 2",
        read="L1: RoPE",
    )


@guards("unrotated-keys")
def test_keys_are_stored_rotated() -> None:
    _, keys, _ = stored([*[0.0] * 4, 1.0, 2.0, 3.0, 4.0, *[0.0] * 4], 1, turned=True)
    expect(
        keys,
        [[-3.0, 2.0, 1.0, 4.0]],
        "the key (1, 2, 3, 4) in the pool, its first pair turned by 90 degrees",
        invariant="a key is rotated once, by its own position, when it is stored",
        read="L1: RoPE",
    )


@guards("rotated-values")
def test_values_are_stored_as_they_are() -> None:
    _, _, values = stored([*[0.0] * 8, 1.0, 2.0, 3.0, 4.0], 1, turned=True)
    expect(
        values,
        [[1.0, 2.0, 3.0, 4.0]],
        "the value (1, 2, 3, 4) in the pool, at a position that turns q and k",
        invariant="positions decide where a token looks, not what it finds there",
        read="L1: RoPE",
    )


def test_heads_are_normalised_before_they_are_rotated() -> None:
    rotation = Rotation(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([0]))  # head_dim 2, 90 degrees
    keys, values = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2)
    target = KVCells(keys, values, torch.tensor([0]))
    weight = torch.tensor([1.0, 10.0])
    q = KERNELS.rope_store(torch.tensor([[3.0, 4.0, 4.0, 3.0, 1.0, 1.0]]), rotation, target, weight, weight, 0.0)
    expect(rounded(q[0], 2), [[-11.31, 0.85]], "q (3, 4), normalised with weight (1, 10), then turned by 90 degrees")
    expect(rounded(keys[0], 2), [[-8.49, 1.13]], "the key (4, 3), normalised and turned likewise")


# -- SwiGLU ---------------------------------------------------------------------------------------------------------


@guards("gate-and-up-swapped")
def test_the_first_half_is_the_gate() -> None:
    got = KERNELS.silu_mul(torch.tensor([[1.0, -2.0, 10.0, 100.0]]))
    expect(
        rounded(got),
        [[7.311, -23.841]],
        "silu_mul of gate (1, -2) and up (10, 100)",
        invariant="silu(gate) * up; silu(1) = 0.731, silu(-2) = -0.238",
        read="L1: SwiGLU",
    )


# -- weights --------------------------------------------------------------------------------------------------------


@guards("nibbles-side-by-side")
def test_low_nibbles_are_the_first_half_of_a_block() -> None:
    block = struct.pack("<ee", 0.5, -1.0) + bytes(low | (15 - low) << 4 for low in range(16))
    q, scale, minimum = _unpack(np.frombuffer(block, np.uint8)[None], TensorType.Q4_1)
    expect((scale.tolist(), minimum.tolist()), ([[0.5]], [[-1.0]]), "scale and minimum of a Q4_1 block")
    expect(
        q[0].tolist(),
        [*range(16), *range(15, -1, -1)],
        "q of a block whose byte i is i in its low and 15 - i in its high nibble",
        invariant="byte i holds weight i and weight i + 16",
        read="L1: GGUF",
    )


@guards("zero-is-not-zero")
def test_the_middle_of_q4_0_is_zero() -> None:
    block = struct.pack("<e", 0.5) + bytes([0x08] + [0x88] * 15)
    q, scale, minimum = _unpack(np.frombuffer(block, np.uint8)[None], TensorType.Q4_0)
    values = scale[0, 0] * q[0] + minimum[0, 0]
    expect(
        (values[0], values[16], values[31]),
        (0.0, -4.0, 0.0),
        "weights 0, 16 and 31 of a Q4_0 block of scale 0.5, stored as 8, 0 and 8",
        invariant="w = d * (q - 8) in Q4_0, so minimum = -8 d",
        read="L1: GGUF",
    )


@guards("rows-left-interleaved")
def test_interleaved_rows_become_two_halves() -> None:
    expect(
        half_split_order(8, 1).tolist(),
        [0, 2, 4, 6, 1, 3, 5, 7],
        "the order in which one head's 8 stored rows are taken",
        invariant="the stored pairs (0, 1), (2, 3), ... become elements i and i + head_dim / 2",
        read="L1: GGUF",
    )


@guards("permuted-across-heads")
def test_rows_stay_in_their_head() -> None:
    expect(
        half_split_order(8, 2).tolist(),
        [0, 2, 1, 3, 4, 6, 5, 7],
        "the order in which the 8 stored rows of two heads are taken",
        invariant="rows 0 to 3 are head 0, before and after",
        read="L1: GGUF",
    )


def match(
    stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], *, tied: bool = False
) -> list[str]:
    """Which stored tensor fills each slot, or the message of what is refused."""
    tensors = {name: dummy_tensor(name, shape, 0, CPU) for name, shape in stored.items()}
    slots = {name: WeightSlot(shape, lambda tensor: None) for name, shape in wanted.items()}
    try:
        return [tensor.name for tensor, _ in _match(tensors, slots, tied=tied, where="here")]
    except WeightsError as error:
        return [
            part for part in str(error).replace("; ", ": ").split(": ") if part.split(" ")[0] in names(stored, wanted)
        ]


def names(*of: Mapping[str, tuple[int, ...]]) -> set[str]:
    return {name for shapes in of for name in shapes}


def test_tensors_meet_their_slots() -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    expect(match(shapes, shapes), ["a", "b"], "tensors that fill the slots a and b", read="L1: Names and shapes")
    expect(match({"a": (2, 3)}, shapes), ["b"], "what is missing, by the message", read="L1: Names and shapes")


@guards("extra-tensors-ignored")
def test_a_tensor_without_a_slot_is_refused() -> None:
    expect(
        match({"a": (2, 3), "a.bias": (2,)}, {"a": (2, 3)}),
        ["a.bias"],
        "tensors refused of a checkpoint with a bias that the model has no place for",
        invariant="every tensor of the checkpoint is used, or known to be spare",
        read="L1: Names and shapes",
    )


@guards("shapes-not-compared")
def test_a_shape_that_only_broadcasts_is_refused() -> None:
    expect(
        match({"a": (1, 3)}, {"a": (2, 3)}),
        ["a is [1, 3], expected [2, 3]"],
        "what is refused of a tensor [1, 3] for a slot [2, 3]",
        invariant="shapes are equal: copy_ would repeat the one row without a word",
        read="L1: Names and shapes",
    )


def test_a_tied_head_is_the_embedding() -> None:
    embedding = {EMBEDDING: (8, 4)}
    expect(
        match({**embedding, HEAD: (8, 4)}, embedding, tied=True), [EMBEDDING], "a stored copy of a tied head is spare"
    )
    got = match(embedding, {**embedding, HEAD: (8, 4)}, tied=True)
    expect(got, [EMBEDDING, EMBEDDING], "tensors that fill embedding and head of a tied model")


# -- all of it ------------------------------------------------------------------------------------------------------


def test_the_built_in_model_says_what_transformers_says() -> None:
    config = EngineConfig(
        model="smollm2-135m",
        dtype="float32",
        attention_backend="reference",
        context_length=64,
        num_pages=8,
        num_threads=1,
    )
    engine = Engine(config)
    engine.add_request("france", [504, 3575, 282, 4649, 314], SamplingParams(temperature=0, max_tokens=6))
    token_ids: list[int] = []
    while engine.has_work:
        outputs = engine.step()
        token_ids += [*outputs.token_ids, *(token for output in outputs.others for token in output.token_ids)]
    engine.close()
    expect(
        token_ids,
        [7042, 30, 198, 198, 504, 2988],
        "the tokens after 'The capital of France is' (' Paris.', ...)",
        invariant="float32 on a CPU equals transformers token for token",
        read="L1: The exercise",
    )
