"""The batch-invariant product beside cuBLAS, tile by tile: which tile `matmul_tile` should pick for which step.

    python benchmarks/matmul_tiles.py [--shapes qwen3-8b,...] [--rows 8,64,...]

Per matrix and number of rows: microseconds of cuBLAS, of the tile that is picked, and of the fastest among all tiles
and pipeline depths; of gate and up also with the gate, which is a kernel of its own behind cuBLAS. Replays of CUDA
graphs over so many copies of the weights that none is found in the L2 cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from mini_sglang.kernels.triton.matmul import MATMUL_TILES, MatmulTile, matmul, matmul_tile
from mini_sglang.kernels.triton.silu_mul import silu_mul

SHAPES = Path(__file__).parent / "shapes"
ROWS = (8, 64, 96, 128, 160, 256, 512, 1024, 2048, 8192)
STAGES = (2, 3, 4, 5, 6, 8)
COLD_BYTES = 200 << 20  # of weights that pass by before one is read again


def matrices(shape: str) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs) of a model's products; its head comes last."""
    config = json.loads((SHAPES / shape / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "out": (hidden, heads * dim),
        "gate_up": (2 * config["intermediate_size"], hidden),
        "down": (hidden, config["intermediate_size"]),
        "head": (config["vocab_size"], hidden),
    }


def microseconds(product: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    """The median of replays that multiply by each of the weights."""
    product(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(weight)
    return float(triton.testing.do_bench(graph.replay, warmup=5, rep=20, return_mode="median")) * 1e3 / len(weights)


def with_cublas(x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> torch.Tensor:
    product = F.linear(x, weight)
    return silu_mul(product) if gated else product


def fastest(x: torch.Tensor, weights: list[torch.Tensor], *, gated: bool) -> tuple[float, MatmulTile]:
    found = []
    for tile in MATMUL_TILES:
        if tile.rows >= 2 * len(x) and tile.rows > 64:
            continue
        for stages in STAGES:
            deeper = dataclasses.replace(tile, num_stages=stages)
            if (tile.rows + tile.columns) * 128 * stages <= 220 << 10:  # bytes of shared memory
                time = microseconds(partial(matmul, x, gated=gated, tile=deeper), weights)
                found.append((time, deeper))
    return min(found, key=lambda pair: pair[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-8b,qwen3-0.6b", help="folders of benchmarks/shapes")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows")
    arguments = parser.parse_args()
    print(f"{'matrix':24} {'rows':>5} {'cuBLAS':>8} {'picked':>8} {'fastest':>8}  tile (rows x columns, stages)")
    for shape in arguments.shapes.split(","):
        for name, (outputs, inputs) in matrices(shape).items():
            copies = max(2, COLD_BYTES // (outputs * inputs * 2))
            weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
            for gated, rows in itertools.product(
                (False, True) if name == "gate_up" else (False,), map(int, arguments.rows.split(","))
            ):
                if name == "head" and rows > 256:
                    continue
                x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
                cublas = microseconds(partial(with_cublas, x, gated=gated), weights)
                picked = matmul_tile(rows, outputs, x.dtype)
                ours = microseconds(partial(matmul, x, gated=gated), weights)
                best, tile = fastest(x, weights, gated=gated)
                print(
                    f"{shape + ' ' + name + ', gated' * gated:24} {rows:5} {cublas:8.1f} {ours:8.1f} {best:8.1f}  "
                    f"{picked.rows} x {picked.columns}, {picked.num_stages}; "
                    f"{tile.rows} x {tile.columns}, {tile.num_stages}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
