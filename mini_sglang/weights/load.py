"""Brings a checkpoint's tensors to their slots, if each fits one.

It knows names and shapes; what a slot does with its tensor (shard, fuse, pack, convert) is the model's business.
"""

from __future__ import annotations

from collections.abc import Mapping

from mini_sglang.model_config import ModelConfig
from mini_sglang.weights.filling import fill_slots
from mini_sglang.weights.gguf import QUANTIZED_TYPES, open_gguf
from mini_sglang.weights.hf_config import read_quantization
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.quantization import open_folder
from mini_sglang.weights.tensor import CheckpointTensor, WeightsError, WeightSlot, listed

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_MAX_LISTED = 20  # names per kind of problem in an error message


def load_weights(
    source: ModelSource, config: ModelConfig, slots: Mapping[str, WeightSlot], *, show_progress: bool = True
) -> None:
    """Fill every slot from the checkpoint tensor of its name.

    Raises WeightsError, before any slot is filled, that lists all missing, unexpected and misshapen tensors.
    """
    is_gguf = source.kind == "gguf"
    tensors = open_gguf(source.gguf, config) if is_gguf else open_folder(source.path, slots)
    plan = _match(tensors, slots, tied=config.tie_word_embeddings, where=str(source.path))
    fill_slots(plan, f"Loading {source.name}", show_progress=show_progress)


def has_quantized_weights(source: ModelSource) -> bool:
    """Whether the checkpoint holds quantised matrices that can be kept as they are."""
    if source.kind != "gguf":
        return read_quantization(source.path) is not None
    return any(tensor.type in QUANTIZED_TYPES for tensor in source.gguf.tensors.values())


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
