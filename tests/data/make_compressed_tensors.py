"""Writes compressed_tensors.safetensors: small random matrices that compressed-tensors compressed and decompressed.

    pip install compressed-tensors==0.20.1
    python tests/data/make_compressed_tensors.py tests/data/compressed_tensors.safetensors

For each case the file holds what the library stores and, as `….decompressed`, what it makes of that; the cases' formats
and arguments are its metadata. Matrices have 19 rows, one of them zeros: no multiple of any block.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from safetensors.torch import save_file

FLOAT: dict[str, Any] = {"num_bits": 8, "type": "float"}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int"}
GROUPS: dict[str, Any] = {**INT4, "strategy": "group", "group_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "float-tensor": ("float-quantized", {**FLOAT, "strategy": "tensor"}),
    "float-channel": ("float-quantized", {**FLOAT, "strategy": "channel"}),
    "float-block": ("float-quantized", {**FLOAT, "strategy": "block", "block_structure": [16, 32]}),
    "int-channel": ("int-quantized", INT8),
    "int-channel-asymmetric": ("int-quantized", {**INT8, "symmetric": False}),
    "pack-group": ("pack-quantized", GROUPS),
    "pack-group-asymmetric": ("pack-quantized", {**GROUPS, "symmetric": False}),
    "pack-channel": ("pack-quantized", {**INT4, "strategy": "channel"}),
    "pack-channel-asymmetric": ("pack-quantized", {**INT4, "strategy": "channel", "symmetric": False}),
    "pack-8-bits": ("pack-quantized", INT8),
}
ROWS = 19


def block_of(args: Any, rows: int, columns: int) -> tuple[int, int]:
    """The rows and columns that share a scale."""
    match args.strategy:
        case "tensor":
            return rows, columns
        case "channel":
            return 1, columns
        case "group":
            return 1, args.group_size
        case _:
            down, along = args.block_structure
            return down, along


def scales(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's scale and zero point for each block."""
    down, along = block_of(args, *weight.shape)
    grid = [list(rows.split(along, 1)) for rows in weight.split(down)]
    low, high = (
        torch.stack([torch.stack([end(part) for part in row]) for row in grid]) for end in (torch.min, torch.max)
    )
    scale, zero = calculate_qparams(low, high, args)
    return (scale.reshape(1), zero.reshape(1)) if args.strategy == "tensor" else (scale, zero)


def main(path: str) -> None:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    schemes = {}
    for name, (layout, settings) in CASES.items():
        args = QuantizationArgs(**settings)
        columns = 96 if args.strategy == "group" else 45 if layout == "pack-quantized" else 70
        weight = torch.randn(ROWS, columns) * 0.3 + 0.1
        weight[3] = 0
        scale, zero = scales(weight, args)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry(layout)
        stored = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in stored.items()}
        tensors[f"{name}.decompressed"] = compressor.decompress(stored, scheme)["weight"].float().contiguous()
        schemes[name] = {"format": layout, "weights": args.model_dump(mode="json")}
    save_file(tensors, path, {"schemes": json.dumps(schemes)})


if __name__ == "__main__":
    main(sys.argv[1])
