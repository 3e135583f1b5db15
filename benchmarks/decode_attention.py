"""Attention kernels alone: TB/s of keys and values that paged decode reads, TFLOP/s of paged prefill.

    python benchmarks/decode_attention.py [--json FILE]

Decode runs as replays of a CUDA graph of several layers with their own pools, so that no layer finds its keys in the L2
cache; random page order, bfloat16, head size 128. "of copy" is the share of the rate at which a device-to-device copy
moves bytes (read plus written) in the same run. Prefill is compared with PyTorch's fused SDPA on contiguous tensors,
both replayed too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from mini_sglang.kernels.paged_decode import DecodeTuning, PagedDecode, decode_tuning, split_tokens_for
from mini_sglang.kernels.paged_prefill import PrefillTuning, paged_prefill, prefill_tiles, prefill_tuning

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
HEAD_DIM = 128
SHAPES = {"16/8 heads": (16, 8), "32/8 heads": (32, 8)}
PAGE_SIZES = (1, 16, 64)
PROMPTS = (1024, 4096, 8192, 16384)


@dataclass(frozen=True)
class Measured:
    name: str
    page_size: int
    microseconds: float  # one layer
    rate: float  # TB/s or TFLOP/s
    share: float  # of the copy's rate, or of the best SDPA's


def workloads() -> dict[str, list[int]]:
    """Name -> KV lengths of its rows."""
    rng = random.Random(0)
    return {
        "256 x 100-2000": [rng.randint(100, 2000) for _ in range(256)],
        "64 x 100-2000": [rng.randint(100, 2000) for _ in range(64)],
        "8 x 8000": [8000] * 8,
        "1 x 8000": [8000],
        "1 x 1300": [1300],
    }


def copy_rate() -> float:
    """TB/s of a device-to-device copy, bytes read plus bytes written."""
    source = torch.randn(2**30, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), 10) / 1e9


def median_ms(work: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    times: list[float] = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return sorted(times)[repeats // 2]


def graph_of(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def paged(lengths: list[int], page_size: int) -> tuple[torch.Tensor, int]:
    """A page table [rows, max pages] in random page order, and the number of cells."""
    pages = [-(-length // page_size) for length in lengths]
    ids = torch.randperm(sum(pages)).to(torch.int32).split(pages)
    table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    return table.to(DEVICE), sum(pages) * page_size


def decode(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    page_size: int,
    pools: list[torch.Tensor],
    tuning: DecodeTuning | None = None,
    split_tokens: int | None = None,
) -> tuple[float, float]:
    """(microseconds per layer, TB/s of keys and values read)"""
    table, cells = paged(lengths, page_size)
    sequence_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    tokens = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE)
    q = torch.randn(len(lengths), heads, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    out = torch.empty_like(q)
    attention = PagedDecode(
        max_rows=len(lengths),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        page_size=page_size,
        device=DEVICE,
        tuning=tuning or decode_tuning(HEAD_DIM, DTYPE),
    )
    splits = split_tokens or split_tokens_for(len(lengths), kv_heads)
    attention.plan(sequence_lengths, tokens, split_tokens=splits)
    layers = [(pool[0, :cells], pool[1, :cells]) for pool in pools]

    def step() -> None:
        for keys, values in layers:
            attention.run(q, keys, values, table, out)

    graph = graph_of(step)
    milliseconds = median_ms(graph.replay, 15) / len(layers)
    read = 2 * sum(lengths) * kv_heads * HEAD_DIM * DTYPE.itemsize
    return milliseconds * 1e3, read / milliseconds / 1e9


def make_pools(cells: int, kv_heads: int, layers: int) -> list[torch.Tensor]:
    """Keys and values of several layers, [2, cells, kv_heads, head_dim] each, random"""
    return [torch.randn(2, cells, kv_heads, HEAD_DIM, dtype=DTYPE, device=DEVICE) for _ in range(layers)]


def prefill(
    tokens: int, heads: int, kv_heads: int, page_size: int, tuning: PrefillTuning | None = None
) -> tuple[float, float]:
    """(microseconds, TFLOP/s) of one causal prompt; FLOPs count the lower triangle only"""
    tuning = tuning or prefill_tuning(HEAD_DIM, page_size, DTYPE, DEVICE)
    table, cells = paged([tokens], page_size)
    (pool,) = make_pools(cells, kv_heads, 1)
    q = torch.randn(tokens, heads, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    out = torch.empty_like(q)
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    counts = torch.full((1,), tokens, dtype=torch.int32, device=DEVICE)
    tiles = torch.tensor(prefill_tiles([0], [tokens], heads // kv_heads, tuning), device=DEVICE)

    def step() -> None:
        paged_prefill(
            q, pool[0], pool[1], table, starts, counts, starts, tiles, out, page_size=page_size, tuning=tuning
        )

    milliseconds = median_ms(graph_of(step).replay, 15)
    return milliseconds * 1e3, causal_flops(tokens, heads) / milliseconds / 1e9


def sdpa(tokens: int, heads: int, kv_heads: int, backend: SDPBackend) -> float:
    """TFLOP/s of PyTorch's fused attention on contiguous q, k, v of one prompt"""
    q = torch.randn(1, heads, tokens, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    k, v = torch.randn(2, 1, kv_heads, tokens, HEAD_DIM, dtype=DTYPE, device=DEVICE)

    def step() -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    milliseconds = median_ms(graph_of(step).replay, 15)
    return causal_flops(tokens, heads) / milliseconds / 1e9


def causal_flops(tokens: int, heads: int) -> int:
    return 2 * tokens * tokens * heads * HEAD_DIM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    copied = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy {copied:.2f} TB/s")
    results: list[Measured] = []
    most = max(sum(lengths) + 64 * len(lengths) for lengths in workloads().values())
    pools = make_pools(most, 8, 8)
    print(f"{'decode':34} {'page':>4} {'µs':>8} {'TB/s':>6} {'of copy':>8}")
    for shape, (heads, kv_heads) in SHAPES.items():
        for name, lengths in workloads().items():
            for page_size in PAGE_SIZES:
                microseconds, rate = decode(lengths, heads, kv_heads, page_size, pools)
                results.append(Measured(f"decode {shape} {name}", page_size, microseconds, rate, rate / copied))
                print(f"{shape}, {name:22} {page_size:4} {microseconds:8.1f} {rate:6.2f} {rate / copied:8.0%}")
    del pools
    print(f"{'prefill':34} {'page':>4} {'µs':>8} {'TFLOP/s':>8} {'of cuDNN':>8} {'of flash':>8}")
    for shape, (heads, kv_heads) in SHAPES.items():
        for tokens in PROMPTS:
            cudnn = sdpa(tokens, heads, kv_heads, SDPBackend.CUDNN_ATTENTION)
            flash = sdpa(tokens, heads, kv_heads, SDPBackend.FLASH_ATTENTION)
            for page_size in PAGE_SIZES:
                microseconds, rate = prefill(tokens, heads, kv_heads, page_size)
                results.append(Measured(f"prefill {shape} {tokens}", page_size, microseconds, rate, rate / cudnn))
                print(
                    f"{shape}, {tokens:<22} {page_size:4} {microseconds:8.1f} {rate:8.0f} {rate / cudnn:8.0%} "
                    f"{rate / flash:8.0%}"
                )
    if arguments.json:
        figures = [vars(result) for result in results]
        arguments.json.write_text(json.dumps({"copy_tb_s": copied, "results": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
