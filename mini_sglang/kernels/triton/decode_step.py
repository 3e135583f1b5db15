"""The kernels that a decode step begins and ends with. Such a step computes one token per row, from a list of slots.

`update_page_table` applies the pages that the host has added, `decode_inputs` looks up the step's inputs in one launch,
and `write_tokens` copies the sampled tokens to the host's memory. None of them depends on the host, so all can be
captured in a CUDA graph. Each stands beside its PyTorch twin. They know tensors only.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait

_BLOCK = 512  # page ids copied at a time
_PAGE_BLOCK = 128  # page ids read from the host's memory at a time
_TOKEN_BLOCK = 128  # tokens written to it at a time


@dataclass(frozen=True)
class DecodeInputs:
    """The inputs of R rows, each the next token of one slot."""

    input_ids: torch.Tensor  # [R] int32
    positions: torch.Tensor  # [R] int64
    lengths: torch.Tensor  # [R] int32: tokens that the row sees, its own included; the next token's position
    page_table: torch.Tensor  # [R, max pages] int64; only the pages of those tokens are filled in
    cells: torch.Tensor  # [R] int64: where the token's keys and values go


def decode_inputs(
    slots: torch.Tensor, num_computed: torch.Tensor, tokens: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> DecodeInputs:
    """Look up the inputs of a step that computes the next token of each of R slots.

    slots [R] int64; by slot: num_computed [slots] int64, tokens [slots, context + 1] int32, page_table [slots, max
    pages] int64, rows contiguous. On a GPU the preceding kernel may write page_table, but none of the others.
    """
    rows, pages, device = len(slots), page_table.shape[1], slots.device
    inputs = DecodeInputs(
        input_ids=torch.empty(rows, dtype=torch.int32, device=device),
        positions=torch.empty(rows, dtype=torch.int64, device=device),
        lengths=torch.empty(rows, dtype=torch.int32, device=device),
        page_table=torch.empty(rows, pages, dtype=torch.int64, device=device),
        cells=torch.empty(rows, dtype=torch.int64, device=device),
    )
    _decode_inputs_kernel[(rows,)](
        slots,
        num_computed,
        tokens,
        page_table,
        inputs.input_ids,
        inputs.positions,
        inputs.lengths,
        inputs.page_table,
        inputs.cells,
        tokens.stride(0),
        pages,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl_launch(device),
    )
    return inputs


def decode_inputs_reference(
    slots: torch.Tensor, num_computed: torch.Tensor, tokens: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> DecodeInputs:
    """The twin of `decode_inputs`; fills in all pages."""
    positions = num_computed[slots]
    return DecodeInputs(
        input_ids=tokens[slots, positions],
        positions=positions,
        lengths=(positions + 1).int(),
        page_table=page_table[slots],
        cells=page_table[slots, positions // page_size] * page_size + positions % page_size,
    )


def update_page_table(ring: torch.Tensor, step_count: torch.Tensor, page_table: torch.Tensor) -> None:
    """Apply the page-table updates of one step, and count the step.

    ring [depth, 1 + 2 capacity] int64, in memory that the host writes and the device reads. An entry holds the number
    of pages, their places in the flat page table (each once), and their ids. step_count [1] int64 picks the entry and
    grows by 1; page_table [slots, max pages] int64, contiguous.
    """
    depth, width = ring.shape
    _update_page_table_kernel[(1,)](
        ring,
        step_count,
        page_table,
        DEPTH=depth,
        CAPACITY=(width - 1) // 2,
        BLOCK=_PAGE_BLOCK,
        num_warps=1,  # so that all threads have read step_count before one changes it
        **pdl_launch(page_table.device),
    )


def update_page_table_reference(ring: torch.Tensor, step_count: torch.Tensor, page_table: torch.Tensor) -> None:
    """The twin of `update_page_table`."""
    entry = ring[step_count % len(ring)].squeeze(0)
    number, capacity = int(entry[0]), (len(entry) - 1) // 2
    places, page_ids = entry[1:].view(2, capacity)[:, :number].to(page_table.device)
    page_table.view(-1)[places] = page_ids
    step_count += 1


def write_tokens(token_ids: torch.Tensor, step_count: torch.Tensor, ring: torch.Tensor) -> None:
    """Copy a step's tokens into its entry of `ring`, after `update_page_table` has counted the step.

    token_ids [R] int64; step_count [1] int64: steps counted, this one included; ring [depth, at least R] int64, in
    memory that the device writes and the host reads.
    """
    depth, capacity = ring.shape
    rows = len(token_ids)
    _write_tokens_kernel[(triton.cdiv(rows, _TOKEN_BLOCK),)](
        token_ids,
        step_count,
        ring,
        rows,
        DEPTH=depth,
        CAPACITY=capacity,
        BLOCK=_TOKEN_BLOCK,
        num_warps=4,
        **pdl_launch(token_ids.device),
    )


def write_tokens_reference(token_ids: torch.Tensor, step_count: torch.Tensor, ring: torch.Tensor) -> None:
    """The twin of `write_tokens`."""
    ring[(int(step_count) - 1) % len(ring), : len(token_ids)] = token_ids.cpu()


@triton.jit
def _update_page_table_kernel(
    ring,
    step_count,
    page_table,
    DEPTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    step = tl.load(step_count)
    entry = ring + step % DEPTH * (1 + 2 * CAPACITY)
    number = tl.load(entry, volatile=True)  # the host writes it anew for every step
    for start in range(0, number, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        valid = offsets < number
        target = tl.load(entry + 1 + offsets, mask=valid, other=0, volatile=True)
        page = tl.load(entry + 1 + CAPACITY + offsets, mask=valid, other=0, volatile=True)
        tl.store(page_table + target, page, mask=valid)
    tl.store(step_count, step + 1)


@triton.jit(do_not_specialize=["rows"])
def _write_tokens_kernel(
    token_ids,
    step_count,
    ring,
    rows,
    DEPTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = ring + (tl.load(step_count) - 1) % DEPTH * CAPACITY
    pdl_wait(PDL)
    token_id = tl.load(token_ids + row, mask=row < rows)
    tl.store(entry + row, token_id, mask=row < rows)


@triton.jit
def _decode_inputs_kernel(
    slots,
    num_computed,
    tokens,
    page_table,
    input_ids,
    positions,
    lengths,
    row_pages,
    cells,
    tokens_stride,
    pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(num_computed + slot)
    token = tl.load(tokens + slot * tokens_stride + position)
    last_page = position // PAGE_SIZE
    pdl_wait(PDL)
    tl.store(input_ids + row, token)
    tl.store(positions + row, position)
    tl.store(lengths + row, (position + 1).to(tl.int32))
    tl.store(cells + row, tl.load(page_table + slot * pages + last_page) * PAGE_SIZE + position % PAGE_SIZE)
    for start in range(0, last_page + 1, BLOCK):
        page = start + tl.arange(0, BLOCK)
        page_id = tl.load(page_table + slot * pages + page, mask=page <= last_page, other=0)
        tl.store(row_pages + row * pages + page, page_id, mask=page <= last_page)
