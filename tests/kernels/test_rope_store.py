"""Norm, rotation and store in one pass equal their twin, and touch no other cell of the pool."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.rope_store import rope_store, rope_store_reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
GPU = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tokens", "dtype", "tolerance"),
    [
        (4, 4, 64, 3, torch.float32, 2e-6),
        (9, 3, 64, 2, torch.float16, 1e-3),
        (4, 2, 96, 3, torch.float32, 2e-6),
        (8, 1, 128, 1, torch.float16, 1e-3),
        (2, 1, 256, 2, torch.float32, 2e-6),
        pytest.param(16, 8, 128, 300, torch.bfloat16, 5e-3, marks=GPU),
        pytest.param(32, 8, 128, 1, torch.bfloat16, 5e-3, marks=GPU),
    ],
)
def test_equals_its_twin(
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    dtype: torch.dtype,
    tolerance: float,
    norm: bool,
) -> None:
    torch.manual_seed(0)
    cells = tokens + 10
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(device, dtype)
    positions = torch.randint(0, 50, (tokens,)).to(device)
    chosen = torch.randperm(cells)[:tokens].to(device)
    cos, sin = torch.randn(2, 50, head_dim // 2).to(device).unbind()
    keys, values = torch.randn(2, cells, kv_heads, head_dim).to(device, dtype).unbind()
    wanted_keys, wanted_values = keys.double(), values.double()
    norms = torch.randn(2, head_dim).to(device, dtype).unbind() if norm else (None, None)
    q = rope_store(qkv, positions, chosen, cos, sin, keys, values, q_norm=norms[0], k_norm=norms[1])
    wanted = rope_store_reference(
        qkv.float(), positions, chosen, cos, sin, wanted_keys, wanted_values, q_norm=norms[0], k_norm=norms[1]
    )
    for actual, expected in ((q, wanted), (keys, wanted_keys), (values, wanted_values)):
        assert actual.dtype == dtype
        assert (actual.double() - expected).norm() / expected.norm() < tolerance
    untouched = torch.ones(cells, dtype=torch.bool, device=device).index_fill_(0, chosen, False)
    assert torch.equal(keys[untouched].double(), wanted_keys[untouched])
    assert torch.equal(values[untouched].double(), wanted_values[untouched])


def test_one_norm_without_the_other_is_refused(device: torch.device) -> None:
    table, pool = torch.randn(4, 8).to(device), torch.randn(4, 1, 16).to(device)
    at = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="come together"):
        rope_store(torch.randn(1, 48).to(device), at, at, table, table, pool, pool, q_norm=torch.ones(16).to(device))
