"""The lookup equals its twin, bit for bit."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.embedding import embedding, embedding_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 576), (7, 100), (3, 2048)])
def test_equals_pytorch(device: torch.device, dtype: torch.dtype, id_dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(0)
    table = torch.randn(50, size).to(device, dtype)
    token_ids = torch.randint(50, (rows,)).to(device, id_dtype)
    found = embedding(token_ids, table)
    assert torch.equal(found, embedding_reference(token_ids, table))
    assert found.shape == (rows, size)


@pytest.mark.gpu
def test_tables_of_more_than_two_gigabytes(device: torch.device) -> None:
    table = torch.zeros(300_000, 4096, dtype=torch.bfloat16, device=device)
    table[299_999] = 1
    assert embedding(torch.tensor([299_999, 0], device=device), table).sum(1).tolist() == [4096, 0]


def test_strided_operands_are_refused(device: torch.device) -> None:
    table, token_ids = torch.zeros(6, 4, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="must be contiguous"):
        embedding(token_ids, table.t())
    with pytest.raises(ValueError, match="must be contiguous"):
        embedding(token_ids[::2], table)
