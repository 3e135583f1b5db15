"""The tensors of one step, as a model sees them. T tokens, S of them with logits wanted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mini_sglang.attention.base import AttentionPlan


@dataclass(frozen=True)
class ForwardBatch:
    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    logits_indices: torch.Tensor | None  # [S] int64: indices of tokens whose logits are wanted; None: all
    plan: AttentionPlan
