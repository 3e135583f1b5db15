"""Paged decode attention equals its twin in float64, and a row's result depends on that row alone."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from mini_sglang.kernels.triton.paged_decode import DecodeTuning, PagedDecode, decode_tuning, paged_decode_reference
from tests.kernels.conftest import MakePagedKV, PagedKV

SMALL = DecodeTuning(max_splits=4, block_tokens=16, num_stages=2)
WHOLE_ROWS = DecodeTuning(max_splits=1, block_tokens=16, num_stages=2)
LENGTHS = [100, 1, 0, 65, 300, 16, 64]  # rows of one split and of two, one that needs longer splits, one skipped
CHUNKS = [(0, 21), (50, 1), (16, 16), (3, 5), (40, 9)]  # (first position, tokens) of each row
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_queries(rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, heads, head_dim], strided like the first part of a fused product"""
    torch.manual_seed(0)
    return torch.randn(rows, heads + 2, head_dim).to(device, dtype)[:, :heads]


def decode(
    q: torch.Tensor,
    kv: PagedKV,
    lengths: list[int],
    page_size: int,
    *,
    tuning: DecodeTuning = SMALL,
    window: int | None = None,
    max_rows: int | None = None,
) -> torch.Tensor:
    """Row i's query is token i; rows that are skipped keep their NaN."""
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
    attention = PagedDecode(
        max_rows=max_rows or len(lengths),
        num_heads=q.shape[1],
        num_kv_heads=kv.keys.shape[1],
        head_dim=q.shape[2],
        page_size=page_size,
        device=q.device,
        tuning=tuning,
        window=window,
    )
    q_starts = int32(list(range(len(lengths))), q.device)
    attention.plan(int32(lengths, q.device), q_starts)
    attention.run(q, kv.keys, kv.values, kv.page_table, out)
    return out


def decode_chunks(
    q: torch.Tensor, kv: PagedKV, chunks: list[tuple[int, int]], page_size: int, *, window: int | None = None
) -> torch.Tensor:
    """The rows' tokens follow each other in q."""
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
    attention = PagedDecode(
        max_rows=len(chunks),
        num_heads=q.shape[1],
        num_kv_heads=kv.keys.shape[1],
        head_dim=q.shape[2],
        page_size=page_size,
        device=q.device,
        tuning=WHOLE_ROWS,
        window=window,
    )
    starts, counts = [start for start, _ in chunks], [count for _, count in chunks]
    firsts = [0, *itertools.accumulate(counts)][:-1]
    tiles = [
        (row << 20) + first for row, count in enumerate(counts) for first in range(0, count, attention.tile_tokens)
    ]
    rows = int32([*starts, *counts, *firsts], q.device).view(3, -1)
    attention.plan_tiles(rows[0], rows[1], rows[2], torch.tensor(tiles, device=q.device))
    attention.run(q, kv.keys, kv.values, kv.page_table, out)
    return out


def expected_chunks(
    q: torch.Tensor, kv: PagedKV, chunks: list[tuple[int, int]], page_size: int, window: int | None = None
) -> torch.Tensor:
    """What `decode_chunks` should give, in float64: every token as a row of its own"""
    rows = [(row, start + i + 1) for row, (start, count) in enumerate(chunks) for i in range(count)]
    table = kv.page_table[[row for row, _ in rows]]
    out = torch.full(q.shape, float("nan"), dtype=torch.float64, device=q.device)
    lengths, q_starts = int32([length for _, length in rows], q.device), int32(list(range(len(rows))), q.device)
    paged_decode_reference(q, kv.keys, kv.values, table, lengths, q_starts, out, page_size=page_size, window=window)
    return out


def expected(
    q: torch.Tensor, kv: PagedKV, lengths: list[int], page_size: int, window: int | None = None
) -> torch.Tensor:
    """What `decode` should give, in float64"""
    out = torch.full(q.shape, float("nan"), dtype=torch.float64, device=q.device)
    q_starts = int32(list(range(len(lengths))), q.device)
    paged_decode_reference(
        q,
        kv.keys,
        kv.values,
        kv.page_table,
        int32(lengths, q.device),
        q_starts,
        out,
        page_size=page_size,
        window=window,
    )
    return out


