"""L3 in the terminal: a step's metadata, its pages, and the softmax that a kernel carries from block to block."""

from __future__ import annotations

import math

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.scheduling.batch import Row

COLOURS = ["bright_blue", "dark_orange3", "green4"]
PAGES = {0: [7], 1: [2, 5], 2: [0, 3]}  # of each slot
ROWS = [Row(1, 5, 1, True), Row(0, 0, 3, True), Row(2, 4, 2, True)]
PAGE_SIZE, NUM_PAGES = 4, 8


def main() -> None:
    console = Console()
    torch.manual_seed(0)
    table = RequestTable(3, context_length=16, page_size=PAGE_SIZE, device=torch.device("cpu"), idle_page=NUM_PAGES)
    for slot, pages in PAGES.items():
        table.page_table[slot, : len(pages)] = torch.tensor(pages)
        table.tokens[slot] = torch.arange(100 * (slot + 1), 100 * (slot + 1) + 17)
    inputs = table.expand(ROWS)
    show_metadata(console, inputs.positions, inputs.attention.cells, inputs.input_ids, inputs.logits_indices)
    show_pool(console)
    show_attention(console, inputs.attention)
    show_softmax(console)


def show_metadata(
    console: Console, positions: torch.Tensor, cells: torch.Tensor, ids: torch.Tensor, last: torch.Tensor
) -> None:
    rows = [index for index, row in enumerate(ROWS) for _ in range(row.count)]
    table = Table(title="1. Three rows become six tokens: RequestTable.expand", show_lines=False)
    table.add_column("token of the step")
    for token, row in enumerate(rows):
        table.add_column(str(token), style=COLOURS[row], justify="right")
    table.add_row("slot", *(str(ROWS[row].slot) for row in rows))
    table.add_row("position", *map(str, positions.tolist()))
    table.add_row("token id", *map(str, ids.tolist()))
    table.add_row("cell", *map(str, cells.tolist()))
    table.add_row("logits wanted", *("✓" if token in last.tolist() else "" for token in range(len(rows))))
    console.print(table)


def show_pool(console: Console) -> None:
    """Which row's positions lie in which page."""
    line = Text("\n   pool ")
    for page in range(NUM_PAGES):
        row = next((index for index, row in enumerate(ROWS) if page in PAGES[row.slot]), None)
        if row is None:
            line.append(" ·  ·  ·  · ", "grey50")
        else:
            first = PAGES[ROWS[row].slot].index(page) * PAGE_SIZE
            length = ROWS[row].start + ROWS[row].count
            for position in range(first, first + PAGE_SIZE):
                text = f"{position:2} " if position < length else " · "
                line.append(text, f"white on {COLOURS[row]}" if position < length else "grey50")
        line.append(" ")
    console.print(line)


def show_attention(console: Console, metadata: AttentionMetadata) -> None:
    """The reference over these pages, for one layer of random keys and values: how much each token looks where."""
    pool = KVPool(
        num_layers=1,
        num_pages=NUM_PAGES + 1,
        page_size=PAGE_SIZE,
        num_kv_heads=1,
        head_dim=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool.key_cells[0].normal_()
    for page in range(NUM_PAGES):  # the value of a cell is a 1 at its own place in its request: out shows the weights
        slot = next((slot for slot, pages in PAGES.items() if page in pages), None)
        for offset in range(PAGE_SIZE if slot is not None else 0):
            position = PAGES[slot].index(page) * PAGE_SIZE + offset if slot is not None else 0
            pool.value_cells[0][page * PAGE_SIZE + offset, 0, position] = 1
    plan = ReferenceBackend(pool, torch.float32).plan(metadata)
    weights = plan.attend(torch.randn(6, 1, 16), 0)[:, 0]
    table = Table(
        title="\n2. The reference attends: weight of each position (values are one-hot, so out is the weights)"
    )
    table.add_column("token")
    for position in range(8):
        table.add_column(f"p {position}", justify="right")
    rows = [(row, row_index, offset) for row_index, row in enumerate(ROWS) for offset in range(row.count)]
    for (row, index, offset), weight in zip(rows, weights, strict=True):
        shown = [f"{value:.2f}" if value else "·" for value in weight[:8].tolist()]
        table.add_row(f"slot {row.slot}, position {row.start + offset}", *shown, style=COLOURS[index])
    console.print(table)


def show_softmax(console: Console) -> None:
    """One query over four blocks of four scores, as the kernel does it, and at once."""
    scores, values = torch.randn(16) * 3, torch.randn(16)
    table = Table(
        "block", "scores", "highest", "decay of the sums", "sum of weights", "acc / sum", title="\n3. Online softmax"
    )
    highest, total, acc = -math.inf, 0.0, 0.0
    for block in range(4):
        mine, theirs = scores[4 * block :][:4], values[4 * block :][:4]
        new = max(highest, float(mine.max()))
        decay = math.exp(highest - new)
        weights = (mine - new).exp()
        total, acc, highest = total * decay + float(weights.sum()), acc * decay + float(weights @ theirs), new
        shown = " ".join(f"{score:5.2f}" for score in mine.tolist())
        table.add_row(str(block), shown, f"{new:.2f}", f"{decay:.3f}", f"{total:.3f}", f"{acc / total:.5f}")
    table.add_row("all at once", "", "", "", "", f"{float(scores.softmax(0) @ values):.5f}", style="bold")
    console.print(table)


if __name__ == "__main__":
    main()
