"""What summing over GPUs takes, by size: NCCL, and the kernels that reach the other GPUs' memory, inside CUDA graphs.

    torchrun --nproc-per-node 2 benchmarks/all_reduce.py [--json FILE]

The limits in `mini_sglang/parallel/symm_mem.py` are where these lines cross. Each sum is checked before it is timed.
Most sums of a model are "+ residual".
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mini_sglang.parallel.tensor_parallel import connect_gpus

HIDDEN = 5120
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
Sum = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
REPEATS = 50  # in one graph, as the layers of a model follow each other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, microseconds")
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    parallel = connect_gpus(store, rank, size, torch.bfloat16, name="all_reduce", symm_mem=True)
    collectives = parallel._collectives
    assert collectives is not None
    symm_mem, collectives._symm_mem = collectives._symm_mem, None
    sums: dict[str, Sum] = {"NCCL": collectives.all_reduce}
    if symm_mem is not None:
        sums["direct"] = symm_mem.all_reduce
    ways = [f"{name}{residual}" for name in sums for residual in ("", " + residual")]
    table = Table("rows", "KiB", *(f"{way}, us" for way in ways), title=f"{size} GPUs, {HIDDEN} bfloat16")
    figures: dict[int, dict[str, float]] = {}  # rows -> way -> microseconds
    for rows in ROWS:
        x = torch.full((rows, HIDDEN), rank + 1.0, dtype=torch.bfloat16, device="cuda")
        times = figures[rows] = {}
        for name, add_up in sums.items():
            if name == "NCCL" or symm_mem is None or symm_mem.supports(x):
                times[name] = _microseconds(add_up, x, None, size)
                times[f"{name} + residual"] = _microseconds(add_up, x, torch.ones_like(x), size)
        table.add_row(str(rows), str(x.nbytes >> 10), *(f"{times[way]:.1f}" if way in times else "" for way in ways))
    if rank == 0:
        Console().print(table)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
    parallel.minimum(0)
    os._exit(0)


def _microseconds(add_up: Sum, x: torch.Tensor, residual: torch.Tensor | None, size: int) -> float:
    total = add_up(x.clone(), residual)
    if not (total == size * (size + 1) / 2 + (0 if residual is None else 1)).all():
        raise ValueError(f"{add_up} gave {total.flatten()[:4].tolist()}")
    work = torch.zeros_like(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            add_up(work, residual)
    times: list[float] = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPEATS * 1e3)
    return min(times)


if __name__ == "__main__":
    main()