def assert_equal(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """By the norm of the difference; NaN must lie where NaN is wanted and nowhere else."""
    assert torch.equal(actual.isnan(), wanted.isnan())
    difference = (actual.double() - wanted).nan_to_num().norm() / wanted.nan_to_num().norm()
    assert difference < TOLERANCE[actual.dtype], f"relative error {difference:.2e}"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [
        (2, 2, 64, 1, torch.float32),
        (4, 2, 64, 16, torch.float16),
        (6, 2, 64, 64, torch.float32),
        (4, 1, 96, 16, torch.float32),
        (5, 1, 96, 1, torch.float16),
        (6, 1, 128, 16, torch.float32),
        (7, 1, 128, 64, torch.float16),
        (8, 1, 256, 16, torch.float32),
        (2, 1, 256, 1, torch.float16),
    ],
)
def test_equals_float64(
    make_paged_kv: MakePagedKV,
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    kv = make_paged_kv(LENGTHS, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    q = random_queries(len(LENGTHS), heads, head_dim, dtype, device)
    assert_equal(decode(q, kv, LENGTHS, page_size), expected(q, kv, LENGTHS, page_size))


@pytest.mark.parametrize("seed", range(4))
def test_equals_float64_at_random_lengths(make_paged_kv: MakePagedKV, device: torch.device, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(0, rng.choice([20, 200])) for _ in range(rng.randint(1, 9))] + [1]
    page_size = rng.choice([1, 3, 16, 64])
    kv = make_paged_kv(lengths, page_size=page_size, kv_heads=2, head_dim=32, dtype=torch.float32, seed=seed)
    q = random_queries(len(lengths), 6, 32, torch.float32, device)
    assert_equal(decode(q, kv, lengths, page_size), expected(q, kv, lengths, page_size))


@pytest.mark.parametrize("window", [1, 20, 64])
def test_a_window_hides_what_lies_before_it(make_paged_kv: MakePagedKV, device: torch.device, window: int) -> None:
    kv = make_paged_kv(LENGTHS, page_size=16, kv_heads=1, head_dim=64, dtype=torch.float32)
    q = random_queries(len(LENGTHS), 2, 64, torch.float32, device)
    assert_equal(decode(q, kv, LENGTHS, 16, window=window), expected(q, kv, LENGTHS, 16, window))


@pytest.mark.usefixtures("dot_by_elements")
def test_a_row_that_is_not_cut_gives_the_same_bits_alone_and_in_a_batch(
    make_paged_kv: MakePagedKV, device: torch.device
) -> None:
    kv = make_paged_kv(LENGTHS, page_size=16, kv_heads=2, head_dim=64, dtype=torch.float32)
    q = random_queries(len(LENGTHS), 4, 64, torch.float32, device)
    together = decode(q, kv, LENGTHS, 16, tuning=WHOLE_ROWS, max_rows=20)
    for row, length in enumerate(LENGTHS):
        kept = [length if other == row else 0 for other in range(len(LENGTHS))]
        alone = decode(q, kv, kept, 16, tuning=WHOLE_ROWS)
        assert torch.equal(alone[row].nan_to_num(), together[row].nan_to_num())


@pytest.mark.parametrize(
    ("lengths", "window"), [(LENGTHS, None), ([700] * 3 + [90] * 20, None), ([5000, 80, 80], None), (LENGTHS, 70)]
)
def test_rows_are_cut_evenly_and_the_longest_pieces_come_first(
    device: torch.device, lengths: list[int], window: int | None
) -> None:
    attention = PagedDecode(
        max_rows=len(lengths),
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        page_size=16,
        device=device,
        tuning=DecodeTuning(),
        window=window,
    )
    attention.plan(int32(lengths, device), int32(list(range(len(lengths))), device))
    items = attention._items[: int(attention._num_items)].tolist()
    seen = [length - max(0, (length - (window or length)) // 16 * 16) for length in lengths]
    for row, length in enumerate(lengths):
        pieces = sorted(item[2:6] for item in items if item[0] == row)
        assert [piece[2:] for piece in pieces] == [[split, len(pieces)] for split in range(len(pieces))]
        edges = [piece[0] for piece in pieces] + [length]
        assert [piece[1] for piece in pieces] == edges[1:]
        assert edges[0] == length - seen[row]
    whole = [item for item in items if item[4] < item[5] - 1]
    assert items[: len(whole)] == whole
    rests = [end - begin for _, _, begin, end, *_ in items[len(whole) :]]
    assert rests == sorted(rests, reverse=True)
    even = sum(seen) / attention._resident_programs
    longest = max(max(seen) / 32, even, 32)
    assert all(end - begin < longest + 16 for _, _, begin, end, *_ in items)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [
        (2, 2, 64, 16, torch.float32),
        (4, 2, 96, 1, torch.float16),
        (6, 2, 64, 64, torch.float32),
        (4, 1, 128, 16, torch.float16),
        (5, 1, 64, 1, torch.float32),
        (7, 1, 96, 16, torch.float32),
        (8, 1, 256, 64, torch.float16),
    ],
)
def test_chunks_equal_float64(
    make_paged_kv: MakePagedKV,
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    lengths = [start + count for start, count in CHUNKS]
    kv = make_paged_kv(lengths, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    q = random_queries(sum(count for _, count in CHUNKS), heads, head_dim, dtype, device)
    assert_equal(decode_chunks(q, kv, CHUNKS, page_size), expected_chunks(q, kv, CHUNKS, page_size))


@pytest.mark.parametrize("window", [1, 20, 64])
def test_chunks_see_a_window(make_paged_kv: MakePagedKV, device: torch.device, window: int) -> None:
    lengths = [start + count for start, count in CHUNKS]
    kv = make_paged_kv(lengths, page_size=16, kv_heads=1, head_dim=64, dtype=torch.float32)
    q = random_queries(sum(count for _, count in CHUNKS), 2, 64, torch.float32, device)
    out = decode_chunks(q, kv, CHUNKS, 16, window=window)
    assert_equal(out, expected_chunks(q, kv, CHUNKS, 16, window))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "window"),
    [
        (1, 1, 64, torch.float32, None),
        (4, 2, 64, torch.float16, None),
        (3, 1, 32, torch.float32, 20),
        (8, 1, 128, torch.float16, 20),
        (16, 1, 32, torch.float32, None),
        pytest.param(16, 8, 128, torch.bfloat16, None, marks=pytest.mark.gpu),
        pytest.param(32, 8, 128, torch.bfloat16, 40, marks=pytest.mark.gpu),
        pytest.param(8, 8, 96, torch.bfloat16, None, marks=pytest.mark.gpu),
        pytest.param(16, 2, 256, torch.bfloat16, None, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.usefixtures("dot_by_elements")
def test_a_token_has_the_same_bits_decoded_and_in_any_chunk(
    make_paged_kv: MakePagedKV,
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    """A prompt whole, cut at random with another in the same step, and token by token as decodes."""
    length, tries = (300, 10) if device.type == "cuda" else (38, 1)
    kv = make_paged_kv([length, 9], page_size=16, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    q = random_queries(length + 9, heads, head_dim, dtype, device)
    whole = decode_chunks(q[:length], kv, [(0, length)], 16, window=window)
    for seed in range(tries):
        rng = random.Random(seed)
        cuts = [0, *sorted(rng.sample(range(1, length), 4)), length]
        for start, end in itertools.pairwise(cuts):
            beside = rng.randint(1, 9)
            step = torch.cat((q[start:end], q[length : length + beside]))
            out = decode_chunks(step, kv, [(start, end - start), (0, beside)], 16, window=window)
            assert torch.equal(out[: end - start], whole[start:end])
    for position in range(0, length, 1 if device.type == "cuda" else 3):
        one = q[position : position + 1]
        planned_on_device = decode(one, kv, [position + 1], 16, tuning=WHOLE_ROWS, window=window)
        assert torch.equal(planned_on_device[0], whole[position])
        assert torch.equal(decode_chunks(one, kv, [(position, 1)], 16, window=window)[0], whole[position])


def test_runs_follow_each_other_on_one_plan(make_paged_kv: MakePagedKV, device: torch.device) -> None:
    """As the layers of a step run: each leaves the workspace as it found it."""
    lengths = [100, 40]
    attention = PagedDecode(
        max_rows=2, num_heads=2, num_kv_heads=1, head_dim=64, page_size=16, device=device, tuning=SMALL
    )
    on_device, q_starts = int32(lengths, device), int32([1, 0], device)
    attention.plan(on_device, q_starts)
    for seed in range(3):
        kv = make_paged_kv(lengths, page_size=16, kv_heads=1, head_dim=64, dtype=torch.float32, seed=seed)
        q = random_queries(2, 2, 64, torch.float32, device)
        out, wanted = torch.empty_like(q, dtype=torch.float32).contiguous(), torch.empty(2, 2, 64).double().to(device)
        attention.run(q, kv.keys, kv.values, kv.page_table, out)
        paged_decode_reference(q, kv.keys, kv.values, kv.page_table, on_device, q_starts, wanted, page_size=16)
        assert_equal(out, wanted)


def test_unsupported_sizes_are_refused(device: torch.device) -> None:
    def workspace(num_heads: int, num_kv_heads: int, head_dim: int) -> PagedDecode:
        return PagedDecode(
            max_rows=1,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=1,
            device=device,
            tuning=SMALL,
        )

    with pytest.raises(ValueError, match="head_dim must be"):
        workspace(2, 1, 40)
    with pytest.raises(ValueError, match="must be 1 to 16 times num_kv_heads, got 5 and 2"):
        workspace(5, 2, 64)
    with pytest.raises(ValueError, match="power of two"):
        DecodeTuning(block_tokens=48)
    one, two = int32([1], device), int32([1, 1], device)
    with pytest.raises(ValueError, match="2 rows exceed"):
        workspace(2, 1, 64).plan(two, two)
    with pytest.raises(ValueError, match="max_splits 1, got 4"):
        workspace(2, 1, 64).plan_tiles(one, one, one, one)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (9, 3, 64), (8, 8, 96), (16, 2, 256)]
)
def test_large_batches_equal_float64(
    make_paged_kv: MakePagedKV,
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    rng = random.Random(0)
    lengths = [rng.randint(0, 2000) for _ in range(40)] + [9000]
    kv = make_paged_kv(lengths, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    q = random_queries(len(lengths), heads, head_dim, dtype, device)
    wanted = expected(q, kv, lengths, page_size)
    tuning = decode_tuning(head_dim, dtype)
    first = decode(q, kv, lengths, page_size, tuning=tuning)
    assert_equal(first, wanted)
    for _ in range(5):  # whoever merges the splits, the bits are the same
        again = decode(q, kv, lengths, page_size, tuning=tuning)
        assert torch.equal(again.nan_to_num(), first.nan_to_num())


@pytest.mark.gpu
def test_a_captured_step_follows_the_lengths(make_paged_kv: MakePagedKV, device: torch.device) -> None:
    """One graph serves every step: lengths are read when it runs."""
    kv = make_paged_kv([3000] * 8, page_size=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    q = random_queries(8, 16, 128, torch.bfloat16, device)
    attention = PagedDecode(
        max_rows=8,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        page_size=16,
        device=device,
        tuning=decode_tuning(128, torch.bfloat16),
    )
    lengths, q_starts = int32([1] * 8, device), int32(list(range(8)), device)
    out = torch.empty(q.shape, dtype=q.dtype, device=device)

    def step() -> None:
        attention.plan(lengths, q_starts)
        attention.run(q, kv.keys, kv.values, kv.page_table, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for current in ([1, 2, 3, 400, 5, 3000, 256, 257], [3000] * 8, [10, 0, 10, 0, 999, 10, 0, 2]):
        lengths.copy_(int32(current, device))
        out.fill_(float("nan"))
        graph.replay()
        assert_equal(out, expected(q, kv, current, 16))
