"""Checks of L3: the metadata by hand, the reference against attention written out, the kernel in the interpreter."""

from __future__ import annotations

import math
import os
from types import ModuleType

import torch

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.execution.request_table import RequestTable, sampled_from, spread
from mini_sglang.learn.checking import expect, expect_close, guards
from mini_sglang.scheduling.batch import Row

CPU = torch.device("cpu")
Rows = list[tuple[int, int]]  # (start, count) of each row

# -- metadata -------------------------------------------------------------------------------------------------------


@guards("page-id-as-cell")
def test_a_cell_is_a_page_and_an_offset() -> None:
    table = RequestTable(3, context_length=16, page_size=4, device=CPU, idle_page=9)
    table.page_table[1, :2] = torch.tensor([2, 5])
    table.page_table[2, :2] = torch.tensor([0, 3])
    expect(
        table.cells(torch.tensor([1, 1, 2]), torch.tensor([3, 5, 4])).tolist(),
        [11, 21, 12],
        "cells of positions 3 and 5 of the slot with pages 2, 5, and of position 4 of the one with pages 0, 3",
        invariant="cell = page id * page_size + offset, here with pages of 4",
        read="L3: The metadata",
    )


@guards("positions-from-zero", "inclusive-sum")
def test_a_step_is_spread_over_its_tokens() -> None:
    slots, positions = spread(torch.tensor([1, 0, 2]), torch.tensor([5, 0, 4]), torch.tensor([1, 3, 2]), 6)
    what = "of the 6 tokens of three rows: slot 1 from 5 on (1 token), slot 0 from 0 (3), slot 2 from 4 (2)"
    expect(slots.tolist(), [1, 0, 0, 0, 2, 2], f"slots {what}", read="L3: The metadata")
    expect(
        positions.tolist(),
        [5, 0, 1, 2, 4, 5],
        f"positions {what}",
        invariant="position = start of the row + place within the row",
        read="L3: The metadata",
    )


@guards("one-behind-the-last")
def test_logits_are_those_of_the_last_token_of_each_row() -> None:
    rows = [Row(1, 5, 1, True), Row(0, 0, 3, True), Row(2, 4, 2, True)]
    expect(
        sampled_from(rows),
        [0, 3, 5],
        "last tokens of rows of 1, 3 and 2 tokens",
        invariant="a token's logits say what comes after it",
        read="L3: The metadata",
    )


@guards("silent-rows-not-counted")
def test_a_row_in_the_middle_of_its_prompt_counts_and_is_silent() -> None:
    rows = [Row(1, 5, 1, True), Row(0, 0, 3, False), Row(2, 4, 2, True)]
    expect(
        sampled_from(rows),
        [0, 5],
        "last tokens of the rows that sample, of rows of 1, 3 (silent) and 2 tokens",
        read="L3: The metadata",
    )


