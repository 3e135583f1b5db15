"""A model on a GPU's kernels computes what one on PyTorch's computes.

It runs in Triton's interpreter if there is no GPU.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.kernels.interface import Kernels
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.kernels.triton.kernels import TritonKernels
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ExpertsConfig, ModelConfig
from mini_sglang.models.architectures import build_model
from mini_sglang.models.transformer import Transformer
from mini_sglang.weights.dummy import dummy_tensor
from mini_sglang.weights.tensor import CheckpointTensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LLAMA = ModelConfig(
    architecture="llama",
    vocab_size=50,
    hidden_size=48,  # no power of two
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=32,
    rms_norm_eps=1e-2,  # so that a forgotten one is seen
    rope_theta=1e4,
)
MIXTURE = ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=32, normalize_weights=True)
CONFIGS = {
    "llama": LLAMA,
    "qwen3": replace(LLAMA, architecture="qwen3"),
    "qwen2, with a bias": replace(LLAMA, architecture="qwen2", attention_bias=True),
    "bias of the mlp": replace(LLAMA, mlp_bias=True),
    "olmo2, with norms behind": replace(LLAMA, architecture="olmo2"),
    "mixture": replace(LLAMA, architecture="mixtral", experts=MIXTURE),
}


def random_tensor(name: str, shape: tuple[int, ...]) -> CheckpointTensor:
    """Larger than a dummy one, and norms' weights far from 1, which would hide mistakes."""
    values = dummy_tensor(name, shape, 0, torch.device("cpu")).dense()
    values = (1 + 20 * (values - 1)).abs() if name.endswith("norm.weight") else 10 * values
    return CheckpointTensor(name, shape, lambda: values)


def model_on(kernels: Kernels, config: ModelConfig, *, seed: int = 0) -> Transformer:
    """The weights come in an order that depends on `seed`."""
    model = build_model(config, Placement(DEVICE, torch.float32, kernels))
    slots = list(model.weight_slots().items())
    random.Random(seed).shuffle(slots)
    for name, slot in slots:
        slot.load(random_tensor(name, slot.shape))
    return model


def logits(model: Transformer, ids: list[int]) -> torch.Tensor:
    """The logits of each token of one row [tokens, vocab]"""
    pool = KVPool(
        num_layers=model.config.num_layers,
        num_pages=1,
        page_size=32,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=torch.float32,
        device=DEVICE,
    )
    at = torch.arange(len(ids), device=DEVICE)
    page_table = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    plan = ReferenceBackend(pool, torch.float32).plan(AttentionMetadata([0], [len(ids)], page_table, at))
    with torch.inference_mode():
        return model(ForwardBatch(torch.tensor(ids, device=DEVICE), at, None, plan))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_says_what_the_definition_says(name: str, deterministic: bool) -> None:
    config = CONFIGS[name]
    plain = model_on(TorchKernels(), config)
    for seed, rows in enumerate((1, 2, 3)):
        fused = model_on(TritonKernels(deterministic=deterministic), config, seed=seed)
        ids = [7, 3, 41][:rows]
        torch.testing.assert_close(logits(fused, ids), logits(plain, ids), rtol=1e-4, atol=1e-4)


def test_a_row_alone_gives_the_bits_it_gives_in_a_batch_if_deterministic() -> None:
    """The first token sees none of the others, so only they could change it."""
    model = model_on(TritonKernels(deterministic=True), CONFIGS["qwen3"])
    alone = logits(model, [7])[0]
    for others in ([3], [3, 41], list(range(20))):
        assert torch.equal(logits(model, [7, *others])[0], alone)
