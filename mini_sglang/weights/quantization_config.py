"""Reads how a checkpoint's matrices are quantised from `quantization_config`, as the libraries that write it say.

Block sizes, groups and the modules left alone are taken from there, never guessed from shapes; what is not supported is
refused by name. It knows no tensors (`quantization.py` computes with them) and works without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mini_sglang.errors import shorten

_MOST_BLOCK = 2**31  # rows or columns that share a scale: more is a damaged file


class Layout(Enum):
    """The tensors that hold one matrix."""

    SCALED = "scaled"  # one float8 or int8 per weight, and scales
    PACKED = "packed"  # compressed-tensors' int32 words along the inputs, and scales
    AWQ = "awq"  # AutoAWQ's "gemm": int32 words along the outputs
    GPTQ = "gptq"  # int32 words along the inputs, zeros along the outputs
    MXFP4 = "mxfp4"  # two e2m1 in a byte, and exponents of two for groups of 32 inputs (OCP Microscaling Formats 1.0)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a matrix W [out, in] is stored: W = scale * (q - zero), with a scale and a zero for each block of W."""

    layout: Layout
    bits: int
    block: tuple[int | None, int | None] | None  # rows and columns of a block, None: all; no block: a matrix or a row
    is_float: bool = False  # q is float8 e4m3, else an integer
    symmetric: bool = True  # zero is 0, of packed integers the middle of their range
    reordered: bool = False  # a tensor says which group each column belongs to
    zeros_less_one: bool = False  # GPTQ's first format stores zero - 1


@dataclass(frozen=True)
class Quantization:
    """Which modules are quantised, and how. The first of `targets` that fits a module's name counts."""

    method: str
    targets: tuple[tuple[re.Pattern[str], Scheme], ...]
    ignored: tuple[re.Pattern[str], ...]

    def scheme_of(self, module: str) -> Scheme | None:
        """How the module with this path in the checkpoint is quantised; None if it is not."""
        if any(pattern.fullmatch(module) for pattern in self.ignored):
            return None
        return next((scheme for pattern, scheme in self.targets if pattern.fullmatch(module)), None)


def quantization_from_hf(config: Mapping[str, Any]) -> Quantization | None:
    """The quantisation that a config.json states, or None. Raises ValueError that names what is not supported."""
    stated = config.get("quantization_config")
    if not stated:
        return None
    method = str(stated.get("quant_method", "unknown")) if isinstance(stated, Mapping) else "unknown"
    if method not in _READERS:
        supported = ", ".join(sorted(_READERS))
        raise ValueError(
            f"quantization_config (quant_method {shorten(method)}) is not supported; supported are {supported}; "
            "or use an unquantised checkpoint or a GGUF file"
        )
    try:
        return _READERS[method]({key: value for key, value in stated.items() if value is not None})
    except ValueError as error:
        raise ValueError(f"quantization_config (quant_method {method!r}): {error}") from error


# -- the methods -------------------------------------------------------------------------------------------------------


def _read_fp8(stated: Mapping[str, Any]) -> Quantization:
    """Float8 with scales per block (`weight_block_size`), or else per matrix or per row, which the config leaves open.

    Activations may be static or dynamic: they stay in the engine's dtype.
    """
    _expect(stated, "fmt", {"e4m3", "float8_e4m3fn"}, "e4m3")
    _expect(stated, "expert_dtype", {"fp8"}, "fp8")
    block = _block(stated, "weight_block_size") if "weight_block_size" in stated else None
    ignored = _strings(stated, "modules_to_not_convert") + _strings(stated, "ignored_layers")
    scheme = Scheme(layout=Layout.SCALED, bits=8, is_float=True, block=block)
    return Quantization("fp8", ((_ANY_MODULE, scheme),), _within(ignored))


