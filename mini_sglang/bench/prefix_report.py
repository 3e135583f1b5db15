"""What `bench prefix` measured, as tables, JSON and a plot. Knows figures alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mini_sglang.bench.prefix import HostCost, PrefixReport
from mini_sglang.bench.pyplot import load_pyplot


def print_tables(report: PrefixReport) -> None:
    console = Console()
    console.print(hits_table(report))
    console.print(cost_table(report.cost))


def hits_table(report: PrefixReport) -> Table:
    table = Table(title="Prompt blocks found in the prefix cache", title_justify="left")
    for column in ("pool / distinct", "blocks", "found", "Belady finds", "of Belady", "of no limit"):
        table.add_column(column, justify="right")
    for hits in report.hits:
        table.add_row(
            f"{hits.pool_blocks / report.distinct:.3g}",
            f"{hits.pool_blocks:,}",
            f"{hits.found / report.blocks:.2%}",
            f"{hits.belady / report.blocks:.2%}",
            _share(hits.found, hits.belady),
            _share(hits.found, report.unlimited),
        )
    table.caption = (
        f"{report.requests:,} prompts of {report.blocks:,} blocks ({report.block_size} tokens each), "
        f"{report.distinct:,} of them distinct; without a limit {report.unlimited / report.blocks:.2%} are found"
    )
    return table


def cost_table(cost: HostCost) -> Table:
    table = Table(title="CPU time of the prefix cache", title_justify="left")
    table.add_column(f"{cost.cached_tokens:,} tokens cached, pages of {cost.page_size}")
    table.add_column("µs", justify="right")
    table.add_row("match 100 prompt tokens", f"{cost.match_us:.2f}")
    table.add_row("insert 100 prompt tokens", f"{cost.insert_us:.2f}")
    table.add_row("both", f"{cost.match_us + cost.insert_us:.2f}", end_section=True)
    table.add_row("evict one page", "none evicted" if cost.evict_us is None else f"{cost.evict_us:.2f}")
    table.caption = f"over {cost.prompt_tokens:,} prompt tokens and {cost.evicted_pages:,} evicted pages"
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def write_json(report: PrefixReport, path: Path) -> None:
    """All that was counted, and the rates and times made of it."""
    figures = asdict(report)
    figures["unlimited_rate"] = report.unlimited / report.blocks
    for entry, hits in zip(figures["hits"], report.hits, strict=True):
        entry |= {"rate": hits.found / report.blocks, "belady_rate": hits.belady / report.blocks}
    cost = report.cost
    figures["cost"] |= {"match_us": cost.match_us, "insert_us": cost.insert_us, "evict_us": cost.evict_us}
    path.write_text(json.dumps(figures, indent=1) + "\n")


def write_plot(report: PrefixReport, path: Path) -> None:
    """Hit rates over pool sizes, as an image of the kind that the file's name says."""
    pyplot = load_pyplot()
    pools = sorted(report.hits, key=lambda hits: hits.pool_blocks)
    sizes = [hits.pool_blocks / report.distinct for hits in pools]
    figure, axes = pyplot.subplots(layout="constrained")
    axes.axhline(100 * report.unlimited / report.blocks, color="gray", linestyle=":", label="no limit")
    axes.plot(sizes, [100 * hits.belady / report.blocks for hits in pools], "o--", label="Belady, knows the future")
    axes.plot(sizes, [100 * hits.found / report.blocks for hits in pools], "o-", label="prefix cache")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("pool size / distinct blocks")
    axes.set_ylabel("prompt blocks found, %")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
