"""The token embedding and the output head, which may be the same matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mini_sglang.layers.linear import Linear
from mini_sglang.layers.placement import Placement
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot


class Embedding:
    """A table [vocab, hidden]: token ids in, rows out."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        self._table = torch.empty(vocab_size, hidden_size, dtype=placement.dtype, device=placement.device)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [tokens] int32 or int64 -> [tokens, hidden]"""
        return F.embedding(input_ids, self._table)

    def weight_slot(self, tied_head: Linear | None = None) -> WeightSlot:
        """The slot of the table; with `tied_head` the same tensor fills the output head too."""

        def load(tensor: CheckpointTensor) -> None:
            self._table.copy_(tensor.dense())
            if tied_head is not None:
                (head_slot,) = tied_head.weight_slots("").values()
                head_slot.load(tensor)

        return WeightSlot(tuple(self._table.shape), load)
