"""Writes tiny quantised checkpoints as the libraries lay them out, one bit at a time, and the same model dequantised.

Nothing of the package is used: what is read of these files is checked against what this module says they hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import Checkpoints, TinyCheckpoint

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs is in the lowest bits of a word, and so on
ODD = {"hidden_size": 160, "intermediate_size": 200}  # no multiple of 64 or 128


@dataclass(frozen=True)
class Format:
    """One way to quantise: what config.json says of it, and what becomes of a matrix."""

    config: Mapping[str, Any]
    quantize: Callable[[Floats], tuple[dict[str, torch.Tensor], Floats]]  # W → its tensors by part, W dequantised
    ignored: tuple[str, ...] = ("lm_head",)
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)  # beside every matrix


def write(checkpoints: Checkpoints, form: Format, family: str = "llama", **config: Any) -> TinyCheckpoint:
    """A random model, all of its matrices but the ignored ones, embeddings and routers quantised; some blocks are 0."""
    settings = {**ODD, **config}
    folder = checkpoints.write(family, **settings).path
    dequantised = checkpoints.write(family, **settings).path
    path = folder / "model.safetensors"
    stored, values = load_file(path), load_file(path)
    for name, tensor in list(stored.items()):
        module, _, part = name.rpartition(".")
        if tensor.ndim != 2 or module.endswith(("embed_tokens", ".gate", *form.ignored)):
            continue
        assert part == "weight"
        matrix = tensor.numpy().copy()
        matrix[:8, :40] = 0
        matrix[8] = 0
        parts, kept = form.quantize(matrix)
        del stored[name]
        stored |= {f"{module}.{key}": value.contiguous().clone() for key, value in {**parts, **form.more}.items()}
        values[name] = torch.from_numpy(np.ascontiguousarray(kept))
    save_file(stored, path)
    save_file(values, dequantised / "model.safetensors", {"format": "pt"})
    add_config(folder, form.config)
    return TinyCheckpoint(folder, AutoModelForCausalLM.from_pretrained(dequantised, dtype=torch.float32).eval())


def add_config(folder: Path, quantization: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(quantization)}))


# -- one scale per block -----------------------------------------------------------------------------------------------


def ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def blocks(shape: tuple[int, int], rows: int, columns: int) -> list[tuple[int, int, slice, slice]]:
    """Where each block stands in the grid and in the matrix."""
    return [
        (i, j, slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
        for i in range(ceil(shape[0], rows))
        for j in range(ceil(shape[1], columns))
    ]


def float8(
    matrix: Floats, rows: int, columns: int, *, powers: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Floats]:
    """q, scales [grid], `powers` of 2 or any, and the dequantised matrix; the scale of a block of zeros is 0 or 1."""
    grid = (ceil(matrix.shape[0], rows), ceil(matrix.shape[1], columns))
    q, scales = torch.zeros(matrix.shape, dtype=torch.float8_e4m3fn), torch.zeros(grid)
    kept = np.zeros_like(matrix)
    for i, j, down, along in blocks(matrix.shape, rows, columns):
        block = torch.from_numpy(matrix[down, along])
        scale = block.abs().max() / 448
        if powers:
            scale = torch.exp2(torch.ceil(torch.log2(scale))) if scale > 0 else torch.tensor(1.0)
        if scale > 0:
            q[down, along] = (block / scale).to(torch.float8_e4m3fn)
        scales[i, j] = scale
        kept[down, along] = (q[down, along].float() * scale).numpy()
    return q, scales, kept


def integers(
    matrix: Floats, rows: int, columns: int, bits: int, *, symmetric: bool, scale_type: type[np.floating[Any]]
) -> tuple[Ints, Floats, Ints, Floats]:
    """q from 0 on, scales and zeros [grid], and the dequantised matrix."""
    grid = (ceil(matrix.shape[0], rows), ceil(matrix.shape[1], columns))
    q, kept = np.zeros(matrix.shape, np.int64), np.zeros_like(matrix)
    scales, zeros = np.zeros(grid, np.float32), np.zeros(grid, np.int64)
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    for i, j, down, along in blocks(matrix.shape, rows, columns):
        block = matrix[down, along]
        low, high = min(0.0, float(block.min())), max(0.0, float(block.max()))
        step = max(-low, high) / (middle - 1) if symmetric else (high - low) / most
        scale = np.float32(scale_type(step)) or np.float32(scale_type(1.0))
        zero = middle if symmetric else min(most, max(0, round(-low / float(scale))))
        scales[i, j], zeros[i, j] = scale, zero
        q[down, along] = np.clip(np.rint(block / scale) + zero, 0, most)
        kept[down, along] = (q[down, along] - zero).astype(np.float32) * scale
    return q, scales, zeros, kept


def pack_last(values: Ints, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, n] → words [rows, n * bits / 32] int32; `order` says which value of each word comes first."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    words = np.zeros((values.shape[0], ceil(values.shape[1], per_word)), np.uint32)
    for row in range(words.shape[0]):
        for word in range(words.shape[1]):
            packed = 0
            for place, index in enumerate(order):
                column = word * per_word + index
                if column < values.shape[1]:
                    packed |= int(values[row, column]) << (bits * place)
            words[row, word] = packed
    return torch.from_numpy(words.view(np.int32))


# -- the formats -------------------------------------------------------------------------------------------------------


def fp8_blocks(rows: int, columns: int, *, powers: bool = False) -> Format:
    """With `powers`, scales are powers of 2, stored as float8 of exponents alone."""

    def quantize(matrix: Floats) -> tuple[dict[str, torch.Tensor], Floats]:
        q, scales, kept = float8(matrix, rows, columns, powers=powers)
        return {"weight": q, "weight_scale_inv": scales.to(torch.float8_e8m0fnu) if powers else scales}, kept

    stated = {
        "scale_fmt": "ue8m0" if powers else None,
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [rows, columns],
    }
    return Format({**stated, "modules_to_not_convert": ["lm_head"]}, quantize)


def fp8_per(unit: str) -> Format:
    """One scale per matrix, with static scales of activations and of the KV cache, or one per row"""

    def quantize(matrix: Floats) -> tuple[dict[str, torch.Tensor], Floats]:
        q, scales, kept = float8(matrix, matrix.shape[0] if unit == "tensor" else 1, matrix.shape[1])
        return {"weight": q, "weight_scale": scales.reshape(()) if unit == "tensor" else scales}, kept

    static = {"input_scale": torch.tensor(0.5), "k_scale": torch.tensor(1.0)} if unit == "tensor" else {}
    stated = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    return Format({**stated, "ignored_layers": ["lm_head"]}, quantize, more=static)


def compressed(layout: str, weights: Mapping[str, Any], **config: Any) -> dict[str, Any]:
    """The config that compressed-tensors writes."""
    empty = {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "group_size": None, "block_structure": None}
    group = {"targets": ["Linear"], "format": layout, "weights": {**empty, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        **config,
    }


def sizes_of(strategy: str, size: int | list[int] | None, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a block."""
    if isinstance(size, list):
        return size[0], size[1]
    return (shape[0] if strategy == "tensor" else 1), size or shape[1]


