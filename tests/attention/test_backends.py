"""Every attention backend computes what attention written out in float64 does, over any page table and mix of rows.

Without a GPU the Triton backend runs in Triton's interpreter. Optional packages are tested where they are installed.
"""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass

import pytest
import torch

from mini_sglang.attention.base import AttentionMetadata, AttentionPlan, DecodeGraphBackend
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferencePlan
from mini_sglang.attention.select import Backends, make_backends

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP8 = torch.float8_e4m3fn
TOLERANCE = {FP64: 1e-12, FP32: 2e-6, FP16: 2e-3, BF16: 1e-2}
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER = 1  # of two


@dataclass(frozen=True)
class Subject:
    """What is tested: an `attention_backend` in some dtypes, and the shapes that it takes."""

    names: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: str = "cpu"
    head_dims: tuple[int, ...] = (16, 64, 32)
    page_sizes: tuple[int, ...] = (1, 3, 16)


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def on_gpu(
    names: str,
    kv_dtype: torch.dtype = BF16,
    *,
    package: str | None = None,
    head_dims: tuple[int, ...] = (64, 128, 256),
    page_sizes: tuple[int, ...] = (1, 3, 16),
) -> object:
    marks = [pytest.mark.gpu]
    if package is not None and not installed(package):
        marks.append(pytest.mark.skip(reason=f"{package} is not installed"))
    return pytest.param(Subject(names, BF16, kv_dtype, "cuda", head_dims, page_sizes), marks=marks)


def on_flashinfer(names: str, kv_dtype: torch.dtype = BF16) -> object:
    return on_gpu(names, kv_dtype, package="flashinfer", head_dims=(128,))  # it compiles each head_dim on first use


SUBJECTS = [
    Subject("reference", FP64, FP64),
    Subject("reference", FP32, FP32),
    Subject("reference", FP32, FP8),
    Subject("cpu", FP32, FP32),
    Subject("cpu", BF16, BF16),
    Subject("triton", FP32, FP32, TRITON_DEVICE),
    Subject("triton", FP16, FP16, TRITON_DEVICE),
    Subject("triton", FP32, FP8, TRITON_DEVICE),
    Subject("triton", FP16, FP8, TRITON_DEVICE),
    on_gpu("triton"),
    on_gpu("triton", FP8),
    on_flashinfer("flashinfer"),
    on_flashinfer("flashinfer", FP8),
    on_flashinfer("triton,flashinfer"),
    on_flashinfer("flashinfer,triton"),
    on_gpu("flash_attn", package="flash_attn_interface"),
    on_gpu("flash_attn", package="flash_attn", page_sizes=(256,)),
]
ROWS = {
    "first token": [(0, 1)],
    "decodes": [(5, 1), (0, 1), (37, 1)],
    "prompt": [(0, 7)],
    "mixed": [(20, 5), (3, 1), (0, 33), (16, 1)],
    "chunk of two": [(2, 1), (1, 2)],
}


def subject_id(value: object) -> str | None:
    if not isinstance(value, Subject):
        return None
    return "-".join([value.names, *(str(dtype).removeprefix("torch.") for dtype in (value.dtype, value.kv_dtype))])


