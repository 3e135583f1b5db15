"""The tensors of a folder of safetensors, in one file or in shards.

It never reads pickle: other weight formats are not looked at. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mini_sglang.weights.tensor import CheckpointTensor, WeightsError, listed

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def open_safetensors(folder: Path) -> dict[str, CheckpointTensor]:
    """Every tensor of the folder's safetensors by name, of whatever dtype; it reads the headers, not the values.

    Raises WeightsError for missing shards and unreadable files, FileNotFoundError for a folder without safetensors.
    """
    tensors: dict[str, CheckpointTensor] = {}
    for path in shard_paths(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    view, read = file.get_slice(name), partial(_read, path, name)
                    tensors[name] = CheckpointTensor(name, tuple(view.get_shape()), read, dtype=view.get_dtype())
        except SafetensorError as error:
            raise WeightsError(f"{path} {_damage(path)}: {error}") from error
    _check_index(folder, tensors)
    return tensors


def _damage(path: Path) -> str:
    """What is wrong with a file that cannot be read, as far as its first bytes tell."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        if size < 8 or not header:
            return f"is no safetensors file, or cut short: it holds {size} bytes"
        if file.read(1) != b"{":
            return "is no safetensors file, or its header is damaged"
    if header + 8 > size:
        return f"is cut short: its header ends at byte {header + 8}, the file at {size}"
    return "is cut short or its header is damaged"


def _check_index(folder: Path, tensors: Mapping[str, CheckpointTensor]) -> None:
    """Raise WeightsError, naming the file, if a shard lacks what the index says it holds and no other one has it."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return
    lacking: dict[str, list[str]] = {}
    for name, shard in _weight_map(index).items():
        if name not in tensors:
            lacking.setdefault(shard, []).append(name)
    if lacking:
        found = [f"{folder / shard} lacks {len(names)} tensors: {listed(names)}" for shard, names in lacking.items()]
        raise WeightsError(f"by {INDEX_NAME}, {'; '.join(found)} (is a file another model's, or there twice?)")


def shard_paths(folder: Path) -> list[Path]:
    """The files that hold the weights: those that the index names, else the single file, else every safetensors."""
    index = folder / INDEX_NAME
    if index.is_file():
        paths = [folder / name for name in sorted(set(_weight_map(index).values()))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise WeightsError(f"{folder} lacks {len(missing)} of {len(paths)} shards: {', '.join(missing)}")
        return paths
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    # "consolidated" files repeat the same weights under another vendor's names.
    paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.safetensors file")
    return paths


def _weight_map(index: Path) -> dict[str, str]:
    """The name of the file that holds each tensor."""
    try:
        names: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WeightsError(f"{index} is not a valid index of safetensors: {error!r}") from error
    outside = [name for name in names.values() if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise WeightsError(f"{index} names files outside its folder: {', '.join(map(str, outside))}")
    return names


def _read(path: Path, name: str) -> torch.Tensor:
    """The values. Each tensor has its own mapping of the file, whose pages leave memory with the tensor."""
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor
