"""The head of EAGLE-3 (Li et al., arXiv 2503.01840), in the format of SpecForge's checkpoints: it drafts for a target.

One layer reads pairs: a token, and what the target computed of the token before it, its hidden states at three depths.
Behind the known tokens its own output takes the place of the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mini_sglang.kernels.interface import Residual, Rotation
from mini_sglang.layers.embedding import Embedding
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.mlp import GatedMLP
from mini_sglang.layers.norm import BlockNorms, RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.layers.rotary import rotary_tables
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.transformer import Block, Transformer
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Sizes of a head, and the layers of its target whose inputs it reads."""

    layer: ModelConfig  # of its one layer; hidden and vocabulary sizes are the target's
    draft_vocab_size: int  # tokens that it drafts
    target_layers: tuple[int, ...]


class Eagle3Head:
    """Whole on every rank. `embed` is the target's embedding, which serves unless the checkpoint has one of its own.

    Keys and values are those of layer 0 of the plan's pool: of a token, paired with the features of the one before.
    """

    def __init__(
        self,
        config: Eagle3Config,
        placement: Placement,
        embed: Callable[[torch.Tensor], torch.Tensor],
        *,
        own_embedding: bool,
    ) -> None:
        layer = config.layer
        size, eps = layer.hidden_size, layer.rms_norm_eps
        self._config, self._layer, self._placement = config, layer, placement
        self._own = Embedding(layer.vocab_size, size, placement) if own_embedding else None
        self._embed = self._own or embed
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self._norms = {name: RMSNorm(size, eps, placement) for name in names}
        self._norm = RMSNorm(size, eps, placement)
        q_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        before_mlp = self._norms["post_attention_layernorm"]
        self._fc = Linear(len(config.target_layers) * size, {"fc": size}, placement)
        self._qkv = Linear(2 * size, parts, placement, bias=layer.attention_bias)
        self._out = Linear(q_size, {"o_proj": size}, placement, norms=BlockNorms(following=before_mlp))
        self._mlp = GatedMLP(layer, placement, 0, BlockNorms(before=before_mlp))
        head = {"lm_head": config.draft_vocab_size}
        self._head = Linear(size, head, placement, norms=BlockNorms(before=self._norm))
        (self._rotary,) = rotary_tables(layer, layer.context_length, placement)
        self._target_ids = torch.arange(config.draft_vocab_size, device=placement.device)  # of drafted tokens

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the target says of its tokens: hidden [T, layers, hidden_size] -> [T, hidden_size]"""
        return self._fc(Residual(hidden.flatten(1)))

    def store(self, step: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        """Keep keys and values of the step's tokens, paired with the features of those before them.

        features [T, hidden_size] -> the queries [T, heads, head_dim]
        """
        kernels, norms = self._placement.kernels, self._norms
        token, feature = norms["input_layernorm"], norms["hidden_norm"]
        pairs = (
            kernels.rms_norm(self._embed(step.input_ids), token.weight, token.eps),
            kernels.rms_norm(features, feature.weight, feature.eps),
        )
        qkv = self._qkv(Residual(torch.cat(pairs, 1)))
        rotation = Rotation(*self._rotary, step.positions)
        return kernels.rope_store(qkv, rotation, step.plan.target(0), None, None, self._layer.rms_norm_eps)

    def __call__(self, step: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        """`store`, and attend: features [T, hidden_size] of the tokens before -> those of the step's own tokens"""
        attended = step.plan.attend(self.store(step, features), 0, None).flatten(1)
        return self._mlp(self._out.add_to(features.clone(), attended)).x

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """features [T, hidden_size], its own -> logits of the next token [T, vocab_size], -inf where it drafts none"""
        drafted = self._head(Residual(features))
        if drafted.shape[1] == self._layer.vocab_size:
            return drafted
        logits = drafted.new_full((len(drafted), self._layer.vocab_size), -torch.inf)
        return logits.index_copy_(1, self._target_ids, drafted)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every checkpoint tensor that the head needs, by SpecForge's names."""
        slots = {
            **self._fc.weight_slots(""),
            **{f"midlayer.{name}.weight": norm.weight_slot() for name, norm in self._norms.items()},
            **self._qkv.weight_slots("midlayer.self_attn"),
            **self._out.weight_slots("midlayer.self_attn"),
            **self._mlp.weight_slots("midlayer.mlp"),
            "norm.weight": self._norm.weight_slot(),
            **self._head.weight_slots(""),
        }
        if self._own is not None:
            slots["embed_tokens.weight"] = self._own.weight_slot()
        if self._config.draft_vocab_size < self._layer.vocab_size:
            slots["d2t"] = WeightSlot((self._config.draft_vocab_size,), self._load_target_ids)
            slots["t2d"] = WeightSlot((self._layer.vocab_size,), lambda tensor: None)  # says the same
        return slots

    def _load_target_ids(self, tensor: CheckpointTensor) -> None:
        """The target's ids of the drafted tokens, which are stored as the distances to them."""
        ids = torch.arange(self._config.draft_vocab_size) + tensor.dense().long()
        if ids.min() < 0 or ids.max() >= self._layer.vocab_size or len(ids.unique()) < len(ids):
            raise ValueError(f"d2t must map to different tokens below {self._layer.vocab_size}")
        self._target_ids.copy_(ids)


def tap(target: Transformer, layers: Sequence[int], most_tokens: int) -> torch.Tensor:
    """Let each step of `target` copy what enters `layers` into the first rows of one tensor, which is returned.

    -> [most_tokens, len(layers), hidden_size]
    """
    like = target.empty_logits(0)
    tapped = like.new_zeros(most_tokens, len(layers), target.config.hidden_size)
    for place, layer in enumerate(layers):
        target.blocks[layer] = _Tapped(target.blocks[layer], tapped[:, place])
    return tapped


class _Tapped(Block):
    """A block that copies what enters it into the first rows of `copy`."""

    def __init__(self, block: Block, copy: torch.Tensor) -> None:
        self._block, self._copy = block, copy

    def __call__(self, residual: Residual, step: ForwardBatch) -> Residual:
        self._copy[: len(residual.x)] = residual.x
        return self._block(residual, step)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self._block.weight_slots(prefix)