def _strategy(strategy: str, size: int | list[int] | None) -> dict[str, Any]:
    sizes = {"group_size": size} if strategy == "group" else {"block_structure": size} if strategy == "block" else {}
    return {"strategy": strategy, **sizes}


def compressed_float(strategy: str, size: int | list[int] | None = None) -> Format:
    def quantize(matrix: Floats) -> tuple[dict[str, torch.Tensor], Floats]:
        q, scales, kept = float8(matrix, *sizes_of(strategy, size, matrix.shape))
        return {"weight": q, "weight_scale": scales.reshape(1) if strategy == "tensor" else scales}, kept

    weights = {"num_bits": 8, "type": "float", "symmetric": True, **_strategy(strategy, size)}
    return Format(compressed("float-quantized", weights), quantize)


def compressed_int(strategy: str, size: int | None = None, *, symmetric: bool = True) -> Format:
    def quantize(matrix: Floats) -> tuple[dict[str, torch.Tensor], Floats]:
        rows, columns = sizes_of(strategy, size, matrix.shape)
        q, scales, zeros, kept = integers(matrix, rows, columns, 8, symmetric=symmetric, scale_type=np.float32)
        parts = {"weight": torch.from_numpy((q - 128).astype(np.int8)), "weight_scale": torch.from_numpy(scales)}
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
        if strategy == "tensor":
            parts |= {name: value.reshape(1) for name, value in parts.items() if name != "weight"}
        return parts, kept

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, **_strategy(strategy, size)}
    return Format(compressed("int-quantized", weights), quantize)


