"""What a prompt graph computes from its order is what the host plans for the same rows; spare tokens harm nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.triton_backend import TritonBackend
from mini_sglang.execution import prefill_graph
from mini_sglang.execution.drafts import draws
from mini_sglang.execution.prefill_graph import PackedInputs, packed_inputs, prefill_graphs, prefill_sizes
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.scheduling.batch import Row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, CONTEXT, PAGE_SIZE, MAX_ROWS = 6, 24, 4, 4
PAGES_PER_SLOT = CONTEXT // PAGE_SIZE
IDLE_PAGE = SLOTS * PAGES_PER_SLOT
HEADS, HEAD_DIM = 2, 16
MAX_TOKENS = MAX_ROWS * CONTEXT
MAX_SAMPLES = 3 * MAX_ROWS


def make_table() -> RequestTable:
    """Every token and every page is another number."""
    table = RequestTable(SLOTS, CONTEXT, PAGE_SIZE, DEVICE, idle_page=IDLE_PAGE)
    table.tokens.copy_(torch.arange(table.tokens.numel()).view_as(table.tokens))
    pages = torch.randperm(IDLE_PAGE, generator=torch.Generator().manual_seed(0))
    table.page_table[:SLOTS] = pages.view(SLOTS, PAGES_PER_SLOT).to(DEVICE)
    return table


@pytest.fixture(scope="module", params=["split", "deterministic", "float16"])
def backend(request: pytest.FixtureRequest) -> TritonBackend:
    """Over a pool that holds something everywhere. In float16 long contexts have other tiles than short ones."""
    dtype = torch.float16 if request.param == "float16" else torch.float32
    pool = KVPool(
        num_layers=1,
        num_pages=IDLE_PAGE + 1,
        page_size=PAGE_SIZE,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=DEVICE,
    )
    pool.layers[0].normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    return TritonBackend(
        pool, num_heads=HEADS, dtype=dtype, max_rows=MAX_ROWS, deterministic=request.param == "deterministic"
    )


@st.composite
def steps(draw: Any) -> tuple[list[Row], int]:
    """Rows of different slots, many of one token, and a size that holds them."""
    rows = []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=MAX_ROWS, unique=True)):
        start = draw(st.integers(0, CONTEXT - 1))
        count = draw(st.just(1) | st.integers(1, CONTEXT - start))
        rows.append(Row(slot, start, count, draw(st.integers(0, min(count, MAX_SAMPLES // MAX_ROWS)))))
    return rows, draw(st.integers(sum(row.count for row in rows), MAX_TOKENS))


@settings(max_examples=30, deadline=None)
@given(steps())
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_packed_inputs_mean_what_the_host_plans(
    backend: TritonBackend, long: bool, step: tuple[list[Row], int]
) -> None:
    rows, size = step
    sampling = draws(rows)
    num_tokens, spare_samples = sum(row.count for row in rows), min(size, MAX_SAMPLES) - len(sampling)
    host, device = make_table(), make_table()
    q = torch.randn(size, HEADS, HEAD_DIM, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    q = q.to(backend.pool.dtype)

    want = host.expand(rows)
    want_attended = backend.plan(want.attention).attend(q[:num_tokens], 0)
    inputs = PackedInputs(device, backend, MAX_ROWS, MAX_TOKENS, MAX_SAMPLES, long=long)
    inputs.send([Row(0, 0, CONTEXT, True)] * MAX_ROWS, MAX_TOKENS)  # what an earlier step leaves behind
    inputs.send(rows, size)
    got = inputs.of_size(size)
    forward = got.forward
    cells = forward.plan.target(0).cells

    assert torch.equal(forward.input_ids[:num_tokens], want.input_ids)
    assert torch.equal(forward.positions[:num_tokens], want.positions)
    assert torch.equal(cells[:num_tokens], want.attention.cells)
    assert forward.logits_indices is not None
    assert forward.logits_indices.tolist() == want.logits_indices.tolist() + [0] * spare_samples
    assert got.slots.tolist() == [row.slot for row in sampling] + [device.idle_slot] * spare_samples
    assert got.positions.tolist()[: len(sampling)] == [row.start + row.count for row in sampling]
    assert torch.equal(device.num_computed, host.num_computed)
    tolerance = 2e-3 if q.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(forward.plan.attend(q, 0)[:num_tokens], want_attended, atol=tolerance, rtol=tolerance)

    assert set(forward.positions[num_tokens:].tolist()) <= {0}
    assert set(cells[num_tokens:].tolist()) <= {IDLE_PAGE * PAGE_SIZE}


def test_sizes_ascend_to_the_budget_alone() -> None:
    for budget in (1, 32, 33, 700, 2048, 2049, 8192, 10_000):
        sizes = prefill_sizes(budget)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == budget


def test_a_step_is_filled_up_by_little() -> None:
    sizes = prefill_sizes(16_384)
    for tokens in range(1, 16_385):
        spare = next(size for size in sizes if size >= tokens) - tokens
        assert spare < max(32, tokens / 16)


class Sizes:
    """The graphs' sizes without graphs."""

    def __init__(self, step: Any, sizes: list[int], name: str, pool: Any, prepare: Any) -> None:
        self.sizes = sizes

    def size_for(self, count: int) -> int:
        return min(size for size in self.sizes if size >= count)


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float16, True), (torch.float32, False)])
def test_large_steps_with_long_contexts_have_graphs_of_their_own_if_other_tiles_suit_them(
    dtype: torch.dtype, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_graph, "StepGraphs", Sizes)
    pool = KVPool(
        num_layers=1, num_pages=1, page_size=16, num_kv_heads=1, head_dim=HEAD_DIM, dtype=dtype, device=DEVICE
    )
    backend = TritonBackend(pool, num_heads=HEADS, dtype=dtype, max_rows=MAX_ROWS)
    never_called: Any = None
    inputs = packed_inputs(make_table(), backend, MAX_ROWS, 8192, MAX_SAMPLES)
    short, *long = prefill_graphs(never_called, inputs, 8192, None)
    assert len(long) == apart
    whole, beside_a_decode = [Row(0, 0, 8192, True)], [Row(0, 8192, 1, True), Row(1, 1500, 8191, True)]
    beside_others = [Row(slot, 0, 1500, True) for slot in range(3)] + [Row(3, 9000, 3500, True)]
    for rows in (whole, beside_a_decode, beside_others):
        assert short.fits(rows) != apart
        assert all(graphs.fits(rows) for graphs in long)
    assert short.fits([Row(0, 0, 1500, True), Row(1, 0, 1500, True), Row(2, 0, 1500, True)])
    assert short.fits([Row(0, 8192, 2000, True)]), "a small step, of which attention is a small part"
    verified, too_many = Row(0, 90, MAX_SAMPLES, MAX_SAMPLES), Row(0, 90, MAX_SAMPLES + 1, MAX_SAMPLES + 1)
    assert short.fits([verified])
    for too_much in ([Row(0, 0, 8193, True)], [Row(slot, 0, 1, True) for slot in range(MAX_ROWS + 1)], [too_many]):
        assert not any(graphs.fits(too_much) for graphs in (short, *long))

    assert len(prefill_graphs(never_called, inputs, 2048, None)) == 1, "no step is large"
