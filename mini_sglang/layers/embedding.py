"""The token embedding and the output head, which may be the same matrix. Each rank holds a part of the vocabulary."""

from __future__ import annotations

import torch

from mini_sglang.kernels.interface import Residual
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.norm import BlockNorms, RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.parallel.sharding import whole
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot


class OutputHead:
    """Logits of every token of the vocabulary, on every rank."""

    def __init__(self, hidden_size: int, vocab_size: int, placement: Placement, norm: RMSNorm) -> None:
        self._vocab_size = vocab_size
        self._parallel = placement.parallel
        shard = placement.parallel.shard(vocab_size)
        norms = BlockNorms(before=norm)
        self._linear = Linear(hidden_size, {"lm_head": shard}, placement, norms=norms, quantized=False)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, hidden] -> logits of its norm [rows, vocab], in `out` (contiguous) where that is given"""
        if self._parallel.size == 1:
            return self._linear(Residual(x), out)
        return self._parallel.all_gather(self._linear(Residual(x)), self._vocab_size, out)

    def weight_slot(self) -> WeightSlot:
        (slot,) = self._linear.weight_slots("").values()
        return slot


class Embedding:
    """A table [vocab, hidden]: token ids in, rows out."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        self._kernels, self._parallel = placement.kernels, placement.parallel
        self._hidden, self._vocab = whole(hidden_size), placement.parallel.shard(vocab_size)
        rows = self._vocab.size + (self._parallel.size > 1)  # the last for the tokens that other ranks look up
        self._table = torch.empty(rows, hidden_size, dtype=placement.dtype, device=placement.device)
        self._table[self._vocab.size :] = 0

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [tokens] int32 or int64 -> [tokens, hidden]"""
        if self._parallel.size == 1:
            return self._kernels.embedding(input_ids, self._table)
        is_here = (input_ids >= self._vocab.start) & (input_ids < self._vocab.stop)
        rows = torch.where(is_here, input_ids - self._vocab.start, self._vocab.size)
        return self._parallel.all_reduce(self._kernels.embedding(rows, self._table))

    def weight_slot(self, tied_head: OutputHead | None = None) -> WeightSlot:
        """The slot of the table; with `tied_head` the same tensor fills the output head too."""

        def load(tensor: CheckpointTensor) -> None:
            tensor.copy_to(self._table[: self._vocab.size], self._vocab, self._hidden)
            if tied_head is not None:
                tied_head.weight_slot().load(tensor)

        return WeightSlot((self._vocab.full, self._hidden.full), load)
