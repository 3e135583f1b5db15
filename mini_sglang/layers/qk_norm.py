"""Norms of q and k over all heads of a token, as in OLMo 2, whichever ranks hold the heads.

Every rank gathers all heads, normalises them as one rank would, and keeps its own, so that the result is bitwise that
of one rank. Knows no model.
"""

from __future__ import annotations

import torch

from mini_sglang.layers.norm import RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.parallel.sharding import shard_heads
from mini_sglang.weights.tensor import WeightSlot


class WholeNorms:
    """One RMSNorm of all heads of q, and one of all heads of k."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self._kernels, self._parallel, self._eps = placement.kernels, placement.parallel, config.rms_norm_eps
        heads = placement.parallel.heads(config.num_heads, config.num_kv_heads)
        q, k = heads.queries.times(config.head_dim), heads.kv.times(config.head_dim)
        self._here = q.size + k.size  # features of q and k on each rank
        self._q_norm, self._k_norm = (RMSNorm(shard.full, config.rms_norm_eps, placement) for shard in (q, k))
        self._columns = torch.empty(q.full + k.full, dtype=torch.int64)  # of what is gathered: q, then k of the model
        for rank in range(placement.parallel.size):  # KV heads that several ranks hold are the same on each
            heads = shard_heads(config.num_heads, config.num_kv_heads, rank, placement.parallel.size)
            first = rank * self._here
            for shard, start, at in ((heads.queries, 0, 0), (heads.kv, config.num_heads, q.size)):
                span = torch.arange((shard.stop - shard.start) * config.head_dim) + first + at
                begin = (start + shard.start) * config.head_dim
                self._columns[begin : begin + len(span)] = span
        # padding heads may hold anything, since no output reads them
        own = [torch.arange(shard.start, shard.start + shard.size).clamp(max=shard.full - 1) for shard in (q, k)]
        self._own = torch.cat((own[0], q.full + own[1])).to(placement.device)
        self._columns = self._columns.to(placement.device)

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """qkv [tokens, (heads + 2 kv_heads) * head_dim] of this rank, with q and k normalised"""
        qk, v = qkv.tensor_split((self._here,), dim=1)
        if self._parallel.size == 1:
            return torch.cat((*self._normalised(qk), v), dim=1)
        gathered = self._parallel.all_gather(qk.contiguous(), self._here * self._parallel.size)
        whole = torch.cat(self._normalised(gathered[:, self._columns]), dim=1)
        return torch.cat((whole[:, self._own], v), dim=1)

    def _normalised(self, qk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """qk [tokens, all features of q and k] -> both, normalised"""
        q, k = qk.split((len(self._q_norm.weight), len(self._k_norm.weight)), dim=1)
        return (
            self._kernels.rms_norm(q, self._q_norm.weight, self._eps),
            self._kernels.rms_norm(k, self._k_norm.weight, self._eps),
        )

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {
            f"{prefix}.q_norm.weight": self._q_norm.weight_slot(),
            f"{prefix}.k_norm.weight": self._k_norm.weight_slot(),
        }
