"""Self-attention of one layer: project; normalise, rotate and store; attend through the step's plan; project back."""

from __future__ import annotations

from typing import Literal

import torch

from mini_sglang.kernels.interface import Residual, Rotation
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.norm import BlockNorms, RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.layers.qk_norm import WholeNorms
from mini_sglang.layers.rotary import RotaryTable
from mini_sglang.model_config import ModelConfig
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot


class Attention:
    """Grouped-query attention (Ainslie et al., arXiv 2305.13245): x + attention(x'), x' normalised as `norms` say.

    Each rank attends with its own heads, which the pool of the plan holds; their outputs meet in the projection back.
    `qk_norm` normalises each head of q and k, or all heads of a token as a whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        layer: int,
        norms: BlockNorms,
        rotary: RotaryTable,
        *,
        qk_norm: Literal["heads", "whole"] | None = None,
    ) -> None:
        self._layer, self._is_last = layer, layer == config.num_layers - 1
        self._kernels, self._eps, self._rotary = placement.kernels, config.rms_norm_eps, rotary
        heads = placement.parallel.heads(config.num_heads, config.num_kv_heads)
        q_size, kv_size = heads.queries.times(config.head_dim), heads.kv.times(config.head_dim)
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        out = {"o_proj": config.hidden_size}
        self._qkv = Linear(config.hidden_size, parts, placement, bias=config.attention_bias, norms=norms)
        self._out = Linear(q_size, out, placement, bias=config.attention_output_bias, summed=True, norms=norms)
        self._sinks: torch.Tensor | None = None
        if config.attention_sinks:
            self._sinks = torch.empty(heads.queries.size, dtype=torch.float32, device=placement.device)
        self._queries = heads.queries
        self._whole_norms = WholeNorms(config, placement) if qk_norm == "whole" else None
        of_heads = qk_norm == "heads"
        self._q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, placement) if of_heads else None
        self._k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, placement) if of_heads else None

    def __call__(self, residual: Residual, step: ForwardBatch) -> Residual:
        """x [tokens, hidden] -> the same shape; the last layer returns only the rows whose logits are wanted"""
        x, qkv = residual.x, self._qkv(residual)
        q_norm = None if self._q_norm is None else self._q_norm.weight
        k_norm = None if self._k_norm is None else self._k_norm.weight
        if self._whole_norms is not None:
            qkv = self._whole_norms(qkv)
        rotation, target = Rotation(*self._rotary, step.positions), step.plan.target(self._layer)
        q = self._kernels.rope_store(qkv, rotation, target, q_norm, k_norm, self._eps)
        attended = step.plan.attend(q, self._layer, self._sinks).flatten(1)
        if self._is_last and step.logits_indices is not None:
            x, attended = x[step.logits_indices], attended[step.logits_indices]
        return self._out.add_to(x, attended)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self._qkv.weight_slots(prefix) | self._out.weight_slots(prefix)
        if self._sinks is not None:
            slots[f"{prefix}.sinks"] = WeightSlot((self._queries.full,), self._load_sinks)
        if self._whole_norms is not None:
            slots |= self._whole_norms.weight_slots(prefix)
        if self._q_norm is not None and self._k_norm is not None:
            slots[f"{prefix}.q_norm.weight"] = self._q_norm.weight_slot()
            slots[f"{prefix}.k_norm.weight"] = self._k_norm.weight_slot()
        return slots

    def _load_sinks(self, tensor: CheckpointTensor) -> None:
        assert self._sinks is not None
        tensor.copy_to(self._sinks, self._queries)
