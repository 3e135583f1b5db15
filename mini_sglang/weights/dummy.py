"""Reproducible random values in place of a checkpoint's. It knows names and shapes of slots, and no model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from mini_sglang.weights.filling import fill_slots
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot

_STD = 0.02


def load_dummy_weights(
    slots: Mapping[str, WeightSlot], *, seed: int, device: torch.device, show_progress: bool = True
) -> None:
    """Fill every slot with random values: normal with deviation 0.02, around 1 for norm weights and 0 elsewhere.

    They are drawn on `device` and depend on the kind of device, `seed` and the tensor's name alone.
    """
    plan = [(dummy_tensor(name, slot.shape, seed, device), slot) for name, slot in slots.items()]
    fill_slots(plan, "Making random weights", show_progress=show_progress)


def dummy_tensor(name: str, shape: tuple[int, ...], seed: int, device: torch.device) -> CheckpointTensor:
    """A tensor of random float32 values, made when they are asked for."""

    def dense() -> torch.Tensor:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        return torch.empty(shape, device=device).normal_(mean, _STD, generator=generator)

    return CheckpointTensor(name, shape, dense)
