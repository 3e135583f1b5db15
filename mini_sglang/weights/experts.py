"""One name for every expert's weights, however a checkpoint stores them. Knows names and shapes, no model.

Published checkpoints hold a tensor per expert and projection, Mixtral's under names of its own; transformers 5 may also
save all experts of a layer as one tensor. All of them become `…mlp.experts.E.{gate,up,down}_proj.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from mini_sglang.weights.tensor import CheckpointTensor, QuantizedBlocks

_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_MIXTRAL = re.compile(r"(.*)\.block_sparse_moe\.(?:gate|experts\.(\d+)\.(w[123]))\.weight")
_MIXTRAL_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def name_experts(tensors: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """The same tensors under common names; a tensor that holds all experts of a layer is split into one per expert."""
    named: dict[str, CheckpointTensor] = {}
    for name, tensor in tensors.items():
        if (match := _FUSED.fullmatch(name)) and len(tensor.shape) == 3:
            named |= {part.name: part for part in _split(tensor, *match.groups())}
        elif match := _MIXTRAL.fullmatch(name):
            layer, expert, matrix = match.groups()
            part = "gate" if expert is None else f"experts.{expert}.{_MIXTRAL_NAMES[matrix]}"
            named[f"{layer}.mlp.{part}.weight"] = tensor
        else:
            named[name] = tensor
    return named


def _split(tensor: CheckpointTensor, prefix: str, name: str) -> Iterator[CheckpointTensor]:
    """One tensor per expert. gate_up_proj [experts, 2 n, hidden] has gate above up; down_proj [experts, hidden, n]"""
    number, rows, _ = tensor.shape
    half = rows // 2
    spans = {"down_proj": slice(0, rows)}
    if name == "gate_up_proj":
        spans = {"gate_proj": slice(0, half), "up_proj": slice(half, rows)}
    for expert in range(number):
        for part, span in spans.items():
            yield ExpertTensor(tensor, f"{prefix}.{expert}.{part}.weight", expert, span)


class ExpertTensor:
    """`rows` of one expert, from a tensor [experts, rows, columns] of all experts."""

    def __init__(self, whole: CheckpointTensor, name: str, expert: int, rows: slice) -> None:
        self._whole, self._expert, self._rows = whole, expert, rows
        self.name = name
        self.shape = (rows.stop - rows.start, whole.shape[2])

    def dense(self) -> torch.Tensor:
        """The values in the dtype stored, of `shape`. A view if the tensor of all is a view of the mapped file."""
        return self._whole.dense()[self._expert, self._rows]

    def blocks(self) -> QuantizedBlocks | None:
        """None: only safetensors hold all experts in one tensor."""
        return None