def _read_awq(stated: Mapping[str, Any]) -> Quantization:
    _expect(stated, "version" if "version" in stated else "format", {"gemm"}, "gemm")
    _expect(stated, "bits" if "bits" in stated else "w_bit", {"4"}, "4")
    if stated.get("zero_point", True) is not True:
        raise ValueError(f"zero_point {shorten(stated['zero_point'])} is not supported; only true is")
    group = _group(stated, "group_size" if "group_size" in stated else "q_group_size")
    scheme = Scheme(layout=Layout.AWQ, bits=4, block=(1, group), symmetric=False)
    return Quantization("awq", ((_ANY_MODULE, scheme),), _within(_strings(stated, "modules_to_not_convert")))


def _read_gptq(stated: Mapping[str, Any]) -> Quantization:
    for key in ("dynamic", "is_marlin_format", "use_marlin_format"):
        if stated.get(key):
            raise ValueError(f"{key} {shorten(stated[key])} is not supported")
    bits = int(_expect(stated, "bits", {"4", "8"}))
    version = _expect(stated, "checkpoint_format" if "checkpoint_format" in stated else "format", _GPTQ_FORMATS, "gptq")
    _expect(stated, "pack_dtype", {"int32"}, "int32")
    scheme = Scheme(
        layout=Layout.GPTQ,
        bits=bits,
        block=(1, _group(stated, "group_size")),
        symmetric=_flag(stated, "sym"),
        reordered=_flag(stated, "desc_act"),
        zeros_less_one=version == "gptq",
    )
    return Quantization("gptq", ((_ANY_MODULE, scheme),), _within(_strings(stated, "modules_to_not_convert")))


def _read_mxfp4(stated: Mapping[str, Any]) -> Quantization:
    """gpt-oss's: the experts' matrices alone are quantised; modules left alone may be named with a * for the layer."""
    named = _strings(stated, "modules_to_not_convert")
    ignored = tuple(re.compile(rf"(.*\.)?{re.escape(name).replace(_STAR, '[^.]*')}(\..*)?") for name in named)
    return Quantization("mxfp4", ((_ANY_MODULE, _MXFP4),), ignored)


def _read_compressed_tensors(stated: Mapping[str, Any]) -> Quantization:
    """Groups of modules, each with its scheme. A module named or matched by a pattern comes before a class of modules.

    Quantised activations and a quantised KV cache are passed over: both stay in the engine's dtype.
    """
    sparsity = stated.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise ValueError(f"sparsity_config {shorten(sparsity)} is not supported")
    if stated.get("transform_config"):
        raise ValueError("transform_config is not supported")
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping):
        raise ValueError(f"config_groups must be a mapping of groups, got {shorten(groups)}")
    named: list[tuple[re.Pattern[str], Scheme]] = []
    classes: list[tuple[re.Pattern[str], Scheme]] = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise ValueError(f"config_groups {shorten(name)} must be a mapping, got {shorten(group)}")
        if group.get("weights") is None:  # activations alone
            continue
        scheme = _compressed_scheme(group, group.get("format") or stated.get("format"))
        for target in _strings(group, "targets"):
            (classes if target in _CLASSES else named).append((_module_pattern(target), scheme))
    ignored = tuple(_module_pattern(target) for target in _strings(stated, "ignore"))
    return Quantization("compressed-tensors", (*named, *classes), ignored)


def _compressed_scheme(group: Mapping[str, Any], layout: object) -> Scheme:
    if str(layout) not in _COMPRESSED_FORMATS:
        supported = ", ".join(_COMPRESSED_FORMATS)
        raise ValueError(f"format {shorten(layout)} is not supported; supported are {supported}")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise ValueError(f"weights must be a mapping, got {shorten(weights)}")
    weights = {key: value for key, value in weights.items() if value is not None}
    if layout == "mxfp4-pack-quantized":
        _expect(weights, "num_bits", {"4"}, "4")
        _expect(weights, "type", {"float"}, "float")
        _expect(weights, "group_size", {"32"}, "32")
        return _MXFP4
    packed = layout == "pack-quantized"
    kind = _expect(weights, "type", {"int"} if packed else {"int", "float"}, "int")
    bits = int(_expect(weights, "num_bits", {"8"} if kind == "float" else {"4", "8"}, "8"))
    if weights.get("dynamic"):
        raise ValueError("weights that are quantised dynamically are not supported")
    order = _expect(weights, "actorder", _STAYS_IN_ORDER | _REORDERS, "none")
    return Scheme(
        layout=Layout.PACKED if packed else Layout.SCALED,
        bits=bits,
        block=_strategy_block(weights),
        is_float=kind == "float",
        symmetric=_flag(weights, "symmetric", default=True),
        reordered=packed and order in _REORDERS,
    )


