"""Writes a folder of safetensors while its tensors are made, one after the other: only headers are known ahead.

It knows the file format and how a folder is cut into files; what the tensors are is its caller's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from mini_sglang.weights.safetensors import INDEX_NAME, SINGLE_NAME

MOST_BYTES = 5_000_000_000  # of a file, as transformers cuts them; a single tensor may be larger
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class Output:
    """Tensors that are made together: what they will be (on the meta device, say), and how to make them."""

    forms: Mapping[str, torch.Tensor]  # by name; only shapes and dtypes count
    make: Callable[[], Mapping[str, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(form.nbytes for form in self.forms.values())


def write_safetensors(
    folder: Path,
    outputs: Sequence[Output],
    *,
    most_bytes: int = MOST_BYTES,
    watched: Callable[[Sequence[Output]], Iterable[Output]] = iter,
) -> int:
    """Write all outputs, in one file or in several with an index, and return the bytes of all tensors.

    `watched` goes through the outputs, and may show how far it is.
    """
    shards = _shards(outputs, most_bytes)
    total = sum(output.nbytes for output in outputs)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE_NAME]
    rest = iter(watched(outputs))
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, islice(rest, len(shard)))
    for output in rest:  # none: but what shows progress ends here
        raise AssertionError(output)
    if len(shards) > 1:
        weight_map = {
            tensor: name for name, shard in zip(names, shards, strict=True) for o in shard for tensor in o.forms
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def _shards(outputs: Sequence[Output], most_bytes: int) -> list[list[Output]]:
    shards: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if shards[-1] and size + output.nbytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.nbytes
    return shards


def _write_file(path: Path, shard: Sequence[Output], outputs: Iterator[Output]) -> None:
    """A file is the length of its header, the header as JSON, padded to 8 bytes, and the tensors in its order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in shard:
        for name, form in output.forms.items():
            start, end = end, end + form.nbytes
            header[name] = {"dtype": _DTYPES[form.dtype], "shape": list(form.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for output in outputs:
            made = output.make()
            for name, form in output.forms.items():
                tensor = made[name]
                assert (tensor.shape, tensor.dtype) == (form.shape, form.dtype), name
                file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
