"""Brings a checkpoint's tensors to their slots, one at a time, or fills the slots with reproducible random values.

It knows names and shapes; what a slot does with its tensor (shard, fuse, pack, convert) is the model's business.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch

from mini_sglang.model_config import ModelConfig
from mini_sglang.weights.gguf import QUANTIZED_TYPES, open_gguf
from mini_sglang.weights.gguf_file import GGUFFile
from mini_sglang.weights.hf_config import read_quantization
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.progress import progress
from mini_sglang.weights.quantization import open_folder
from mini_sglang.weights.tensor import CheckpointTensor, WeightsError, WeightSlot, listed

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_MAX_LISTED = 20  # names per kind of problem in an error message
_DUMMY_STD = 0.02


def load_weights(
    source: ModelSource, config: ModelConfig, slots: Mapping[str, WeightSlot], *, show_progress: bool = True
) -> None:
    """Fill every slot from the checkpoint tensor of its name.

    It holds one tensor at a time beside the model, the largest first, while most of the model's memory is untouched.
    Raises WeightsError, before any slot is filled, that lists all missing, unexpected and misshapen tensors.
    """
    is_gguf = source.kind == "gguf"
    tensors = open_gguf(GGUFFile(source.path), config) if is_gguf else open_folder(source.path, slots)
    plan = _match(tensors, slots, tied=config.tie_word_embeddings, where=str(source.path))
    plan.sort(key=lambda pair: math.prod(pair[0].shape), reverse=True)
    _fill(plan, f"Loading {source.name}", show_progress)


def load_dummy_weights(
    slots: Mapping[str, WeightSlot], *, seed: int, device: torch.device, show_progress: bool = True
) -> None:
    """Fill every slot with random values: normal with deviation 0.02, around 1 for norm weights and 0 elsewhere.

    They are drawn on `device` and depend on the kind of device, `seed` and the tensor's name alone.
    """
    plan = [(dummy_tensor(name, slot.shape, seed, device), slot) for name, slot in slots.items()]
    _fill(plan, "Making random weights", show_progress)


def has_quantized_weights(source: ModelSource) -> bool:
    """Whether the checkpoint holds quantised matrices that can be kept as they are."""
    if source.kind != "gguf":
        return read_quantization(source.path) is not None
    return any(tensor.type in QUANTIZED_TYPES for tensor in GGUFFile(source.path).tensors.values())


def dummy_tensor(name: str, shape: tuple[int, ...], seed: int, device: torch.device) -> CheckpointTensor:
    """A tensor of random float32 values, made when they are asked for."""

    def dense() -> torch.Tensor:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        return torch.empty(shape, device=device).normal_(mean, _DUMMY_STD, generator=generator)

    return CheckpointTensor(name, shape, dense)


def _match(
    tensors: Mapping[str, CheckpointTensor], slots: Mapping[str, WeightSlot], *, tied: bool, where: str
) -> list[tuple[CheckpointTensor, WeightSlot]]:
    """Pair tensors with slots; in a model with tied embeddings the head's slot, if there is one, gets the embedding."""
    source_names = {name: _EMBEDDING if tied and name == _HEAD else name for name in slots}
    missing = [name for name in slots if source_names[name] not in tensors]
    unexpected = [name for name in tensors if name not in slots and not _is_ignored(name, tied)]
    misshapen = [
        f"{name} is {list(tensors[source_names[name]].shape)}, expected {list(slot.shape)}"
        for name, slot in slots.items()
        if source_names[name] in tensors and tensors[source_names[name]].shape != slot.shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    if any(problems.values()):
        found = [f"{len(names)} {kind}: {listed(names, _MAX_LISTED)}" for kind, names in problems.items() if names]
        raise WeightsError(f"the tensors in {where} do not fit the model: {'; '.join(found)}")
    return [(tensors[source_names[name]], slot) for name, slot in slots.items()]


def _is_ignored(name: str, tied: bool) -> bool:
    """Whether it is a rotary buffer, which old checkpoints have, or the head of a model with tied embeddings."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == _HEAD)


def _fill(plan: Sequence[tuple[CheckpointTensor, WeightSlot]], title: str, show_progress: bool) -> None:
    for tensor, slot in progress(plan, title, show=show_progress):
        slot.load(tensor)
