"""What a step of one token per row begins with, looked up on the device from the list of slots: one launch for all.

Nothing here depends on the host, so it can lie in a CUDA graph. The PyTorch twin is beside the kernel.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK = 512  # page ids copied at a time


@dataclass(frozen=True)
class DecodeInputs:
    """R rows, each the next token of one slot."""

    input_ids: torch.Tensor  # [R] int32
    positions: torch.Tensor  # [R] int64
    lengths: torch.Tensor  # [R] int32: tokens that the row sees, its own included; the next token's position
    page_table: torch.Tensor  # [R, max pages] int64; only the pages of those tokens are filled in
    cells: torch.Tensor  # [R] int64: where the token's keys and values go


def decode_inputs(
    slots: torch.Tensor, num_computed: torch.Tensor, tokens: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> DecodeInputs:
    """slots [R] int64; by slot: num_computed [slots] int64, tokens [slots, context + 1] int32, page_table [slots, max
    pages] int64, rows contiguous."""
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
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(num_computed + slot)
    last_page = position // PAGE_SIZE
    tl.store(input_ids + row, tl.load(tokens + slot * tokens_stride + position))
    tl.store(positions + row, position)
    tl.store(lengths + row, (position + 1).to(tl.int32))
    tl.store(cells + row, tl.load(page_table + slot * pages + last_page) * PAGE_SIZE + position % PAGE_SIZE)
    for start in range(0, last_page + 1, BLOCK):
        page = start + tl.arange(0, BLOCK)
        page_id = tl.load(page_table + slot * pages + page, mask=page <= last_page, other=0)
        tl.store(row_pages + row * pages + page, page_id, mask=page <= last_page)
