"""`mini-sglang quantize MODEL OUT`: writes a model with weights of few bits, in compressed-tensors' format.

The matrices of attention, MLPs and experts are rounded to the nearest value, one at a time; everything else stays as it
is. vLLM reads the folder as well. Nothing is calibrated: this module knows weights and no text.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from mini_sglang.weights.experts import published_name
from mini_sglang.weights.hf_config import read_json, read_quantization
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.model_config import load_model_config
from mini_sglang.weights.progress import progress
from mini_sglang.weights.quantization import open_folder
from mini_sglang.weights.quantize import quantize_fp8, quantize_int4
from mini_sglang.weights.quantized_weight import QuantizedWeight
from mini_sglang.weights.safetensors_writer import MOST_BYTES, Output, write_safetensors
from mini_sglang.weights.tensor import CheckpointTensor, WeightsError, listed

Format = Literal["fp8", "fp8-block", "w4a16"]
Tensors = dict[str, torch.Tensor]

_QUANTIZED = re.compile(r".*\blayers\.(?P<layer>\d+)\..*\b(?P<part>(?:[qkvo]|gate|up|down)_proj|w[123])\.weight")
_ORDER = (*(f"{part}_proj" for part in "qkvo"), "gate_proj", "up_proj", "down_proj")
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # as Mixtral calls them
_WORST = 3  # matrices to name
_BLOCK = 128  # rows and inputs that share a scale in fp8-block
_GROUP_SIZES = (128, 64, 32)  # inputs that share a scale in w4a16: the most that fit all matrices
_SLAB = 1 << 21  # weights to quantise at a time: bounds the temporaries
_NOT_COPIED = ("config.json", *(f"*.{ending}" for ending in ("safetensors", "index.json", "bin", "pt", "pth", "gguf")))
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _Method:
    """One way to quantise: what becomes of a matrix, the tensors that hold it, and what config.json says of both."""

    words: str
    quantize: Callable[..., QuantizedWeight]  # (w, scale_dtype=...)
    parts: Callable[[QuantizedWeight], Tensors]  # by name within the module
    layout: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = None
    multiple: int = 1  # of which the inputs of a matrix must be

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        group = {
            "targets": ["Linear"],
            "weights": self.weights,
            "input_activations": self.activations,
            "output_activations": None,
            "format": self.layout,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


@dataclass
class Report:
    """What was written: by matrix the squares of its weights and of the errors, summed, and sizes in bytes."""

    scheme: str  # how matrices are stored, in a few words
    bytes_before: int
    bytes_after: int = 0
    not_quantized: list[str] = field(default_factory=list)  # matrices that would be, but for their number of inputs
    weights: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def error(self, names: Sequence[str]) -> float:
        """The root mean square of the error of these matrices, relative to that of their weights."""
        weights = sum(self.weights[name] for name in names)
        return math.sqrt(sum(self.errors[name] for name in names) / weights) if weights else 0.0

    def add(self, name: str, w: torch.Tensor, stored: QuantizedWeight) -> None:
        error = stored.dense().sub_(w)
        self.weights[name] = self.weights.get(name, 0.0) + float(torch.linalg.vector_norm(w)) ** 2
        self.errors[name] = self.errors.get(name, 0.0) + float(torch.linalg.vector_norm(error)) ** 2


def quantize_model(
    source: ModelSource, out: Path, to: Format, *, show_progress: bool = True, most_bytes: int = MOST_BYTES
) -> Report:
    """Write the model to the folder `out`, which must not exist or be empty; config.json comes last.

    Scales are of the dtype that the matrix was. Raises ValueError for what cannot be quantised, and WeightsError for
    tensors that cannot be read or hold what is no number.
    """
    config = _read_config(source)
    architecture = load_model_config(source).architecture
    if architecture == "gpt_oss":
        raise ValueError(f"model {source.name!r}: quantising gpt_oss is not supported; it is published in MXFP4")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder")
    found = open_folder(source.path, names=())
    tensors = {published_name(name, architecture): tensor for name, tensor in found.items()}
    matrices = {name for name, tensor in tensors.items() if len(tensor.shape) == 2 and _QUANTIZED.fullmatch(name)}
    method = _METHODS[to](sorted({tensors[name].shape[1] for name in matrices}))
    report = Report(method.words, sum(_form(tensor).nbytes for tensor in tensors.values()))
    outputs, ignored = [], ["lm_head"]
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if name in matrices and tensor.shape[1] % method.multiple == 0:
            outputs.append(_quantized(module, tensor, method, report))
            continue
        outputs.append(Output({name: _form(tensor)}, partial(_unchanged, name, tensor)))
        if name in matrices:
            report.not_quantized.append(module)
        if len(tensor.shape) == 2 and not module.endswith(("lm_head", "embed_tokens")):
            ignored.append(module)
    if len(report.not_quantized) == len(matrices):
        raise ValueError(f"model {source.name!r} has no matrix that {to} could quantise")
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # several would wait for each other after every one of many short operations
    bar = partial(progress, title=f"Quantising {source.name}", show=show_progress)
    report.bytes_after = write_safetensors(out, outputs, most_bytes=most_bytes, watched=bar)
    _copy_other_files(source.path, out)
    config["quantization_config"] = method.config(ignored)
    (out / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


def _read_config(source: ModelSource) -> dict[str, Any]:
    if source.kind == "gguf":
        raise ValueError(
            f"model {source.name!r} is a GGUF file, which holds quantised weights or lacks config.json; "
            "give the folder of safetensors that it was made from"
        )
    if read_quantization(source.path) is not None:
        raise ValueError(
            f"model {source.name!r} is quantised already, and to quantise it again would add to its error; "
            "give the model that it was made from"
        )
    return read_json(source.path / "config.json")


def _copy_other_files(folder: Path, out: Path) -> None:
    """The tokenizer, the chat templates, the licence: every file that is neither weights nor config.json."""
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.is_file() and not any(path.match(pattern) for pattern in _NOT_COPIED):
            target = out / path.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


# -- one tensor --------------------------------------------------------------------------------------------------------


def _quantized(module: str, tensor: CheckpointTensor, method: _Method, report: Report) -> Output:
    dtype = _FLOATS[tensor.dtype]

    def named(stored: QuantizedWeight) -> Tensors:
        parts = method.parts(stored)
        parts["weight_scale"] = parts["weight_scale"].to(dtype).contiguous()
        return {f"{module}.{part}": value for part, value in parts.items()}

    def make() -> Tensors:
        slabs = []
        for w in _slabs(tensor.dense()):
            stored = method.quantize(w, scale_dtype=dtype)
            if not stored.scale.isfinite().all():
                raise WeightsError(f"{tensor.name} holds values that are infinite or not numbers")
            report.add(module, w, stored)
            slabs.append(stored)
        return named(QuantizedWeight.stacked(slabs))

    return Output(named(method.quantize(_form(tensor), scale_dtype=dtype)), make)


def _slabs(w: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rows of w, as float32, that blocks do not cross."""
    rows = max(1, _SLAB // (w.shape[1] * _BLOCK)) * _BLOCK
    return (w[start : start + rows].float() for start in range(0, w.shape[0], rows))


def _unchanged(name: str, tensor: CheckpointTensor) -> Tensors:
    return {name: tensor.dense()}


def _form(tensor: CheckpointTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=_FLOATS[tensor.dtype], device="meta")


# -- the formats -------------------------------------------------------------------------------------------------------

_STATIC = {"symmetric": True, "dynamic": False}
_DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}


