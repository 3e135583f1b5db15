"""The skeleton of a decoder-only transformer. An architecture hands in the parts that differ (see `llama.py`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch

from mini_sglang.attention.base import AttentionPlan
from mini_sglang.kernels.interface import Residual, Rotation
from mini_sglang.layers.embedding import Embedding, OutputHead
from mini_sglang.layers.norm import RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.layers.rotary import RotaryTables
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.forward_batch import ForwardBatch
from mini_sglang.weights.tensor import WeightSlot


class AttentionPart(Protocol):
    def __call__(
        self,
        stream: Residual,
        norm: RMSNorm,
        rotation: Rotation,
        plan: AttentionPlan,
        rows: torch.Tensor | None,
        then: RMSNorm | None,
    ) -> Residual: ...

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]: ...


class MLPPart(Protocol):
    def __call__(self, stream: Residual, norm: RMSNorm, then: RMSNorm | None) -> Residual: ...

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]: ...


class Transformer:
    """Embedding, `num_layers` blocks of attention and MLP, final norm, output head.

    `attention` and `mlp` make the parts of one layer from (config, placement, layer index); `norms` are names of the
    checkpoint: of the norms that the two are handed.
    """

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        *,
        attention: Callable[[ModelConfig, Placement, int], AttentionPart],
        mlp: Callable[[ModelConfig, Placement, int], MLPPart],
        norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    ) -> None:
        self.config = config
        self._placement = placement
        self._embedding = Embedding(config.vocab_size, config.hidden_size, placement)
        self._rotary = RotaryTables(config, config.context_length, placement)
        self._blocks = [
            Block(config, placement, attention(config, placement, layer), mlp(config, placement, layer), norms)
            for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self._head = OutputHead(config.hidden_size, config.vocab_size, placement)

    def __call__(self, batch: ForwardBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """-> logits [S, vocab_size] of the tokens in `batch.logit_rows`; the first rows of `out` where that is given"""
        return self.logits(self.hidden(batch), out)

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """-> what the blocks make of the tokens in `batch.logit_rows` [S, hidden_size]"""
        stream = Residual(self._embedding(batch.input_ids))
        *rotations, last_rotation = self._rotary.at(batch.positions)
        for (block, following), rotation in zip(pairwise(self._blocks), rotations, strict=True):
            stream = block(stream, rotation, batch.plan, then=following.attention_norm)
        return self._blocks[-1](stream, last_rotation, batch.plan, rows=batch.logit_rows).x

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [S, hidden_size], from `hidden` -> logits [S, vocab_size]; the first rows of `out` where that is given"""
        return self._head(x, self._norm, None if out is None else out[: len(x)])

    def empty_logits(self, rows: int) -> torch.Tensor:
        """Room for logits [rows, vocab_size], for who wants them in one place"""
        return torch.empty(rows, self.config.vocab_size, dtype=self._placement.dtype, device=self._placement.device)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every checkpoint tensor the model needs, by its Hugging Face name."""
        tied = self.config.tie_word_embeddings
        slots = {"model.embed_tokens.weight": self._embedding.weight_slot(self._head if tied else None)}
        for layer, block in enumerate(self._blocks):
            slots |= block.weight_slots(f"model.layers.{layer}")
        slots["model.norm.weight"] = self._norm.weight_slot()
        if not tied:
            slots["lm_head.weight"] = self._head.weight_slot()
        return slots


class Block:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); or x + norm(attention(x)), if the parts are such."""

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        attention: AttentionPart,
        mlp: MLPPart,
        norms: tuple[str, str],
    ) -> None:
        self._norm_names = norms
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self._attention = attention
        self._mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self._mlp = mlp

    def __call__(
        self,
        stream: Residual,
        rotation: Rotation,
        plan: AttentionPlan,
        *,
        rows: torch.Tensor | None = None,
        then: RMSNorm | None = None,
    ) -> Residual:
        """x [tokens, hidden] -> the same shape; with `rows` [S] int64 only these go on behind attention

        `then` is the next layer's norm, which may be computed here already.
        """
        stream = self._attention(stream, self.attention_norm, rotation, plan, rows, self._mlp_norm)
        return self._mlp(stream, self._mlp_norm, then)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        of_attention, of_mlp = self._norm_names
        return {
            f"{prefix}.{of_attention}.weight": self.attention_norm.weight_slot(),
            f"{prefix}.{of_mlp}.weight": self._mlp_norm.weight_slot(),
            **self._attention.weight_slots(f"{prefix}.self_attn"),
            **self._mlp.weight_slots(f"{prefix}.mlp"),
        }
