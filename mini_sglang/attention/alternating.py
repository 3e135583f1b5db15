"""Layers that differ in what a token sees: all positions in some, a window of the last ones in the others.

Two backends over one pool, which plan each step both; a layer attends by the plan that is its own. Knows no model.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from mini_sglang.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    DecodeGraphBackend,
    PrefillGraphBackend,
)
from mini_sglang.kernels.interface import KVCells


@runtime_checkable
class GraphBackend(DecodeGraphBackend, PrefillGraphBackend, Protocol):
    """A backend that CUDA graphs can capture in every step."""


def alternating(
    sliding: AttentionBackend, full: AttentionBackend, full_layers: frozenset[int]
) -> AlternatingBackend | AlternatingGraphBackend:
    """`full` for the layers in `full_layers`, `sliding` for all others; for CUDA graphs, if both are."""
    if isinstance(sliding, GraphBackend) and isinstance(full, GraphBackend):
        return AlternatingGraphBackend(sliding, full, full_layers)
    return AlternatingBackend(sliding, full, full_layers)


class AlternatingBackend:
    """Plans steps on the host."""

    def __init__(self, sliding: AttentionBackend, full: AttentionBackend, full_layers: frozenset[int]) -> None:
        self._sliding, self._full, self._full_layers = sliding, full, full_layers

    def plan(self, metadata: AttentionMetadata) -> AlternatingPlan:
        return AlternatingPlan(self._sliding.plan(metadata), self._full.plan(metadata), self._full_layers)


class AlternatingGraphBackend:
    """The same for CUDA graphs. Both backends have the same tiles, since these do not depend on the window."""

    def __init__(self, sliding: GraphBackend, full: GraphBackend, full_layers: frozenset[int]) -> None:
        self._sliding, self._full, self._full_layers = sliding, full, full_layers
        self.short_context = full.short_context
        self.max_prefill_tiles, self.prefill_tiles = full.max_prefill_tiles, full.prefill_tiles

    def plan(self, metadata: AttentionMetadata) -> AlternatingPlan:
        return AlternatingPlan(self._sliding.plan(metadata), self._full.plan(metadata), self._full_layers)

    def plan_decode(self, page_table: torch.Tensor, cells: torch.Tensor, lengths: torch.Tensor) -> AlternatingPlan:
        sliding, full = (each.plan_decode(page_table, cells, lengths) for each in (self._sliding, self._full))
        return AlternatingPlan(sliding, full, self._full_layers)

    def plan_prefill(
        self,
        page_table: torch.Tensor,
        cells: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        tiles: torch.Tensor,
        *,
        long: bool = False,
    ) -> AlternatingPlan:
        step = page_table, cells, starts, counts, tiles
        sliding, full = (each.plan_prefill(*step, long=long) for each in (self._sliding, self._full))
        return AlternatingPlan(sliding, full, self._full_layers)


class AlternatingPlan:
    """The plans of one step."""

    def __init__(self, sliding: AttentionPlan, full: AttentionPlan, full_layers: frozenset[int]) -> None:
        self._sliding, self._full, self._full_layers = sliding, full, full_layers

    def target(self, layer: int) -> KVCells:
        return self._of(layer).target(layer)

    def attend(self, q: torch.Tensor, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return self._of(layer).attend(q, layer, sinks)

    def _of(self, layer: int) -> AttentionPlan:
        return self._full if layer in self._full_layers else self._sliding