def _fp8(sizes: Sequence[int]) -> _Method:
    return _Method(
        "float8, a scale for each output",
        quantize_fp8,
        lambda stored: {"weight": stored.q, "weight_scale": stored.scale},
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel", **_STATIC},
        {"strategy": "token", **_DYNAMIC},
    )


def _fp8_block(sizes: Sequence[int]) -> _Method:
    return _Method(
        f"float8, a scale for each block of {_BLOCK} by {_BLOCK}",
        partial(quantize_fp8, block=(_BLOCK, _BLOCK)),
        lambda stored: {"weight": stored.q, "weight_scale": stored.scale[::_BLOCK]},
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [_BLOCK, _BLOCK], **_STATIC},
        {"strategy": "group", "group_size": _BLOCK, **_DYNAMIC},
    )


def _w4a16(sizes: Sequence[int]) -> _Method:
    """One size of groups for all matrices, as kernels for stacked ones and for experts need it."""
    smallest = _GROUP_SIZES[-1]
    fitting = [size for size in sizes if size % smallest == 0]
    group = next(group for group in _GROUP_SIZES if all(size % group == 0 for size in fitting))
    return _Method(
        f"4 bits, a scale for each {group} inputs",
        partial(quantize_int4, group_size=group),
        pack_int4,
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, **_STATIC},
        multiple=smallest,
    )


