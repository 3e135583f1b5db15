"""What an attention backend is: it plans once per step and runs once per layer.

A plan is all that the layers see of it: where the step's keys and values go, and how queries attend to what is there.
`select.py` chooses the backends. This module knows no model and no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from mini_sglang.kernels.interface import KVCells


@dataclass(frozen=True)
class AttentionMetadata:
    """Which tokens a step computes, and where their keys and values are. R rows, T tokens in row order."""

    starts: list[int]  # R: position of each row's first token in this step
    counts: list[int]  # R: tokens of each row in this step
    page_table: torch.Tensor  # [R, max pages] int64: page ids of each row
    cells: torch.Tensor  # [T] int64: each token's place in the pool, page id * page_size + offset


class AttentionPlan(Protocol):
    """The attention of one step."""

    def target(self, layer: int) -> KVCells:
        """Where the keys and values of the step's tokens must be stored before `attend` of that layer."""
        ...

    def attend(self, q: torch.Tensor, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attend q [T, heads, head_dim] causally: a token at position p sees its row's positions 0 to p.

        `sinks` [heads] float32 are the scores of no position, which take their share of each head's softmax (Xiao et
        al., arXiv 2309.17453). Returns [T, heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans over one KV pool."""

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Plan any step. It may plan on the host, so a CUDA graph cannot capture it."""
        ...


@runtime_checkable
class DecodeGraphBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured in CUDA graphs: it plans them from device tensors alone."""

    def plan_decode(self, page_table: torch.Tensor, cells: torch.Tensor, lengths: torch.Tensor) -> AttentionPlan:
        """Plan a step with one token per row.

        page_table [R, pages], cells [R] int64; lengths [R] int32: tokens that each row sees, its own included.
        """
        ...


@runtime_checkable
class PrefillGraphBackend(AttentionBackend, Protocol):
    """A backend that can plan any step inside a CUDA graph.

    Large steps with a row that sees more than `short_context` positions compute faster in `long` tiles. The methods
    that take `long` get the same for one step.
    """

    short_context: int  # positions

    def plan_prefill(
        self,
        page_table: torch.Tensor,
        cells: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        tiles: torch.Tensor,
        *,
        long: bool = False,
    ) -> AttentionPlan:
        """Plan a step with any number of tokens per row, from device tensors alone.

        page_table [R + 1, pages], cells [T], starts and counts [R + 1] int64: rows of count 0 compute nothing, and
        neither does the last, whose tokens pad the step. A tile is a block of one row's consecutive queries that one
        program attends: tiles [n] int64, as `prefill_tiles` lists them, mean something to the backend alone.
        """
        ...

    def max_prefill_tiles(self, rows: int, tokens: int, *, long: bool = False) -> int:
        """The most tiles that a step of `rows` rows and `tokens` tokens can have."""
        ...

    def prefill_tiles(
        self, starts: list[int], counts: list[int], number: int, idle_row: int, *, long: bool = False
    ) -> list[int]:
        """The tiles of rows that compute `counts` tokens from `starts` on, padded to `number` with idle_row's."""
        ...
