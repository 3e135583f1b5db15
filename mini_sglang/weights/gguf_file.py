"""The header of a GGUF file: its metadata, and where each tensor's bytes are.

It is read in one pass (`gguf.GGUFReader` makes several numpy objects per array element: 2.5 s for a 49,152-token
vocabulary, against 0.1 s here). This module does not know what a tensor's bytes mean, nor torch, since the tokenizer is
in the file too. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mini_sglang.errors import shorten
from mini_sglang.weights.gguf_types import TensorType


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor is. `shape` is outermost first, as in torch (the file stores it innermost first)."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """The metadata and the table of tensors of one file. Raises ValueError if it is not a GGUF file, or cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise ValueError(f"{path} is not a GGUF file: it holds {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                reader = _HeaderReader(data, path)
                self.metadata, self.tensors = reader.read()
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise ValueError(f"{path} is one part of a split GGUF; merge the parts first (llama-gguf-split --merge)")
        for tensor in self.tensors.values():
            if tensor.offset + tensor.num_bytes > size:
                end = tensor.offset + tensor.num_bytes
                raise ValueError(f"{path} is cut short: {tensor.name} ends at byte {end}, the file at {size}")

    def read(self, tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        """The stored bytes, [rows, bytes per row] uint8, where a row is the innermost dimension.

        They are mapped copy-on-write for this tensor alone, so that the file's pages leave memory with the tensor.
        """
        rows = math.prod(tensor.shape[:-1])
        shape = (rows, tensor.num_bytes // max(rows, 1))
        return np.memmap(self.path, np.uint8, mode="c", offset=tensor.offset, shape=shape)


# The format's numbers of the types of values.
_SCALARS = dict(enumerate(map(np.dtype, ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))))
_STRING, _ARRAY = 8, 9
_SCALARS |= {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}
_DEFAULT_ALIGNMENT = 32
_LENGTH = struct.Struct("<Q")  # of a string
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4  # of GGML


class _HeaderReader:
    """A cursor over the header. Every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._bytes(4) != b"GGUF":
            raise ValueError(f"{self._path} is not a GGUF file: it does not begin with 'GGUF'")
        version = self._integer("<I")
        if version not in _VERSIONS:
            raise ValueError(f"{self._path} has GGUF version {version}; versions 2 and 3 (little-endian) are supported")
        num_tensors, num_entries = self._integer("<Q"), self._integer("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._integer("<I"))
        raw = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{self._path}: general.alignment must be a positive integer, got {alignment!r}")
        start = -(-self._position // alignment) * alignment
        tensors = {entry[0]: self._tensor_info(*entry, start) for entry in raw}
        if len(tensors) < len(raw):
            names = [entry[0] for entry in raw]
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise ValueError(f"{self._path} is damaged: it has two tensors named {shorten(twice)}")
        return metadata, tensors

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._integer("<I")
        if num_dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{self._path} is damaged: tensor {shorten(name)} has {num_dimensions} dimensions")
        dimensions = [self._integer("<Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(dimensions)), self._integer("<I"), self._integer("<Q")

    def _tensor_info(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> TensorInfo:
        try:
            tensor_type = TensorType(kind)
        except ValueError:
            raise ValueError(f"{self._path}: tensor {name} has the unknown type number {kind}") from None
        block_size, block_bytes = tensor_type.block_size, tensor_type.block_bytes
        if not shape or 0 in shape or shape[-1] % block_size:
            raise ValueError(
                f"{self._path} is damaged: tensor {name} of type {tensor_type.name} has the shape {list(shape)[:8]}, "
                f"and rows must be whole blocks of {block_size}"
            )
        return TensorInfo(name, shape, tensor_type, start + offset, math.prod(shape) // block_size * block_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, length = self._integer("<I"), self._integer("<Q")
            if item_kind == _STRING:
                return self._strings(length)
            if item_kind == _ARRAY:
                raise ValueError(f"{self._path}: arrays of arrays in the metadata are not supported")
            return self._scalars(item_kind, length)
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"{self._path}: unknown metadata type number {kind}")
        item = _SCALARS[kind]
        values: list[Any] = np.frombuffer(self._bytes(count * item.itemsize), item).tolist()
        return values

    def _string(self) -> str:
        return self._bytes(self._integer("<Q")).decode("utf-8", "replace")

    def _strings(self, count: int) -> list[str]:
        """As `_string` many times; a vocabulary and its merges are a hundred thousand."""
        data, size, end = self._data, len(self._data), self._position
        values: list[str] = []
        for _ in range(count):
            start = end + _LENGTH.size
            end = start + _LENGTH.unpack_from(data, end)[0] if start <= size else start
            if end > size:
                raise self._cut_short()
            values.append(data[start:end].decode("utf-8", "replace"))
        self._position = end
        return values

    def _integer(self, layout: str) -> int:
        return int(struct.unpack(layout, self._bytes(struct.calcsize(layout)))[0])

    def _bytes(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise self._cut_short()
        chunk = self._data[self._position : end]
        self._position = end
        return chunk

    def _cut_short(self) -> ValueError:
        return ValueError(f"{self._path} is cut short: its header goes beyond byte {len(self._data)}")
