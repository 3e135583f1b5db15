"""The lookup of token ids in the embedding table, beside its PyTorch twin.

It is one of a step's first kernels, so it uses programmatic dependent launch to start early. Knows tensors only.
"""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mini_sglang.kernels.triton.pdl import pdl_launch, pdl_wait


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look up token_ids [T], int32 or int64 below V, in table [V, size] -> rows [T, size], a new tensor.

    Raises ValueError unless both are contiguous.
    """
    if not table.is_contiguous() or token_ids.stride() != (1,):
        raise ValueError(f"table and token_ids must be contiguous; strides {table.stride()} and {token_ids.stride()}")
    size = table.shape[1]
    out = torch.empty(len(token_ids), size, dtype=table.dtype, device=table.device)
    if len(token_ids):
        block = triton.next_power_of_2(size)
        _embedding_kernel[(len(token_ids),)](
            token_ids,
            table,
            out,
            SIZE=size,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
            **pdl_launch(table.device),
        )
    return out


def embedding_reference(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The twin of `embedding`."""
    return F.embedding(token_ids, table)


@triton.jit
def _embedding_kernel(token_ids, table, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    pdl_wait(PDL)
    token_id = tl.load(token_ids + row).to(tl.int64)
    tl.store(
        out + row * SIZE + offsets, tl.load(table + token_id * SIZE + offsets, mask=offsets < SIZE), mask=offsets < SIZE
    )
