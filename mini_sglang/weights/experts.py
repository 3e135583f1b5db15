"""One name for every expert's weights, however a checkpoint stores them. Knows names and shapes, no model.

Published checkpoints hold a tensor per expert and projection, Mixtral's under names of its own; transformers 5 may also
save all experts of a layer as one tensor. All of them become `…mlp.experts.E.{gate,up,down}_proj.weight`, and gpt-oss's
biases `….bias`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from mini_sglang.weights.tensor import CheckpointTensor

_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_GPT_OSS = re.compile(r"(.*\.mlp)\.(?:router\.(weight|bias)|experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?)")
_GPT_OSS_PARTS = {None: "weight", "_bias": "bias", "_blocks": "weight_packed", "_scales": "weight_scale"}
_MIXTRAL = re.compile(r"(.*)\.block_sparse_moe\.(?:gate|experts\.(\d+)\.(w[123]))\.weight")
_MIXTRAL_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_COMMON = re.compile(r"(.*)\.mlp\.(?:gate|experts\.(\d+)\.(gate_proj|down_proj|up_proj))\.weight")


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


def split_gpt_oss(tensors: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """The same tensors, those of gpt-oss's experts split into one per expert, its router under the common name.

    They are told by their biases. A matrix is transposed, or stored in MXFP4 as `_blocks` [experts, rows, groups, 16]
    and `_scales` [experts, rows, groups]; rows of gate and up alternate.
    """
    layers = {match[1] for name in tensors if (match := _GPT_OSS.fullmatch(name)) and match[4] == "_bias"}
    named: dict[str, CheckpointTensor] = {}
    for name, tensor in tensors.items():
        match = _GPT_OSS.fullmatch(name)
        if match is None or match[1] not in layers:
            named[name] = tensor
        elif match[2] is not None:
            named[f"{match[1]}.gate.{match[2]}"] = tensor
        else:
            named |= {part.name: part for part in _split_alternating(tensor, f"{match[1]}.experts", match[3], match[4])}
    return named


def _split_alternating(
    tensor: CheckpointTensor, prefix: str, matrix: str, kind: str | None
) -> Iterator[CheckpointTensor]:
    number, *sizes = tensor.shape
    if kind is None:  # transposed
        sizes.reverse()
    rows, columns = sizes[0], sizes[1:]
    if kind == "_blocks":
        columns = [columns[0] * columns[1]]
    spans = {"down_proj": slice(0, rows)}
    if matrix == "gate_up_proj":
        spans = {"gate_proj": slice(0, rows, 2), "up_proj": slice(1, rows, 2)}
    for expert in range(number):
        for part, span in spans.items():
            shape = (len(range(rows)[span]), *columns)
            read = partial(_alternating_rows, tensor, expert, span, shape, transposed=kind is None)
            yield CheckpointTensor(f"{prefix}.{expert}.{part}.{_GPT_OSS_PARTS[kind]}", shape, read, dtype=tensor.dtype)


def _alternating_rows(
    tensor: CheckpointTensor, expert: int, rows: slice, shape: tuple[int, ...], *, transposed: bool
) -> torch.Tensor:
    of_expert = tensor.dense()[expert]
    return (of_expert.t() if transposed else of_expert)[rows].reshape(shape)


def published_name(name: str, architecture: str) -> str:
    """What a tensor with this common name is called in published checkpoints of the architecture."""
    match = _COMMON.fullmatch(name)
    if architecture != "mixtral" or match is None:
        return name
    layer, expert, projection = match.groups()
    matrix = next((matrix for matrix, common in _MIXTRAL_NAMES.items() if common == projection), None)
    part = "gate" if matrix is None else f"experts.{expert}.{matrix}"
    return f"{layer}.block_sparse_moe.{part}.weight"


def _split(tensor: CheckpointTensor, prefix: str, name: str) -> Iterator[CheckpointTensor]:
    """One tensor per expert. gate_up_proj [experts, 2 n, hidden] has gate above up; down_proj [experts, hidden, n]"""
    number, rows, columns = tensor.shape
    half = rows // 2
    spans = {"down_proj": slice(0, rows)}
    if name == "gate_up_proj":
        spans = {"gate_proj": slice(0, half), "up_proj": slice(half, rows)}
    for expert in range(number):
        for part, span in spans.items():
            part_name, shape = f"{prefix}.{expert}.{part}.weight", (span.stop - span.start, columns)
            yield CheckpointTensor(part_name, shape, partial(_rows, tensor, expert, span), dtype=tensor.dtype)


def _rows(tensor: CheckpointTensor, expert: int, rows: slice) -> torch.Tensor:
    return tensor.dense()[expert, rows]