def pack_int4(stored: QuantizedWeight) -> Tensors:
    """The tensors of a matrix in 4 bits as compressed-tensors has them: eight weights to a word, the first lowest."""
    octets = stored.q[:, 0::2] | stored.q[:, 1::2] << 4
    shape = torch.tensor(stored.q.shape, dtype=torch.int64)
    return {"weight_packed": octets.view(torch.int32), "weight_scale": stored.scale, "weight_shape": shape}


_METHODS: Mapping[Format, Callable[[Sequence[int]], _Method]] = {
    "fp8": _fp8,
    "fp8-block": _fp8_block,
    "w4a16": _w4a16,
}  # from the inputs that matrices have


# -- what is shown -----------------------------------------------------------------------------------------------------


def show_report(report: Report, console: Console | None = None) -> None:
    """The error of each layer by kind of matrix, of which all experts of a layer are one, and the worst matrices."""
    console = console or Console()
    cells: dict[tuple[int, str], list[str]] = {}
    for module in report.errors:
        match = _QUANTIZED.fullmatch(f"{module}.weight")
        assert match is not None
        cells.setdefault((int(match["layer"]), _PARTS.get(match["part"], match["part"])), []).append(module)
    parts = [part for part in _ORDER if any(part == key[1] for key in cells)]
    table = Table(title="Root mean square of the error, in % of the weights'", title_justify="left")
    for column in ("layer", *(part.removesuffix("_proj") for part in parts), "all"):
        table.add_column(column, justify="right")
    for layer in sorted({layer for layer, _ in cells}):
        row = [cells.get((layer, part), []) for part in parts]
        whole = [name for names in row for name in names]
        table.add_row(str(layer), *(_percent(report, names) for names in (*row, whole)))
    console.print(table)
    for module in sorted(report.errors, key=lambda module: report.error([module]))[-_WORST:]:
        console.print(f"{_percent(report, [module])} % {module}", highlight=False, soft_wrap=True)
    console.print(
        f"{_percent(report, list(report.errors))} % all {len(report.errors)} matrices", highlight=False, soft_wrap=True
    )
    if report.not_quantized:
        number, names = len(report.not_quantized), listed(report.not_quantized)
        console.print(
            f"Not quantised, as their inputs fill no groups: {number} matrices, {names}",
            highlight=False,
            soft_wrap=True,
        )
    before, after = (size / 1e6 for size in (report.bytes_before, report.bytes_after))
    console.print(
        f"{report.scheme}, rounded to nearest: {before:,.1f} MB became {after:,.1f} MB", highlight=False, soft_wrap=True
    )


def _percent(report: Report, names: Sequence[str]) -> str:
    return f"{100 * report.error(names):.2f}" if names else ""
