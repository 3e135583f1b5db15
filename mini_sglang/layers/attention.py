"""Self-attention of one layer: project; normalise, rotate and store; attend through the step's plan; project back."""

from __future__ import annotations

from typing import Literal

import torch

from mini_sglang.attention.base import AttentionPlan
from mini_sglang.kernels.interface import Residual, Rotation
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.norm import RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.layers.qk_norm import WholeNorms
from mini_sglang.model_config import ModelConfig
from mini_sglang.weights.tensor import WeightSlot


class Attention:
    """Grouped-query attention (Ainslie et al., arXiv 2305.13245).

    Each rank attends with its own heads, which the pool of the plan holds; their outputs meet in the projection back.

    `qk_norm` normalises each head of q and k, or all heads of a token as a whole. With `post_norm` the layer's norm is
    that of the output, not of the input.
    """

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        layer: int,
        *,
        qk_norm: Literal["heads", "whole"] | None = None,
        post_norm: bool = False,
    ) -> None:
        self._layer, self._post_norm = layer, post_norm
        self._kernels, self._eps = placement.kernels, config.rms_norm_eps
        heads = placement.parallel.heads(config.num_heads, config.num_kv_heads)
        q_size, kv_size = heads.queries.times(config.head_dim), heads.kv.times(config.head_dim)
        self._qkv = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            placement,
            bias=config.attention_bias,
        )
        self._out = Linear(
            q_size, {"o_proj": config.hidden_size}, placement, bias=config.attention_output_bias, summed=True
        )
        self._whole_norms = WholeNorms(config, placement) if qk_norm == "whole" else None
        of_heads = qk_norm == "heads"
        self._q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, placement) if of_heads else None
        self._k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, placement) if of_heads else None

    def __call__(
        self,
        stream: Residual,
        norm: RMSNorm,
        rotation: Rotation,
        plan: AttentionPlan,
        rows: torch.Tensor | None = None,
        then: RMSNorm | None = None,
    ) -> Residual:
        """x [tokens, hidden] -> x + attention(norm(x)), of all tokens or of `rows` [S] int64 alone

        With `post_norm`: x + norm(attention(x)). `then` is the norm in front of what comes next, where there is one.
        """
        before, after = (None, norm) if self._post_norm else (norm, None)
        qkv = self._qkv(*stream.before(before))
        q_norm = None if self._q_norm is None else self._q_norm.weight
        k_norm = None if self._k_norm is None else self._k_norm.weight
        if self._whole_norms is not None:
            qkv = self._whole_norms(qkv)
        q = self._kernels.rope_store(qkv, rotation, plan.target(self._layer), q_norm, k_norm, self._eps)
        attended = plan.attend(q, self._layer).flatten(1)
        residual = stream.x
        if rows is not None:
            residual, attended = residual[rows], attended[rows]
        return self._out.add_to(residual, attended, after, then)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self._qkv.weight_slots(prefix) | self._out.weight_slots(prefix)
        if self._whole_norms is not None:
            slots |= self._whole_norms.weight_slots(prefix)
        if self._q_norm is not None and self._k_norm is not None:
            slots[f"{prefix}.q_norm.weight"] = self._q_norm.weight_slot()
            slots[f"{prefix}.k_norm.weight"] = self._k_norm.weight_slot()
        return slots