def compressed_packed(
    strategy: str, size: int | None = None, *, bits: int = 4, symmetric: bool = True, reordered: bool = False
) -> Format:
    def quantize(matrix: Floats) -> tuple[dict[str, torch.Tensor], Floats]:
        order = np.random.default_rng(0).permutation(matrix.shape[1]) if reordered else np.arange(matrix.shape[1])
        rows, columns = sizes_of(strategy, size, matrix.shape)
        q, scales, zeros, kept = integers(
            matrix[:, order], rows, columns, bits, symmetric=symmetric, scale_type=np.float32
        )
        back = np.argsort(order)
        parts = {
            "weight_packed": pack_last(q[:, back], bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(matrix.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack_last(zeros.T, bits).T
        if reordered:
            parts["weight_g_idx"] = torch.from_numpy((back // columns).astype(np.int32))
        return parts, kept[:, back]

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **_strategy(strategy, size)}
    weights["actorder"] = "group" if reordered else None
    return Format(compressed("pack-quantized", weights), quantize)


def awq(group: int) -> Format:
    def quantize(matrix: Floats) -> tuple[dict[str, torch.Tensor], Floats]:
        columns = matrix.shape[1] if group == -1 else group
        q, scales, zeros, kept = integers(matrix, 1, columns, 4, symmetric=False, scale_type=np.float16)
        return {
            "qweight": pack_last(q.T, 4, AWQ_ORDER),
            "qzeros": pack_last(zeros.T, 4, AWQ_ORDER),
            "scales": torch.from_numpy(scales.T.astype(np.float16)),
        }, kept

    stated = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Format({**stated, "modules_to_not_convert": None}, quantize)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; with bit 3 negative


def e2m1(matrix: Floats) -> tuple[torch.Tensor, torch.Tensor, Floats]:
    """octets [rows, columns / 2], exponents of two for each 32 columns [rows, groups], and the dequantised matrix"""
    codes, kept = np.zeros(matrix.shape, np.uint8), np.zeros_like(matrix)
    exponents = np.zeros((matrix.shape[0], ceil(matrix.shape[1], 32)), np.uint8)
    for i, j, down, along in blocks(matrix.shape, 1, 32):
        largest = float(np.abs(matrix[down, along]).max())
        exponent = math.floor(math.log2(largest)) - 2 if largest else 0
        exponents[i, j] = exponent + 127
        for column, value in enumerate(matrix[down, along][0], along.start):
            scaled = abs(float(value)) / 2.0**exponent
            code = min(range(8), key=lambda which: abs(E2M1[which] - scaled))
            codes[i, column] = code + (8 if value < 0 else 0)
            kept[i, column] = math.copysign(E2M1[code] * 2.0**exponent, value)
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4), torch.from_numpy(exponents), kept


def compressed_mxfp4() -> Format:
    def quantize(matrix: Floats) -> tuple[dict[str, torch.Tensor], Floats]:
        octets, exponents, kept = e2m1(matrix)
        return {"weight_packed": octets, "weight_scale": exponents}, kept

    weights = {"num_bits": 4, "type": "float", "symmetric": True, **_strategy("group", 32)}
    return Format(compressed("mxfp4-pack-quantized", weights), quantize)


def write_gpt_oss(checkpoints: Checkpoints, **config: Any) -> TinyCheckpoint:
    """A random gpt-oss, its experts in MXFP4 as published."""
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, **config}
    folder, dequantised = (checkpoints.write("gpt_oss", **settings).path for _ in range(2))
    path = folder / "model.safetensors"
    stored, values = load_file(path), load_file(path)
    for name, tensor in list(stored.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts = [e2m1(matrix.t().contiguous().numpy()) for matrix in tensor]
        stored[f"{name}_blocks"] = torch.stack([octets.unflatten(1, (-1, 16)) for octets, _, _ in experts])
        stored[f"{name}_scales"] = torch.stack([exponents for _, exponents, _ in experts])
        values[name] = torch.stack([torch.from_numpy(kept).t() for _, _, kept in experts]).contiguous()
        del stored[name]
    save_file(stored, path)
    save_file(values, dequantised / "model.safetensors", {"format": "pt"})
    left_alone = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    add_config(folder, {"quant_method": "mxfp4", "modules_to_not_convert": left_alone})
    return TinyCheckpoint(folder, AutoModelForCausalLM.from_pretrained(dequantised, dtype=torch.float32).eval())


def gptq(
    group: int,
    *,
    bits: int = 4,
    symmetric: bool = False,
    reordered: bool = False,
    version: str = "gptq",
    stated_version: str | None = None,
) -> Format:
    """`stated_version` is what config.json says, as some writers do, of zeros stored as `version` says."""

    def quantize(matrix: Floats) -> tuple[dict[str, torch.Tensor], Floats]:
        columns = matrix.shape[1] if group == -1 else group
        order = np.random.default_rng(0).permutation(matrix.shape[1]) if reordered else np.arange(matrix.shape[1])
        q, scales, zeros, kept = integers(
            matrix[:, order], 1, columns, bits, symmetric=symmetric, scale_type=np.float16
        )
        back = np.argsort(order)
        words = pack_last(zeros.T, bits).numpy().view(np.uint32).astype(np.int64)
        if version == "gptq":  # 1 less in each, subtracted from whole words
            words = (words - sum(1 << shift for shift in range(0, 32, bits))) % 2**32
        return {
            "qweight": pack_last(q[:, back], bits).T,
            "qzeros": torch.from_numpy(words.astype(np.uint32).view(np.int32)),
            "scales": torch.from_numpy(scales.T.astype(np.float16)),
            "g_idx": torch.from_numpy((back // columns).astype(np.int32)),
        }, kept[:, back]

    stated = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": reordered, "sym": symmetric}
    return Format({**stated, "checkpoint_format": stated_version or version, "lm_head": False}, quantize)


FORMATS: dict[str, Format] = {
    "fp8, blocks of 128 x 128": fp8_blocks(128, 128),
    "fp8, blocks of 24 x 56": fp8_blocks(24, 56),
    "fp8, blocks of 128 x 128, scales of exponents": fp8_blocks(128, 128, powers=True),
    "fp8, per tensor, static": fp8_per("tensor"),
    "fp8, per channel": fp8_per("channel"),
    "float-quantized, tensor": compressed_float("tensor"),
    "float-quantized, channel": compressed_float("channel"),
    "float-quantized, blocks": compressed_float("block", [128, 128]),
    "float-quantized, groups of 32": compressed_float("group", 32),
    "int-quantized, channel": compressed_int("channel"),
    "int-quantized, channel, asymmetric": compressed_int("channel", symmetric=False),
    "int-quantized, tensor, asymmetric": compressed_int("tensor", symmetric=False),
    "int-quantized, groups of 32": compressed_int("group", 32),
    "int-quantized, groups of 128": compressed_int("group", 128),
    "pack-quantized, groups of 32": compressed_packed("group", 32),
    "pack-quantized, groups of 64, asymmetric": compressed_packed("group", 64, symmetric=False),
    "pack-quantized, groups of 128": compressed_packed("group", 128),
    "pack-quantized, channel": compressed_packed("channel"),
    "pack-quantized, channel, asymmetric": compressed_packed("channel", symmetric=False),
    "pack-quantized, 8 bits": compressed_packed("channel", bits=8),
    "pack-quantized, groups of 32 in activation order": compressed_packed("group", 32, reordered=True),
    "mxfp4-pack-quantized": compressed_mxfp4(),
    "awq, groups of 32": awq(32),
    "awq, groups of 64": awq(64),
    "awq, groups of 128": awq(128),
    "awq, group -1": awq(-1),
    "gptq, groups of 32": gptq(32),
    "gptq, groups of 64, second format": gptq(64, version="gptq_v2"),
    "gptq, groups of 128, symmetric": gptq(128, symmetric=True),
    "gptq, groups of 128, symmetric, called the first format": gptq(
        128, symmetric=True, version="gptq_v2", stated_version="gptq"
    ),
    "gptq, group -1": gptq(-1),
    "gptq, groups of 32, desc_act": gptq(32, reordered=True),
    "gptq, groups of 128, desc_act": gptq(128, reordered=True),
    "gptq, 8 bits": gptq(64, bits=8),
}
