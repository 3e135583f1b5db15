"""In deterministic mode a token's attention has the same bits decoded, in any chunk and beside any other rows."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.attention.triton_backend import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.usefixtures("dot_by_elements")
def test_deterministic_plans_give_a_token_the_same_bits_in_every_step() -> None:
    """A prompt of 37 tokens beside others, in chunks, and decoded in a step that a CUDA graph could capture."""
    torch.manual_seed(0)
    pool = KVPool(
        num_layers=1, num_pages=12, page_size=16, num_kv_heads=2, head_dim=32, dtype=torch.float32, device=DEVICE
    )
    pool.layers[0].normal_()
    table = torch.randperm(12).view(3, 4).to(DEVICE)
    backend = TritonBackend(pool, num_heads=6, dtype=torch.float32, max_rows=3, deterministic=True)
    reference = ReferenceBackend(pool, torch.float32)
    q = torch.randn(3, 37, 6, 32, device=DEVICE)

    def attend(backend: TritonBackend | ReferenceBackend, *rows: tuple[int, int, int]) -> torch.Tensor:
        """Rows are (prompt, start, end)."""
        prompts = [prompt for prompt, _, _ in rows]
        step = AttentionMetadata(
            starts=[start for _, start, _ in rows],
            counts=[end - start for _, start, end in rows],
            page_table=table[prompts],
            cells=torch.empty(0, dtype=torch.int64),
        )
        return backend.plan(step).attend(torch.cat([q[prompt, start:end] for prompt, start, end in rows]), 0)

    whole = attend(backend, (0, 0, 37))
    torch.testing.assert_close(whole, attend(reference, (0, 0, 37)), atol=1e-5, rtol=1e-5)
    assert torch.equal(attend(backend, (1, 5, 30), (0, 0, 37), (2, 20, 21))[25:62], whole)
    chunks = [attend(backend, (0, 0, 11)), attend(backend, (0, 11, 12), (1, 0, 9))[:1], attend(backend, (0, 12, 37))]
    assert torch.equal(torch.cat(chunks), whole)
    in_graph = backend.plan_prefill(  # rows 1 and 0, one spare row, three spare tokens
        table[[1, 0, 2, 2]],
        torch.empty(0, dtype=torch.int64),
        torch.tensor([5, 0, 0, 0], device=DEVICE),
        torch.tensor([25, 37, 0, 3], device=DEVICE),
        torch.tensor(backend.prefill_tiles([5, 0], [25, 37], backend.max_prefill_tiles(3, 65), 3), device=DEVICE),
    )
    assert torch.equal(in_graph.attend(torch.cat((q[1, 5:30], q[0], q[2, :3])), 0)[25:62], whole)
    for position in (0, 15, 16, 36):
        lengths = torch.tensor([position + 1, 20, 1], dtype=torch.int32, device=DEVICE)
        decodes = torch.stack((q[0, position], q[1, 19], q[2, 0]))
        out = backend.plan_decode(table, torch.empty(0, dtype=torch.int64), lengths).attend(decodes, 0)
        assert torch.equal(out[0], whole[position])


@pytest.mark.parametrize("heads", [4, 16])
def test_idle_tiles_write_nothing_behind_a_full_step(heads: int) -> None:
    """Also where a KV head has so many query heads that a tile holds one token."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pool = KVPool(
        num_layers=1, num_pages=8, page_size=16, num_kv_heads=1, head_dim=64, dtype=torch.float32, device=device
    )
    backend = TritonBackend(pool, num_heads=heads, dtype=torch.float32, max_rows=4, deterministic=True)
    tiles = backend.prefill_tiles([0], [8], backend.max_prefill_tiles(2, 8), idle_row=2)
    with device:
        table, starts, counts = torch.zeros(3, 4, dtype=torch.int64), torch.tensor([0, 0, 0]), torch.tensor([8, 0, 0])
        backend.plan_prefill(table, torch.arange(8), starts, counts, torch.tensor(tiles))
        out, q = torch.zeros(9, heads, 64), torch.randn(8, heads, 64)
    backend.decode.run(q, pool.key_cells[0], pool.value_cells[0], table, out[:8])
    assert not out[8].any()
