"""A mixture's grouped products, tile by tile: which tile should be picked for which step.

    python benchmarks/expert_tiles.py [--shape qwen3-30b-a3b] [--tokens 1,64,...] [--quantization none,fp8,...]

Per number of tokens: microseconds of routing, sorting and combining; and per product those of the tile that is picked
and of the fastest few among candidates, pipeline depths and numbers of warps, with the rate at which the weights of
chosen experts are read and multiplied. Replays of CUDA graphs in which every call chooses anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from mini_sglang.bench.hardware import seconds_in_graph
from mini_sglang.kernels.triton.experts import (
    EXPERT_TILES,
    UNSORTED_TOKENS,
    ExpertTile,
    combine,
    expert_tile,
    grouped_matmul,
    tile_rows,
)
from mini_sglang.kernels.triton.quantized_experts import grouped_weight_only_matmul, quantized_expert_tile
from mini_sglang.kernels.triton.quantized_gemv import pack
from mini_sglang.kernels.triton.routing import SortedChoices, route, sort_by_expert
from mini_sglang.kernels.triton.weight_only import WeightOnlyTile
from mini_sglang.model_config import ModelConfig
from mini_sglang.weights.hub import resolve_model
from mini_sglang.weights.model_config import load_model_config
from mini_sglang.weights.quantize import QUANTIZERS

SHAPES = Path(__file__).parent / "shapes"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
CANDIDATES = (
    *EXPERT_TILES,
    ExpertTile(16, 128, 64, num_warps=4, num_stages=4),
    ExpertTile(32, 128, 128, num_warps=4, num_stages=3),
    ExpertTile(64, 256, 64, num_warps=4, num_stages=3),
)
STAGES = (2, 3, 4, 5, 6)
SHARED_BYTES = 227 << 10  # of a multiprocessor of an H100
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
WEIGHT_BYTES = {"none": 2, "fp8": 1, "fp8-block": 1, "w4a16": 0.5}  # without scales
CALLS = 4  # of each graph, with choices of their own

Tile = ExpertTile | WeightOnlyTile
Matmul = Callable[[torch.Tensor, SortedChoices | None, Tile], object]


def grouped(quantization: str, x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> Matmul:
    """The product of rows with weights [experts, outputs, inputs], quantised if that is asked for."""
    quantize = QUANTIZERS[quantization]
    if quantize is None:
        return partial(grouped_matmul, x, weight, gated=gated)
    packed = pack(quantize(weight.flatten(0, 1)))
    if packed is None:
        raise ValueError(f"no kernel takes weights {list(weight.shape)} as {quantization}")
    return partial(grouped_weight_only_matmul, x, packed, len(weight), gated=gated)


def picked_tile(quantization: str, choices: int, experts: int, outputs: int) -> Tile:
    if quantization != "none":
        return quantized_expert_tile(choices, experts, DTYPE, deterministic=False)
    rows = tile_rows(choices, experts, DTYPE, deterministic=False)
    return expert_tile(rows, choices, experts, outputs, DTYPE)


def variants(quantization: str, rows: int) -> Iterator[Tile]:
    if quantization != "none":
        for height, columns, warps in itertools.product({16, rows, 2 * rows}, (16, 32, 64, 128), (1, 2, 4, 8)):
            if 256 <= height * columns // warps <= 2048:  # sums of a warp: more do not fit into its registers
                yield from (WeightOnlyTile(height, columns, warps, stages) for stages in STAGES)
        return
    for tile in CANDIDATES:
        for stages in STAGES:
            for warps in (4, 8):
                fits = (tile.rows + tile.columns) * tile.depth * 2 * stages <= SHARED_BYTES
                if fits and rows // 2 <= tile.rows <= 2 * rows:
                    yield dataclasses.replace(tile, num_stages=stages, num_warps=warps)


def seconds(matmul: Matmul, chosen: list[torch.Tensor], experts: int, tile: Tile) -> float:
    tokens = len(chosen[0])
    all_sorted = [sort_by_expert(ids, experts, tile.rows) if tokens > UNSORTED_TOKENS else None for ids in chosen]
    calls = [partial(matmul, ids, sorted_choices, tile) for ids, sorted_choices in zip(chosen, all_sorted, strict=True)]
    return seconds_in_graph(calls, DEVICE)


def line(tile: Tile, time: float, num_bytes: int, flops: int) -> str:
    depth = f" x {tile.depth:3}" if isinstance(tile, ExpertTile) else ""
    return (
        f"{tile.rows:4} x {tile.columns:3}{depth}, {tile.num_warps} warps, {tile.num_stages} stages: "
        f"{time * 1e6:8.1f} us {num_bytes / time / 1e12:5.2f} TB/s {flops / time / 1e12:6.1f} TFLOP/s"
    )


def measure(model: ModelConfig, tokens: int, quantization: str) -> None:
    mixture = model.experts
    if mixture is None:
        raise ValueError(f"a {model.architecture} has no experts")
    experts, top_k = mixture.num_experts, mixture.experts_per_token
    hidden, size = model.hidden_size, mixture.intermediate_size
    random = partial(torch.randn, device=DEVICE, dtype=DTYPE)
    gate_up, down = random(experts, 2 * size, hidden), random(experts, hidden, size)
    logits = [random(tokens, experts) for _ in range(CALLS)]
    x, gated, outputs = random(tokens, hidden), random(tokens * top_k, size), random(tokens * top_k, hidden)
    routed = [route(step, top_k, normalize=True) for step in logits]
    chosen = [ids for ids, _ in routed]
    rows = tile_rows(tokens * top_k, experts, DTYPE, deterministic=False)
    small: dict[str, list[Callable[[], object]]] = {
        "route": [partial(route, step, top_k, normalize=True) for step in logits],
        "sort": [partial(sort_by_expert, ids, experts, rows) for ids in chosen],
        "combine": [partial(combine, x, outputs, weights) for _, weights in routed],
    }
    times = ", ".join(f"{name} {seconds_in_graph(calls, DEVICE) * 1e6:.1f} us" for name, calls in small.items())
    print(f"{tokens} tokens, {quantization}: {times}", flush=True)
    touched = sum(ids.unique().numel() for ids in chosen) / CALLS
    for name, weight, source in (("gate_up", gate_up, x), ("down", down, gated)):
        matmul = grouped(quantization, source, weight, gated=name == "gate_up")
        wide, deep = weight.shape[1:]
        num_bytes = round(touched * wide * deep * WEIGHT_BYTES[quantization])
        flops = 2 * tokens * top_k * wide * deep
        picked = picked_tile(quantization, tokens * top_k, experts, wide)
        print(f"  {name:8} picked  {line(picked, seconds(matmul, chosen, experts, picked), num_bytes, flops)}")
        found: list[tuple[float, Tile]] = []
        for tile in variants(quantization, rows):
            try:
                found.append((seconds(matmul, chosen, experts, tile), tile))
            except OutOfResources:
                continue
        for time, tile in sorted(found, key=lambda pair: pair[0])[:4]:
            print(f"  {name:8} fastest {line(tile, time, num_bytes, flops)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="a folder of benchmarks/shapes")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens")
    parser.add_argument("--quantization", default="none", help=f"some of {', '.join(QUANTIZERS)}")
    arguments = parser.parse_args()
    model = load_model_config(resolve_model(str(SHAPES / arguments.shape), weights_needed=False))
    for tokens in map(int, arguments.tokens.split(",")):
        for quantization in arguments.quantization.split(","):
            measure(model, tokens, quantization)


if __name__ == "__main__":
    main()
