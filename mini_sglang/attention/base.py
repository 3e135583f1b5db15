"""What an attention backend is: plan once per step, run once per layer. Knows no model.

A plan is given to the layers and is all they see: storing a step's keys and values and attending to a request's pages
is one call, whatever the backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class AttentionMetadata:
    """Which tokens a step computes and where their keys and values lie. R rows, T tokens in row order."""

    starts: list[int]  # R: position of each row's first token in this step
    counts: list[int]  # R: tokens of each row in this step
    page_table: torch.Tensor  # [R, max pages] int64: page ids of each row
    cells: torch.Tensor  # [T] int64: slot in the pool (page id * page_size + offset) of each token


class AttentionPlan(Protocol):
    """The attention of one step."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Store k and v [T, kv_heads, head_dim] of `layer`, then attend q [T, heads, head_dim], causally.

        Token i of a row at position p sees that row's positions 0 to p. Returns [T, heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans over one KV pool."""

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan: ...
