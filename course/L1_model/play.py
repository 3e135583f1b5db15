"""L1 in the terminal: what the built-in model's file holds, what rotation does to a product, and the next token."""

from __future__ import annotations

from collections import Counter

import torch
from rich.console import Console
from rich.table import Table

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.kernels.interface import KVCells, Rotation
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.architectures import build_model
from mini_sglang.text.tokenizer import load_tokenizer
from mini_sglang.weights.gguf_file import GGUFFile
from mini_sglang.weights.hub import ModelSource, resolve_model
from mini_sglang.weights.load import load_weights
from mini_sglang.weights.model_config import load_model_config

PROMPT = "The capital of France is"


def main() -> None:
    console = Console()
    source = resolve_model("smollm2-135m")
    config = load_model_config(source)
    show_file(console, source)
    show_rotation(console)
    show_next_token(console, source, config)


def show_file(console: Console, source: ModelSource) -> None:
    file = GGUFFile(source.path)
    table = Table("type", "tensors", "weights", "bytes", "bits a weight", title=f"1. {source.path.name}")
    kinds = Counter(tensor.type.name for tensor in file.tensors.values())
    for kind, count in kinds.most_common():
        of_kind = [tensor for tensor in file.tensors.values() if tensor.type.name == kind]
        weights = sum(torch.Size(tensor.shape).numel() for tensor in of_kind)
        size = sum(tensor.num_bytes for tensor in of_kind)
        table.add_row(kind, str(count), f"{weights:,}", f"{size:,}", f"{8 * size / weights:.2f}")
    console.print(table)


def show_rotation(console: Console) -> None:
    """q and k of one head at several positions: their product depends on the distance alone."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(1, 3 * 64, generator=generator)  # one head each of q, k, v
    angles = torch.outer(torch.arange(1200.0), 100_000.0 ** (-torch.arange(0, 64, 2) / 64))
    table = Table("q at", "k at", "distance", "q · k", title="\n2. The same q and k, rotated by the engine's kernel")
    for at_q, at_k in [(5, 3), (105, 103), (1105, 1103), (5, 4), (105, 5), (5, 105)]:
        q = rotated(qkv, angles, at_q)[0]
        k = rotated(qkv, angles, at_k)[1]
        table.add_row(str(at_q), str(at_k), str(at_q - at_k), f"{torch.dot(q, k):.4f}")
    console.print(table)


def rotated(qkv: torch.Tensor, angles: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.zeros(1, 1, 64), torch.zeros(1, 1, 64)
    rotation = Rotation(angles.cos(), angles.sin(), torch.tensor([position]))
    q = TorchKernels().rope_store(qkv, rotation, KVCells(keys, values, torch.tensor([0])), None, None, 1e-5)
    return q[0, 0], keys[0, 0]


@torch.inference_mode()
def show_next_token(console: Console, source: ModelSource, config: ModelConfig) -> None:
    tokenizer = load_tokenizer(source)
    cpu = torch.device("cpu")
    model = build_model(config, Placement(cpu, torch.float32, TorchKernels()))
    load_weights(source, config, model.weight_slots(), show_progress=False)
    ids = tokenizer.encode(PROMPT)
    pool = KVPool(
        num_layers=config.num_layers,
        num_pages=1,
        page_size=16,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=cpu,
    )
    metadata = AttentionMetadata([0], [len(ids)], torch.tensor([[0]]), torch.arange(len(ids)))
    plan = ReferenceBackend(pool, torch.float32).plan(metadata)
    batch = ForwardBatch(torch.tensor(ids), torch.arange(len(ids)), torch.tensor([len(ids) - 1]), plan)
    best = model(batch)[0].softmax(-1).topk(6)
    table = Table("token", "id", "probability", "", title=f"\n3. After {PROMPT!r} ({len(ids)} tokens)")
    for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        bar = "█" * round(40 * probability)
        table.add_row(repr(tokenizer.decode([token])), str(token), f"{probability:.3f}", bar)
    console.print(table)


if __name__ == "__main__":
    main()