# -- reference ------------------------------------------------------------------------------------------------------


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Attention of the last len(q) of len(k) positions, head by head and token by token. q [count, heads, head_dim]"""
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
    for index in range(len(q)):
        last = len(k) - len(q) + index
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(q.shape[1]):
            keys, values = k[first : last + 1, head // group], v[first : last + 1, head // group]
            out[index, head] = (keys @ q[index, head] / math.sqrt(q.shape[2])).softmax(0) @ values
    return out


def expect_attention(rows: Rows, what: str, invariant: str, *, kv_heads: int = 2, window: int | None = None) -> None:
    """Compare the reference over scattered pages of 4, full of other numbers, with attention written out."""
    generator = torch.Generator().manual_seed(0)
    heads, head_dim, page_size = 6, 8, 4
    pages = [-(-(start + count) // page_size) for start, count in rows]
    pool = KVPool(
        num_layers=1,
        num_pages=sum(pages) + 2,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    pool.layers[0].normal_(0, 3, generator=generator)  # what earlier owners left
    ids = torch.randperm(sum(pages) + 2, generator=generator).tolist()
    table = torch.zeros(len(rows), max(pages), dtype=torch.int64)
    q, expected, cells = [], [], []
    for row, (start, count) in enumerate(rows):
        table[row, : pages[row]] = torch.tensor([ids.pop() for _ in range(pages[row])])
        positions = torch.arange(start + count)
        own = table[row, positions // page_size] * page_size + positions % page_size
        k, v = torch.randn(2, start + count, kv_heads, head_dim, generator=generator)
        pool.key_cells[0][own], pool.value_cells[0][own] = k, v
        q.append(torch.randn(count, heads, head_dim, generator=generator))
        expected.append(written_out(q[-1], k, v, window))
        cells.append(own[start:])
    starts, counts = [start for start, _ in rows], [count for _, count in rows]
    plan = ReferenceBackend(pool, torch.float32, window).plan(
        AttentionMetadata(starts, counts, table, torch.cat(cells))
    )
    got = plan.attend(torch.cat(q), 0)
    expect_close(
        got,
        torch.cat(expected),
        f"attention of {what} [token, head, dim]",
        invariant=invariant,
        read="L3: The reference",
    )


@guards("heads-dealt-round")
def test_neighbouring_query_heads_share_a_kv_head() -> None:
    expect_attention([(0, 7)], "a prompt of 7, 6 query heads and 2 KV heads", "query head h attends to KV head h // 3")


@guards("causal-from-the-top-left")
def test_a_chunk_sees_the_prefix_before_it() -> None:
    expect_attention([(5, 4)], "a chunk of 4 behind a prefix of 5", "the token at position p sees positions 0 to p")


@guards("padding-attended", "one-position-too-far")
def test_decodes_of_different_lengths_are_one_product() -> None:
    expect_attention(
        [(10, 1), (0, 1), (5, 1)],
        "decodes that see 11, 1 and 6 tokens",
        "a row sees its own start + 1 positions; what is gathered behind them is somebody else's",
    )


@guards("window-of-one-more")
def test_a_window_counts_the_token_itself() -> None:
    expect_attention(
        [(9, 1), (6, 5)],
        "a decode and a chunk with a window of 3",
        "the token at p sees positions p - 2 to p",
        window=3,
    )


def test_a_mixed_step() -> None:
    expect_attention([(20, 5), (3, 1), (0, 9), (16, 1)], "chunks and decodes in one step", "rows do not see each other")
    expect_attention([(4, 3), (2, 1)], "rows with one KV head for six queries", "all heads share it", kv_heads=1)


# -- kernel ---------------------------------------------------------------------------------------------------------


def kernels() -> ModuleType:
    """Triton decides when it is imported whether it compiles or interprets: so it is imported here."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    from mini_sglang.kernels.triton import paged_prefill

    return paged_prefill


