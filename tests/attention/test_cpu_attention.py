"""On a CPU a token's attention has the same bits decoded, in any chunk, beside any other rows and on any thread."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.kernels.cpu.kernels import CpuKernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("head_dim", [32, 40])  # whole vectors, and a rest
def test_a_token_has_the_same_bits_in_every_step(dtype: torch.dtype, window: int | None, head_dim: int) -> None:
    torch.manual_seed(0)
    pool = KVPool(num_layers=1, num_pages=12, page_size=16, num_kv_heads=2, head_dim=head_dim, dtype=dtype, device=CPU)
    pool.layers[0].normal_()
    table = torch.randperm(12).view(3, 4)
    backend = ReferenceBackend(pool, dtype, window, CpuKernels(dtype))
    q = torch.randn(3, 37, 6, head_dim).to(dtype)

    def attend(*rows: tuple[int, int, int], backend: ReferenceBackend = backend) -> torch.Tensor:
        """Rows are (prompt, start, end)."""
        step = AttentionMetadata(
            starts=[start for _, start, _ in rows],
            counts=[end - start for _, start, end in rows],
            page_table=table[[prompt for prompt, _, _ in rows]],
            cells=torch.empty(0, dtype=torch.int64),
        )
        return backend.plan(step).attend(torch.cat([q[prompt, start:end] for prompt, start, end in rows]), 0)

    whole = attend((0, 0, 37))
    expected = attend((0, 0, 37), backend=ReferenceBackend(pool, dtype, window))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(attend((1, 5, 30), (0, 0, 37), (2, 20, 21))[25:62], whole)
    chunks = [attend((0, 0, 11)), attend((0, 11, 12), (1, 0, 9))[:1], attend((0, 12, 37))]
    assert torch.equal(torch.cat(chunks), whole)
    decoded = torch.cat([attend((2, 4, 5), (0, position, position + 1))[1:] for position in range(37)])
    assert torch.equal(decoded, whole)
