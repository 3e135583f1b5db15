"""Norm, rotation and store in one pass equal their twin, and touch no other cell of the pool."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.kernels.triton.rope_store import rope_store, rope_store_reference


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tokens", "dtype", "tolerance"),
    [
        (4, 4, 64, 3, torch.float32, 2e-6),
        (9, 3, 64, 2, torch.float16, 1e-3),
        (4, 2, 96, 3, torch.float32, 2e-6),
        (8, 1, 128, 1, torch.float16, 1e-3),
        (2, 1, 256, 2, torch.float32, 2e-6),
        pytest.param(16, 8, 128, 300, torch.bfloat16, 5e-3, marks=pytest.mark.gpu),
        pytest.param(32, 8, 128, 1, torch.bfloat16, 5e-3, marks=pytest.mark.gpu),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_a_float8_pool_keeps_its_own_numbers_and_saturates_beyond_them(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Through a rotation by nothing, so that only the conversion is left."""
    torch.manual_seed(0)
    numbers = (2.0 ** torch.randint(-6, 13, (3, 4, 64))) * (1 + torch.randint(0, 8, (3, 4, 64)) / 8)
    qkv = (numbers * torch.randint(0, 2, (3, 4, 64)).sub(0.5).sign()).to(device, dtype)  # 2 heads of q, then k and v
    positions = torch.arange(3, device=device)
    keys, values = torch.zeros(2, 3, 1, 64, dtype=torch.float8_e4m3fn, device=device).unbind()
    cos, sin = torch.ones(3, 32, device=device), torch.zeros(3, 32, device=device)
    rope_store(qkv.flatten(1), positions, positions, cos, sin, keys, values)
    wanted = qkv.float().clamp(-448, 448)
    assert torch.equal(keys.float(), wanted[:, 2:3])
    assert torch.equal(values.float(), wanted[:, 3:4])


@pytest.mark.gpu
def test_a_float8_pool_is_rounded_to_like_the_twin(device: torch.device) -> None:
    """Only on a GPU: Triton's interpreter loses the carry into the exponent. Keys may round to a neighbour."""
    torch.manual_seed(0)
    tokens, heads, kv_heads, head_dim = 64, 4, 2, 64
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim) * torch.logspace(-3, 4, tokens).unsqueeze(1)
    qkv = qkv.to(device, torch.bfloat16)
    positions = torch.arange(tokens, device=device)
    cos, sin = torch.randn(2, tokens, head_dim // 2).to(device).unbind()
    pools = torch.zeros(4, tokens, kv_heads, head_dim, dtype=torch.float8_e4m3fn, device=device).unbind()
    rope_store(qkv, positions, positions, cos, sin, *pools[:2])
    rope_store_reference(qkv, positions, positions, cos, sin, *pools[2:])
    keys, values, wanted_keys, wanted_values = (pool.float() for pool in pools)
    assert torch.equal(values, wanted_values)
    assert not keys.isnan().any()
    assert ((keys - wanted_keys).abs() <= wanted_keys.abs() / 8 + 2**-9).all()
    assert (keys == wanted_keys).float().mean() > 0.99


def test_one_norm_without_the_other_is_refused(device: torch.device) -> None:
    table, pool = torch.randn(4, 8).to(device), torch.randn(4, 1, 16).to(device)
    at = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="must be given together"):
        rope_store(torch.randn(1, 48).to(device), at, at, table, table, pool, pool, q_norm=torch.ones(16).to(device))