class Prompts:
    """Rows over random pages for the kernel, whose tiles are 8 tokens of 2 heads by 16 positions."""

    def __init__(self, rows: Rows, *, page_size: int = 16, head_dim: int = 16, window: int | None = None) -> None:
        self.module, self.page_size, self.window = kernels(), page_size, window
        self.tuning = self.module.PrefillTuning(block_queries=16, block_tokens=16, num_warps=4, num_stages=2)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        generator = torch.Generator().manual_seed(0)
        lengths = [start + count for start, count in rows]
        pages = [-(-length // page_size) for length in lengths]
        shape = ((sum(pages) + 1) * page_size, 1, head_dim)
        self.keys = torch.randn(shape, generator=generator).to(device)
        self.values = torch.randn(shape, generator=generator).to(device)
        ids = torch.randperm(sum(pages) + 1, generator=generator)
        table = torch.zeros(len(rows), max(pages), dtype=torch.int64)
        for row, parts in enumerate(ids[: sum(pages)].split(pages)):
            table[row, : len(parts)] = parts
        self.table = table.to(device)
        counts = torch.tensor([count for _, count in rows], dtype=torch.int32)
        self.starts = torch.tensor([start for start, _ in rows], dtype=torch.int32, device=device)
        self.counts, self.tokens = counts.to(device), (counts.cumsum(0) - counts).int().to(device)
        self.q = torch.randn(int(counts.sum()), 2, head_dim, generator=generator).to(device)
        tiles = self.module.prefill_tiles(self.starts.tolist(), counts.tolist(), 2, self.tuning)
        self.tiles = torch.tensor(tiles, device=device)
        self.own = [self.cells(row, length) for row, length in enumerate(lengths)]

    def cells(self, row: int, length: int) -> torch.Tensor:
        positions = torch.arange(length, device=self.table.device)
        return self.table[row, positions // self.page_size] * self.page_size + positions % self.page_size

    def attended(self, *, by_twin: bool = False) -> torch.Tensor:
        out = torch.zeros_like(self.q)
        operands = [self.q, self.keys, self.values, self.table, self.starts, self.counts, self.tokens]
        if by_twin:
            self.module.paged_prefill_reference(*operands, out, page_size=self.page_size, window=self.window)
            return out
        try:
            self.module.paged_prefill(
                *operands, self.tiles, out, page_size=self.page_size, tuning=self.tuning, window=self.window
            )
        except Exception as error:
            while error.__cause__ is not None:  # the interpreter wraps what a kernel raises, once per function
                error = error.__cause__  # type: ignore[assignment]
            raise error from None
        return out

    def expect_equal(self, what: str, invariant: str) -> None:
        expect_close(
            self.attended().cpu(),
            self.attended(by_twin=True).cpu(),
            f"the kernel's attention of {what} [token, head, dim]",
            tolerance=1e-4,
            invariant=invariant,
            read="L3: The kernel",
        )


@guards("natural-exponential")
def test_the_kernel_on_one_block() -> None:
    Prompts([(15, 1)]).expect_equal(
        "one token that sees 16 positions, all in one block",
        "scale_log2 = log2(e) / sqrt(head_dim), so that 2^(scores * scale_log2) is e^(scores / sqrt(head_dim))",
    )


@guards("sums-not-rescaled")
def test_the_kernel_carries_its_softmax_from_block_to_block() -> None:
    prompts = Prompts([(63, 1)])
    rising = torch.linspace(0.2, 3, 64, device=prompts.q.device)
    prompts.keys[prompts.own[0], 0] = rising[:, None] * prompts.q[0, 0]  # later blocks have higher scores
    prompts.expect_equal(
        "one token whose scores rise over four blocks",
        "when the highest score grows by d, sums so far shrink by 2^-d",
    )


@guards("hidden-by-zero")
def test_the_kernel_does_not_look_ahead() -> None:
    prompts = Prompts([(16, 5)])
    before = prompts.attended()
    later = prompts.own[0][18:]
    prompts.keys[later] += 1
    prompts.values[later] += 1
    expect_close(
        prompts.attended()[:2].cpu(),
        before[:2].cpu(),
        "tokens at 16 and 17, after keys and values at 18 to 20 have changed [token, head, dim]",
        invariant="exp(-inf) is 0; exp(0) is 1",
        read="L3: The kernel",
    )


@guards("own-token-hidden")
def test_tokens_see_themselves_in_the_kernel() -> None:
    Prompts([(16, 5)]).expect_equal("a chunk of 5 behind a prefix of 16", "positions 0 to p, p included")


@guards("zero-times-nan")
def test_the_kernel_reads_no_cell_behind_the_end() -> None:
    prompts = Prompts([(16, 5)])
    foreign = torch.ones(len(prompts.keys), dtype=torch.bool, device=prompts.keys.device)
    foreign[prompts.own[0]] = False
    prompts.keys[foreign] = prompts.values[foreign] = float("nan")
    expect(
        bool(prompts.attended().isnan().any()),
        False,
        "whether anything becomes NaN if all cells that are not the row's own hold NaN",
        invariant="0 * NaN is NaN: what must not count must not be loaded",
        read="L3: The kernel",
    )


def test_the_kernel_on_ragged_rows() -> None:
    rows = [(0, 9), (40, 3), (16, 16), (5, 2)]
    Prompts(rows).expect_equal("four rows in one launch", "a tile belongs to one row")
    Prompts(rows, page_size=3, head_dim=32).expect_equal("pages of 3 tokens", "a block may span several pages")
    Prompts(rows, window=7).expect_equal("rows with a window of 7", "positions p - 6 to p")
