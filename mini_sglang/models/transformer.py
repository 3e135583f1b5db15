"""The skeleton of a decoder-only transformer. An architecture says which parts differ (see `architectures.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from mini_sglang.kernels.interface import Residual
from mini_sglang.layers.attention import Attention
from mini_sglang.layers.embedding import Embedding, OutputHead
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.layers.mlp import GatedMLP
from mini_sglang.layers.norm import BlockNorms, RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.layers.rotary import RotaryTable, rotary_tables
from mini_sglang.model_config import ModelConfig
from mini_sglang.weights.tensor import WeightSlot


class AttentionPart(Protocol):
    def __call__(self, residual: Residual, step: ForwardBatch) -> Residual: ...

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]: ...


class MLPPart(Protocol):
    def __call__(self, residual: Residual) -> Residual: ...

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]: ...


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What families do differently: the parts of a layer, and where its two norms stand.

    With `post_norm` a norm is that of a part's output, not of its input. `norm_names` are the checkpoint's.
    """

    attention: Callable[[ModelConfig, Placement, int, BlockNorms, RotaryTable], AttentionPart] = Attention
    mlp: Callable[[ModelConfig, Placement, int, BlockNorms], MLPPart] = GatedMLP
    post_norm: bool = False
    norm_names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")


class Transformer:
    """Embedding, `num_layers` blocks of attention and MLP, final norm, output head."""

    def __init__(self, config: ModelConfig, placement: Placement, architecture: Architecture) -> None:
        self.config = config
        self._placement = placement
        self.embedding = Embedding(config.vocab_size, config.hidden_size, placement)
        self.blocks = build_blocks(config, placement, architecture)
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self._head = OutputHead(config.hidden_size, config.vocab_size, placement, self._norm)

    def __call__(self, step: ForwardBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """-> logits [S, vocab_size] of the tokens `step.logits_indices`; in the first rows of `out` if given"""
        return self.logits(self.hidden(step), out)

    def hidden(self, step: ForwardBatch) -> torch.Tensor:
        """-> hidden states after the last block, of the tokens in `step.logits_indices` [S, hidden_size]"""
        residual = Residual(self.embedding(step.input_ids))
        for block in self.blocks:
            residual = block(residual, step)
        return residual.x

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [S, hidden_size], from `hidden` -> logits [S, vocab_size]; the first rows of `out` where that is given"""
        return self._head(x, None if out is None else out[: len(x)])

    def empty_logits(self, rows: int) -> torch.Tensor:
        """Room for logits [rows, vocab_size], for callers that want them in one place"""
        return torch.empty(rows, self.config.vocab_size, dtype=self._placement.dtype, device=self._placement.device)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every checkpoint tensor the model needs, by its Hugging Face name."""
        tied = self.config.tie_word_embeddings
        slots = {"model.embed_tokens.weight": self.embedding.weight_slot(self._head if tied else None)}
        for layer, block in enumerate(self.blocks):
            slots |= block.weight_slots(f"model.layers.{layer}")
        slots["model.norm.weight"] = self._norm.weight_slot()
        if not tied:
            slots["lm_head.weight"] = self._head.weight_slot()
        return slots


class Block:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)). Each part adds itself and knows its norm."""

    def __init__(self, attention: AttentionPart, mlp: MLPPart, norms: dict[str, RMSNorm]) -> None:
        self._attention, self._mlp = attention, mlp
        self._norms = norms  # by the checkpoint's name

    def __call__(self, residual: Residual, step: ForwardBatch) -> Residual:
        """x [tokens, hidden] -> the same shape; the last block returns only the rows whose logits are wanted"""
        residual = self._attention(residual, step)
        return self._mlp(residual)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {
            **{f"{prefix}.{name}.weight": norm.weight_slot() for name, norm in self._norms.items()},
            **self._attention.weight_slots(f"{prefix}.self_attn"),
            **self._mlp.weight_slots(f"{prefix}.mlp"),
        }


def build_blocks(config: ModelConfig, placement: Placement, architecture: Architecture) -> list[Block]:
    """The layers. Each part is told its neighbours: the norm before or after it, and the one that comes next."""
    norms = [RMSNorm(config.hidden_size, config.rms_norm_eps, placement) for _ in range(2 * config.num_layers)]
    if architecture.post_norm:
        around = [BlockNorms(after=norm) for norm in norms]
    else:
        pairs = zip(norms, [*norms[1:], None], strict=True)
        around = [BlockNorms(before=norm, following=following) for norm, following in pairs]
    blocks = []
    for layer, rotary in enumerate(rotary_tables(config, config.context_length, placement)):
        of_attention, of_mlp = around[2 * layer : 2 * layer + 2]
        attention = architecture.attention(config, placement, layer, of_attention, rotary)
        mlp = architecture.mlp(config, placement, layer, of_mlp)
        names = zip(architecture.norm_names, norms[2 * layer : 2 * layer + 2], strict=True)
        blocks.append(Block(attention, mlp, dict(names)))
    return blocks