class Steps:
    """Rows of tokens whose keys and values lie in a pool, behind a random page table; `attend` computes the next step.

    What the pool should hold is kept beside it, rounded to the pool's dtype, so that the truth does not depend on it.
    """

    def __init__(
        self,
        subject: Subject,
        rows: list[tuple[int, int]],
        *,
        page_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int | None = None,
        full_layers: frozenset[int] = frozenset(),
        sinks: bool = False,
    ) -> None:
        """`rows` are (start, count) of the first step; there is room for one token more in each."""
        self.subject, self.heads, self.page_size = subject, heads, page_size
        self.window = None if LAYER in full_layers else window
        self.sinks = torch.randn(heads) * 2 if sinks else None
        self.device = torch.device(subject.device)
        lengths = [start + count + 1 for start, count in rows]
        pages = [-(-length // page_size) for length in lengths]
        self.pool = KVPool(
            num_layers=2,
            num_pages=sum(pages) + 3,
            page_size=page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=subject.kv_dtype,
            device=self.device,
        )
        for layer in self.pool.layers:
            layer.copy_(torch.randn(layer.shape))  # what a page held before must not matter
        ids = random.Random(1).sample(range(sum(pages) + 3), sum(pages))
        self.table = torch.zeros(len(rows), max(pages), dtype=torch.int64)
        for row, count in enumerate(pages):
            self.table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
        self.kv = [torch.randn(2, length, kv_heads, head_dim).to(subject.dtype) for length in lengths]
        self.backends: Backends = make_backends(
            subject.names,
            self.pool,
            num_heads=heads,
            dtype=subject.dtype,
            max_rows=len(rows),
            window=window,
            full_layers=full_layers,
            sinks=sinks,
        )
        for row, (start, _) in enumerate(rows):
            prefix = self.kv[row][:, :start].to(self.device)
            self.pool.cells(LAYER, self.cells([(0, start)], first_row=row)).store(prefix[0], prefix[1])

    def cells(self, rows: list[tuple[int, int]], first_row: int = 0) -> torch.Tensor:
        cells = []
        for row, (start, count) in enumerate(rows, first_row):
            positions = torch.arange(start, start + count)
            cells.append(self.table[row, positions // self.page_size] * self.page_size + positions % self.page_size)
        return torch.cat(cells).to(self.device)

    def plan(self, rows: list[tuple[int, int]]) -> AttentionPlan:
        starts, counts = [start for start, _ in rows], [count for _, count in rows]
        backend = self.backends.decode if max(counts) == 1 else self.backends.prefill
        return backend.plan(AttentionMetadata(starts, counts, self.table.to(self.device), self.cells(rows)))

    def attend(self, rows: list[tuple[int, int]], plan: AttentionPlan) -> None:
        """Store the rows' new keys and values, attend from random queries, and compare with the truth."""
        new = torch.cat([self.kv[row][:, start : start + count] for row, (start, count) in enumerate(rows)], 1)
        q = torch.randn(new.shape[1], self.heads, new.shape[3]).to(self.subject.dtype)
        plan.target(LAYER).store(*new.to(self.device).unbind())
        out = plan.attend(q.to(self.device), LAYER, None if self.sinks is None else self.sinks.to(self.device))
        assert out.dtype == self.subject.dtype
        first, expected = 0, []
        for row, (start, count) in enumerate(rows):
            k, v = self.kv[row][:, : start + count].to(self.subject.kv_dtype).double().unbind()
            expected.append(exact_attention(q[first : first + count].double(), k, v, self.window, self.sinks))
            first += count
        wanted = torch.cat(expected)
        difference = (out.cpu().double() - wanted).norm() / wanted.norm()
        assert difference < TOLERANCE[self.subject.dtype], f"relative error {difference:.2e}"


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """q [count, heads, d] of the last `count` positions; k, v [length, kv_heads, d] -> like q; all float64"""
    group, hidden_from = q.shape[1] // k.shape[1], len(k) - len(q)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,nhd->htn", q, k) / q.shape[2] ** 0.5
    behind = torch.arange(hidden_from, len(k)).unsqueeze(1) - torch.arange(len(k))
    hidden = (behind < 0) | (behind >= (window or len(k)))
    weights = scores.masked_fill(hidden, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += sinks.double().exp().view(-1, 1, 1)
    return torch.einsum("htn,nhd->thd", weights / total, v)


@pytest.mark.parametrize("subject", SUBJECTS, ids=subject_id)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_step_and_the_decodes_after_it_equal_float64(
    subject: Subject, heads: int, kv_heads: int, rows: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    which = [4, 2, 1].index(kv_heads)
    steps = Steps(
        subject,
        rows,
        page_size=subject.page_sizes[which % len(subject.page_sizes)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=subject.head_dims[which % len(subject.head_dims)],
    )
    decodes = [(start + count, 1) for start, count in rows]
    for step in (rows, decodes):
        steps.attend(step, steps.plan(step))


@pytest.mark.parametrize("subject", SUBJECTS, ids=subject_id)
@pytest.mark.parametrize("window", [1, 4, 17, 100])
def test_a_window_hides_what_lies_before_it(subject: Subject, window: int) -> None:
    if not {"reference", "cpu", "triton"}.issuperset(subject.names.split(",")):
        pytest.skip(f"{subject.names} keeps to no window, and refuses it")
    torch.manual_seed(0)
    rows = ROWS["mixed"]
    page_size, head_dim = subject.page_sizes[window % len(subject.page_sizes)], subject.head_dims[0]
    steps = Steps(subject, rows, page_size=page_size, heads=6, kv_heads=2, head_dim=head_dim, window=window)
    for step in (rows, [(start + count, 1) for start, count in rows]):
        steps.attend(step, steps.plan(step))


@pytest.mark.parametrize("subject", SUBJECTS, ids=subject_id)
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("rows", ["mixed", "prompt", "decodes"])
def test_sinks_take_their_share(subject: Subject, window: int | None, rows: str) -> None:
    if not {"reference", "cpu", "triton"}.issuperset(subject.names.split(",")):
        pytest.skip(f"{subject.names} has no sinks, and refuses them")
    torch.manual_seed(0)
    page_size, head_dim = subject.page_sizes[-1], subject.head_dims[0]
    steps = Steps(
        subject, ROWS[rows], page_size=page_size, heads=6, kv_heads=2, head_dim=head_dim, window=window, sinks=True
    )
    for step in (ROWS[rows], [(start + count, 1) for start, count in ROWS[rows]]):
        steps.attend(step, steps.plan(step))


@pytest.mark.parametrize("subject", SUBJECTS, ids=subject_id)
@pytest.mark.parametrize("full_layers", [{LAYER}, {LAYER + 1}], ids=["its own", "another"])
def test_some_layers_may_see_all_positions_beside_a_window(subject: Subject, full_layers: set[int]) -> None:
    if not {"reference", "cpu", "triton"}.issuperset(subject.names.split(",")):
        pytest.skip(f"{subject.names} keeps to no window, and refuses it")
    torch.manual_seed(0)
    rows = ROWS["mixed"]
    page_size, head_dim, full = subject.page_sizes[0], subject.head_dims[0], frozenset(full_layers)
    steps = Steps(
        subject, rows, page_size=page_size, heads=6, kv_heads=2, head_dim=head_dim, window=4, full_layers=full
    )
    decodes = [(start + count, 1) for start, count in rows]
    for step in (rows, decodes):
        steps.attend(step, steps.plan(step))
    backend = steps.backends.decode
    if isinstance(backend, DecodeGraphBackend):
        lengths = torch.tensor([start + 1 for start, _ in decodes], dtype=torch.int32, device=steps.device)
        steps.attend(decodes, backend.plan_decode(steps.table.to(steps.device), steps.cells(decodes), lengths))


@pytest.mark.parametrize("subject", SUBJECTS, ids=subject_id)
@pytest.mark.parametrize("seed", range(3))
def test_random_steps_equal_float64(subject: Subject, seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    longest = 2000 if subject.device == "cuda" and torch.cuda.is_available() else 80
    rows = [
        (rng.choice([0, rng.randint(1, longest)]), rng.choice([1, rng.randint(2, longest // 2)]))
        for _ in range(rng.randint(2, 6))
    ]
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 5, 8])
    steps = Steps(
        subject,
        rows,
        page_size=rng.choice(subject.page_sizes),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=rng.choice(subject.head_dims),
    )
    steps.attend(rows, steps.plan(rows))


@pytest.mark.parametrize("subject", SUBJECTS, ids=subject_id)
def test_decodes_planned_on_the_device_equal_float64(subject: Subject) -> None:
    """These are the plans that CUDA graphs capture."""
    torch.manual_seed(0)
    rows = ROWS["decodes"]
    page_size, head_dim = subject.page_sizes[-1], subject.head_dims[-1]
    steps = Steps(subject, rows, page_size=page_size, heads=4, kv_heads=2, head_dim=head_dim)
    backend = steps.backends.decode
    if not isinstance(backend, DecodeGraphBackend):
        pytest.skip(f"{subject.names} plans on the host")
    lengths = torch.tensor([start + 1 for start, _ in rows], dtype=torch.int32, device=steps.device)
    steps.attend(rows, backend.plan_decode(steps.table.to(steps.device), steps.cells(rows), lengths))


def test_steps_with_a_chunk_go_to_the_first_backend_and_decodes_to_the_second() -> None:
    steps = Steps(Subject("reference,triton", FP32, FP32), ROWS["mixed"], page_size=3, heads=4, kv_heads=2, head_dim=16)
    assert isinstance(steps.plan(ROWS["mixed"]), ReferencePlan)
    assert not isinstance(steps.plan([(start, 1) for start, _ in ROWS["mixed"]]), ReferencePlan)
