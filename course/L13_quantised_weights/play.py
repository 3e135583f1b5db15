"""A group by hand, what each format loses, what a product costs by rows, sums in two orders, and a cut group."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from mini_sglang.bench.roofline import Ceilings
from mini_sglang.parallel.sharding import shard_evenly, whole
from mini_sglang.weights.quantize import quantize_fp8, quantize_int4
from mini_sglang.weights.quantized_weight import QuantizedWeight

GROUP = [-1.875, 0.6, 0.125, 1.0, 0.9, -0.3, 1.4, -0.8]
FORMATS: dict[
    str, tuple[float, Callable[[torch.Tensor], QuantizedWeight]]
] = {  # bits of a weight, scales of 16 included
    "float8, a scale per row": (8.0, quantize_fp8),
    "float8, blocks of 128 × 128": (8.0, partial(quantize_fp8, block=(128, 128))),
    "4 bits, groups of 32": (4.5, partial(quantize_int4, group_size=32)),
    "4 bits, groups of 128": (4.125, partial(quantize_int4, group_size=128)),
    "4 bits, a scale per row": (4.0, partial(quantize_int4, group_size=1024)),
}
BYTES_PER_S = 4.201e12  # one H200, measured: a copy, and below it products in bfloat16 and in float8
KINDS = {"bfloat16": (2.0, 744.5e12), "float8": (1.0, 1283e12), "4 bits, unpacked to bfloat16": (0.5, 744.5e12)}
OUT, IN = 12288, 4096  # an MLP matrix of Qwen3-8B's shape
PAUSE_S = 0.4


def main() -> None:
    console = Console(highlight=False)
    for show in (show_group, show_errors, show_costs, show_sums, show_cut):
        show(console)
        console.print()
        if console.is_terminal:  # else nobody watches
            time.sleep(PAUSE_S)


def show_group(console: Console) -> None:
    w = torch.tensor([GROUP])
    stored = quantize_int4(w, len(GROUP))
    table = Table("", *(f"{value:g}" for value in GROUP), box=None, padding=(0, 1))
    table.add_row("q", *(str(value) for value in stored.q[0].tolist()))
    table.add_row("back", *(f"{value:g}" for value in stored.dense()[0].tolist()))
    table.add_row("off by", *(f"{value:.3f}" for value in (stored.dense() - w)[0].abs().tolist()))
    console.print(f"[bold]1. A group of eight weights[/], scale {stored.scale.item():g}: at most half a step is lost")
    console.print(table)


def show_errors(console: Console) -> None:
    """Of random matrices: the second has one input whose weights are 50 times as large."""
    w = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    outlier = w.clone()
    outlier[:, 7] *= 50
    others = torch.arange(1024) != 7
    table = Table("", "bits a weight", "error", "beside a large input", box=None, padding=(0, 2, 0, 0))
    for name, (bits, quantize) in FORMATS.items():
        plain, beside = error(quantize(w).dense(), w), error(quantize(outlier).dense()[:, others], w[:, others])
        table.add_row(name, f"{bits:g}", f"{plain:.1%}", f"{beside:.1%}")
    console.print("[bold]2. What is lost[/], root mean square, of normally distributed weights")
    console.print(table)
    console.print("   [dim]the last column: one input's weights are 50 times as large; error of all the others[/]")


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def show_costs(console: Console) -> None:
    table = Table("rows", *KINDS, box=None, padding=(0, 2, 0, 0))
    for rows in (1, 16, 32, 64, 128, 160, 256, 1024):
        cells = []
        for weight_bytes, flops in KINDS.values():
            num_bytes, work = OUT * IN * weight_bytes, 2.0 * OUT * IN * rows
            limit = "bytes" if num_bytes / BYTES_PER_S > work / flops else "[yellow]FLOPs[/]"
            cells.append(f"{Ceilings(BYTES_PER_S, flops).seconds(num_bytes, work) * 1e6:5.1f} µs, {limit}")
        table.add_row(str(rows), *cells)
    console.print(f"[bold]3. A product with {OUT:,} × {IN:,} weights takes at least[/], and what limits it (one H200)")
    console.print(table)


def show_sums(console: Console) -> None:
    """One block of 32 products, added up from the front and from the back, as they are and as integers."""
    random = torch.Generator().manual_seed(3)
    different = 0
    for _ in range(1000):
        w, x = torch.randint(0, 16, (32,), generator=random), torch.randn(32, generator=random)
        products = w.float() * x
        different += one_by_one(products) != one_by_one(products.flip(0))
        integers = w * (x * (127 / x.abs().max())).round().int()
        assert one_by_one(integers) == one_by_one(integers.flip(0))
    console.print(
        "[bold]4. A block of 32 products, added up from both ends[/]: in float32 the two sums differ in "
        f"{different} of 1,000 blocks;\n   with activations in 8 bits they are integers, and equal in all",
        soft_wrap=True,
    )


def one_by_one(values: torch.Tensor) -> float:
    total = torch.zeros((), dtype=values.dtype)
    for value in values:
        total = total + value
    return float(total)


def show_cut(console: Console) -> None:
    stored = quantize_int4(torch.randn(1, 384, generator=torch.Generator().manual_seed(1)), 128)
    console.print(f"[bold]5. 384 inputs in groups of 128[/], scales {scales(stored)}")
    for ranks in (2, 3, 5):
        for rank in range(ranks):
            part = stored.shard(whole(1), shard_evenly(384, rank, ranks, 16))
            assert part is not None  # sizes are multiples of 16, so groups of 16 always fit
            console.print(f"   rank {rank} of {ranks}: groups of {part.group_size:3}, scales {scales(part)}")


def scales(stored: QuantizedWeight) -> str:
    return ", ".join(f"{value:.3f}" for value in stored.scale[0].tolist())


if __name__ == "__main__":
    main()
