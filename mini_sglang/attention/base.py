"""What an attention backend is: plan once per step, run once per layer. Knows no model.

A plan is given to the layers and is all they see: where the step's keys and values go, and how queries attend to what
is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mini_sglang.kernels.base import KVCells


@dataclass(frozen=True)
class AttentionMetadata:
    """Which tokens a step computes and where their keys and values lie. R rows, T tokens in row order."""

    starts: list[int]  # R: position of each row's first token in this step
    counts: list[int]  # R: tokens of each row in this step
    page_table: torch.Tensor  # [R, max pages] int64: page ids of each row
    cells: torch.Tensor  # [T] int64: place in the pool (page id * page_size + offset) of each token


class AttentionPlan(Protocol):
    """The attention of one step."""

    def target(self, layer: int) -> KVCells:
        """Where the keys and values of the step's tokens have to lie before `attend` of that layer."""
        ...

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attend q [T, heads, head_dim] causally: a token at position p sees its row's positions 0 to p.

        Returns [T, heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans over one KV pool."""

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan: ...
