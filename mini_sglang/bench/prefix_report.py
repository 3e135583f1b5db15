"""What `bench prefix` measured, as tables, JSON and a plot. Knows figures alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from mini_sglang.bench.output import load_pyplot, table
from mini_sglang.bench.prefix import HostCost, PrefixReport


def hits_table(report: PrefixReport) -> Table:
    columns = ("pool / distinct", "blocks", "found", "Belady finds", "of Belady", "of no limit")
    made = table("Prompt blocks found in the prefix cache", *columns, names=False)
    for hits in report.hits:
        made.add_row(
            f"{hits.pool_blocks / report.distinct:.3g}",
            f"{hits.pool_blocks:,}",
            f"{hits.found / report.blocks:.2%}",
            f"{hits.belady / report.blocks:.2%}",
            _share(hits.found, hits.belady),
            _share(hits.found, report.unlimited),
        )
    made.caption = (
        f"{report.requests:,} prompts of {report.blocks:,} blocks ({report.block_size} tokens each), "
        f"{report.distinct:,} of them distinct; without a limit {report.unlimited / report.blocks:.2%} are found"
    )
    return made


def cost_table(cost: HostCost) -> Table:
    what = f"{cost.cached_tokens:,} tokens cached, pages of {cost.page_size}"
    made = table("CPU time of the prefix cache", what, "µs")
    made.add_row("match 100 prompt tokens", f"{cost.match_us:.2f}")
    made.add_row("insert 100 prompt tokens", f"{cost.insert_us:.2f}")
    made.add_row("both", f"{cost.match_us + cost.insert_us:.2f}", end_section=True)
    made.add_row("evict one page", "none evicted" if cost.evict_us is None else f"{cost.evict_us:.2f}")
    made.caption = f"over {cost.prompt_tokens:,} prompt tokens and {cost.evicted_pages:,} evicted pages"
    return made


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def figures(report: PrefixReport) -> dict[str, Any]:
    """All that was counted, and the rates and times made of it."""
    found = asdict(report)
    found["unlimited_rate"] = report.unlimited / report.blocks
    for entry, hits in zip(found["hits"], report.hits, strict=True):
        entry |= {"rate": hits.found / report.blocks, "belady_rate": hits.belady / report.blocks}
    cost = report.cost
    found["cost"] |= {"match_us": cost.match_us, "insert_us": cost.insert_us, "evict_us": cost.evict_us}
    return found


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