def _strategy_block(weights: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The block of a strategy. Where none is stated it follows from the group size, as in compressed-tensors."""
    stated_group = weights.get("group_size")
    implied = "tensor" if stated_group is None else "channel" if stated_group == -1 else "group"
    match _expect(weights, "strategy", {"tensor", "channel", "group", "block"}, implied):
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "group":
            return 1, _group(weights, "group_size")
        case _:
            return _block(weights, "block_structure")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}
_GPTQ_FORMATS = {"gptq", "gptq_v2"}
_COMPRESSED_FORMATS = (
    "float-quantized",
    "int-quantized",
    "mxfp4-pack-quantized",
    "naive-quantized",
    "pack-quantized",
)
_MXFP4 = Scheme(layout=Layout.MXFP4, bits=4, block=(1, 32), is_float=True)
_STAR = re.escape("*")
_STAYS_IN_ORDER, _REORDERS = {"none", "weight", "static", "false"}, {"group", "dynamic", "true"}


# -- names of modules --------------------------------------------------------------------------------------------------

_ANY_MODULE = re.compile(r".*")
_CLASSES = {"Linear": r"(?!(.*\.)?embed_tokens$).*", "Embedding": r"(.*\.)?embed_tokens"}


def _module_pattern(target: str) -> re.Pattern[str]:
    """compressed-tensors' way to name modules: a class, `re:` and how a path begins, or a path."""
    if target in _CLASSES:
        return re.compile(_CLASSES[target])
    if not target.startswith("re:"):
        return re.compile(re.escape(target))
    try:
        return re.compile(f"(?:{target.removeprefix('re:')}).*")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{shorten(target)} is not a valid pattern: {error}") from error


def _within(names: list[str]) -> tuple[re.Pattern[str], ...]:
    """The modules of these paths or partial paths, and all that they hold."""
    return tuple(re.compile(rf"(.*\.)?{re.escape(name)}(\..*)?") for name in names)


# -- fields ------------------------------------------------------------------------------------------------------------


def _expect(stated: Mapping[str, Any], key: str, supported: set[str], default: str | None = None) -> str:
    """The value of a key, in lower case. Raises ValueError that names it if it is absent or none of `supported`."""
    if key not in stated and default is None:
        raise ValueError(f"has no {key!r}")
    value = str(stated.get(key, default)).lower()
    if value not in supported:
        raise ValueError(f"{key} {shorten(stated[key])} is not supported; supported are {', '.join(sorted(supported))}")
    return value


def _flag(stated: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = stated.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {shorten(value)}")
    return value


def _group(stated: Mapping[str, Any], key: str) -> int | None:
    """The inputs that share a scale; None, written as -1: all of them."""
    value = stated.get(key)
    return None if value == -1 else _size(key, value)


def _block(stated: Mapping[str, Any], key: str) -> tuple[int, int]:
    value = stated.get(key)
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{key} must be two numbers, got {shorten(value)}")
    return _size(key, value[0]), _size(key, value[1])


def _size(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_BLOCK:
        raise ValueError(f"{key} must be of integers of at least 1, got {shorten(value)}")
    return value


def _strings(stated: Mapping[str, Any], key: str) -> list[str]:
    value = stated.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{key} must be a list of names, got {shorten(value)}")
    return value
