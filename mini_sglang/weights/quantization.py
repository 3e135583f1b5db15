"""The tensors of a folder of safetensors as a model knows them; quantised matrices are dequantised when they load.

`quantization_config.py` says how matrices are stored, this module finds the tensors that make up each one, checks that
they fit, and computes its values in float32, a few rows at a time. It knows no model; shards are cut from dense rows,
so a cut may go through a block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mini_sglang.weights.chunks import computed_tensor
from mini_sglang.weights.experts import name_experts, split_gpt_oss
from mini_sglang.weights.hf_config import read_quantization
from mini_sglang.weights.quantization_config import Layout, Quantization, Scheme
from mini_sglang.weights.quantized_weight import QuantizedWeight
from mini_sglang.weights.safetensors import open_safetensors
from mini_sglang.weights.tensor import CheckpointTensor, WeightsError, listed

logger = logging.getLogger(__name__)

_FLOATS = frozenset({"F32", "F16", "BF16"})
_VOCABULARY_MAPS = ("d2t", "t2d")  # of EAGLE-3 heads: integers and booleans
_CHUNK = 1 << 20  # weights to dequantise at a time: bounds the temporaries
_SCALES = _FLOATS | {"F8_E8M0"}
_INDICES = frozenset({"I32", "I64"})
_MATRIX_PARTS = frozenset({"weight", "weight_packed", "qweight"})  # a module with one that is no float is quantised
# Of activations and of the KV cache, which stay in the engine's dtype.
_PASSED_OVER = frozenset(
    {
        *("input_scale", "input_scale_ub", "input_zero_point", "activation_scale", "output_scale", "output_zero_point"),
        *("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point"),
    }
)

# 2 * what a sign, 2 bits of exponent and 1 of mantissa stand for
_TWICE_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)

Shape = tuple[int, ...]


def open_folder(folder: Path, names: Container[str]) -> dict[str, CheckpointTensor]:
    """Every tensor of a folder of safetensors under the name that a model knows; only headers are read.

    `names` are those that the model has a place for: a bias that is all zeros, as AutoGPTQ adds to every matrix, is
    left out where there is none. Raises WeightsError for files and dtypes that cannot be read, and one that lists the
    quantised matrices whose tensors do not fit their scheme.
    """
    tensors, quantization = split_gpt_oss(open_safetensors(folder)), read_quantization(folder)
    if quantization is not None:
        tensors = _dequantised(tensors, quantization, names, folder)
    maps = [name for name in _VOCABULARY_MAPS if name in names]
    numbers = [tensor for tensor in tensors.values() if tensor.name not in maps]
    refused = [f"{tensor.name} ({tensor.dtype})" for tensor in numbers if tensor.dtype not in _FLOATS]
    if refused:
        unstated = "" if quantization else ", and config.json has no quantization_config"
        raise WeightsError(f"{folder}: dtype is not F32, F16 or BF16{unstated}: {listed(refused)}")
    return name_experts(tensors)


def _dequantised(
    tensors: Mapping[str, CheckpointTensor], quantization: Quantization, names: Container[str], folder: Path
) -> dict[str, CheckpointTensor]:
    """The same tensors, with one `….weight` for the tensors of each quantised matrix."""
    stored = dict(tensors)
    modules = [_split(name)[0] for name, tensor in stored.items() if _is_quantized(tensor)]
    matrices: dict[str, CheckpointTensor] = {}
    problems: list[str] = []
    for module in modules:
        try:
            matrix = _matrix(module, quantization.scheme_of(module), stored)
        except ValueError as error:
            problems.append(f"{module}: {error}")
        else:
            matrices[f"{module}.weight"] = matrix.as_checkpoint_tensor()
            unused = [f"{module}.{part}" for part in _UNUSED[matrix.scheme.layout]]
            for name in (*(part.name for part in matrix.parts.values()), *unused):
                stored.pop(name, None)
            bias = f"{module}.bias"
            if bias in stored and bias not in names and not stored[bias].dense().any():
                del stored[bias]
    if problems:
        method = quantization.method
        raise WeightsError(f"{folder}: {len(problems)} matrices cannot be read as {method}: {listed(problems)}")
    passed_over = [name for name in stored if _split(name)[1] in _PASSED_OVER]
    logger.info(
        "%d matrices (%s) are dequantised while they load; activations and the KV cache are not quantised as the "
        "checkpoint says, and %d scales for them are passed over",
        *(len(matrices), quantization.method, len(passed_over)),
    )
    for name in passed_over:
        del stored[name]
    return {**stored, **matrices}


def _split(name: str) -> tuple[str, str]:
    module, _, part = name.rpartition(".")
    return module, part


def _is_quantized(tensor: CheckpointTensor) -> bool:
    return _split(tensor.name)[1] in _MATRIX_PARTS and tensor.dtype not in _FLOATS


# -- one matrix --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Matrix:
    """The tensors of one quantised matrix, of checked shapes and dtypes."""

    module: str
    scheme: Scheme
    shape: tuple[int, int]  # [out, in], dequantised
    parts: Mapping[str, CheckpointTensor]

    def as_checkpoint_tensor(self) -> CheckpointTensor:
        return computed_tensor(f"{self.module}.weight", self.shape, self._chunks, self._quantized)

    def _chunks(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        try:
            yield from dequantised(self.scheme, self._values(), self.shape, start, stop)
        except ValueError as error:
            raise WeightsError(f"{self.module}: {error}") from error

    def _quantized(self) -> QuantizedWeight | None:
        return None if self.scheme.reordered else as_stored(self.scheme, self._values(), self.shape)

    def _values(self) -> dict[str, torch.Tensor]:
        return {name: part.dense() for name, part in self.parts.items()}


def _matrix(module: str, scheme: Scheme | None, stored: Mapping[str, CheckpointTensor]) -> _Matrix:
    """Find the tensors of a quantised module. Raises ValueError that says what does not fit."""
    if scheme is None:
        raise ValueError("it is quantised, though quantization_config leaves it out")
    parts: dict[str, CheckpointTensor] = {}

    def part(name: str, dtypes: Container[str], *aliases: str) -> CheckpointTensor:
        found = next((stored[f"{module}.{key}"] for key in (name, *aliases) if f"{module}.{key}" in stored), None)
        if found is None:
            raise ValueError(f"{name} is missing")
        if found.dtype not in dtypes:
            raise ValueError(f"{name} is of dtype {found.dtype}")
        parts[name] = found
        return found

    shape, expected = _EXPECTED[scheme.layout](scheme, part)
    for name, shapes in expected.items():
        if parts[name].shape not in shapes:
            raise ValueError(f"{name} is {list(parts[name].shape)}, expected {list(shapes[0])}")
    return _Matrix(module, scheme, shape, parts)


Part = Callable[..., CheckpointTensor]
# The matrix's [out, in], and by part the shapes that its tensors may have.
Expected = tuple[tuple[int, int], dict[str, list[Shape]]]


def _expected_scaled(scheme: Scheme, part: Part) -> Expected:
    out, columns = _two_sizes(part("weight", {"F8_E4M3"} if scheme.is_float else {"I8"}))
    part("weight_scale", _SCALES, "weight_scale_inv")
    if scheme.block is None:
        shapes: list[Shape] = [(out, 1), (out,), (1, 1), (1,), ()]
    else:
        shapes = _grid_shapes(scheme, out, columns)
    if scheme.symmetric:
        return (out, columns), {"weight_scale": shapes}
    part("weight_zero_point", {"I8"})
    return (out, columns), {"weight_scale": shapes, "weight_zero_point": shapes}


def _expected_packed(scheme: Scheme, part: Part) -> Expected:
    out, words = _two_sizes(part("weight_packed", {"I32"}))
    part("weight_scale", _SCALES)
    stated = part("weight_shape", _INDICES)
    sizes = stated.dense().tolist() if stated.shape == (2,) else []
    if len(sizes) != 2 or sizes[0] != out or _ceil(sizes[1] * scheme.bits, 32) != words:
        raise ValueError(f"weight_shape {sizes} does not fit weight_packed of {[out, words]}")
    columns = int(sizes[1])
    grid = _grid(scheme, out, columns)
    expected: dict[str, list[Shape]] = {"weight_scale": _grid_shapes(scheme, out, columns)}
    if not scheme.symmetric and scheme.block == (None, None):
        part("weight_zero_point", {"I8"})
        expected["weight_zero_point"] = expected["weight_scale"]
    elif not scheme.symmetric:
        part("weight_zero_point", {"I32"})
        expected["weight_zero_point"] = [(_ceil(grid[0] * scheme.bits, 32), grid[1])]
    if scheme.reordered:
        part("weight_g_idx", _INDICES)
        expected["weight_g_idx"] = [(columns,)]
    return (out, columns), expected


def _expected_gptq(scheme: Scheme, part: Part) -> Expected:
    words, out = _two_sizes(part("qweight", {"I32"}))
    columns = words * 32 // scheme.bits
    groups = _grid(scheme, out, columns)[1]
    part("qzeros", {"I32"})
    part("scales", _FLOATS)
    expected: dict[str, list[Shape]] = {"qzeros": [(groups, _ceil(out * scheme.bits, 32))], "scales": [(groups, out)]}
    if scheme.reordered:
        part("g_idx", _INDICES)
        expected["g_idx"] = [(columns,)]
    return (out, columns), expected


def _expected_awq(scheme: Scheme, part: Part) -> Expected:
    columns, words = _two_sizes(part("qweight", {"I32"}))
    out = words * 32 // scheme.bits
    groups = _grid(scheme, out, columns)[1]
    part("qzeros", {"I32"})
    part("scales", _FLOATS)
    return (out, columns), {"qzeros": [(groups, words)], "scales": [(groups, out)]}


def _expected_mxfp4(scheme: Scheme, part: Part) -> Expected:
    out, octets = _two_sizes(part("weight_packed", {"U8"}))
    part("weight_scale", {"U8", "F8_E8M0"})
    return (out, 2 * octets), {"weight_scale": [_grid(scheme, out, 2 * octets)]}


_EXPECTED: Mapping[Layout, Callable[[Scheme, Part], Expected]] = {
    Layout.SCALED: _expected_scaled,
    Layout.PACKED: _expected_packed,
    Layout.GPTQ: _expected_gptq,
    Layout.AWQ: _expected_awq,
    Layout.MXFP4: _expected_mxfp4,
}
# What else may stand beside a matrix, and says nothing when the scheme does not ask for it.
_UNUSED: Mapping[Layout, tuple[str, ...]] = {
    Layout.SCALED: ("weight_zero_point",),
    Layout.PACKED: ("weight_g_idx", "weight_zero_point"),
    Layout.GPTQ: ("g_idx",),
    Layout.AWQ: (),
    Layout.MXFP4: (),
}


def _two_sizes(tensor: CheckpointTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ValueError(f"{_split(tensor.name)[1]} must be a matrix, got {list(tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]


def _grid(scheme: Scheme, out: int, columns: int) -> tuple[int, int]:
    """How many blocks there are, downwards and along the inputs; the last ones may be smaller."""
    rows_of_block, columns_of_block = scheme.block or (None, None)
    return _blocks(out, rows_of_block), _blocks(columns, columns_of_block)


def _grid_shapes(scheme: Scheme, out: int, columns: int) -> list[Shape]:
    """The shapes of a tensor with one value for each block; dimensions of one block may be left out."""
    grid = _grid(scheme, out, columns)
    if scheme.block == (None, None):
        return [(1,), (), (1, 1)]
    return [grid, grid[:1]] if grid[1] == 1 else [grid]


def _blocks(size: int, block: int | None) -> int:
    return 1 if block is None else _ceil(size, block)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


# -- values ------------------------------------------------------------------------------------------------------------


def dequantised(
    scheme: Scheme, parts: Mapping[str, torch.Tensor], shape: tuple[int, int], start: int, stop: int
) -> Iterator[torch.Tensor]:
    """scale * (q - zero) for rows from start to stop, a few at a time, float32, from tensors as their layout has them.

    Raises ValueError if columns belong to groups that there are not.
    """
    q, scale, zero, group_of = _UNPACKED[scheme.layout](scheme, parts, shape)
    rows_of_block, columns_of_block = scheme.block or (None if scale.numel() == 1 else 1, None)
    row_of = torch.arange(shape[0]) // (rows_of_block or shape[0])
    width = columns_of_block or shape[1]  # columns that follow each other and share a scale
    if group_of is not None or shape[1] % width:
        group_of, width = torch.arange(shape[1]) // width if group_of is None else group_of, 1
        if not 0 <= int(group_of.min()) <= int(group_of.max()) < scale.shape[1]:
            raise ValueError(f"columns belong to groups outside of the {scale.shape[1]} that there are")

    def spread(values: torch.Tensor, rows: slice) -> torch.Tensor:
        of_rows = values[row_of[rows]]
        return (of_rows if group_of is None else of_rows.index_select(1, group_of))[:, :, None]

    step = max(1, _CHUNK // shape[1])
    for at in range(start, stop, step):
        rows = slice(at, min(at + step, stop))
        chunk = torch.empty(rows.stop - at, shape[1] // width, width)
        chunk.copy_(q[rows].view(chunk.shape))
        chunk -= spread(zero, rows) if isinstance(zero, torch.Tensor) else zero
        chunk *= spread(scale, rows)
        yield chunk.view(-1, shape[1])


def as_stored(scheme: Scheme, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> QuantizedWeight:
    """The same matrix, not dequantised. Its columns must be in order."""
    q, scale, zero, _ = _UNPACKED[scheme.layout](scheme, parts, shape)
    rows_of_block, columns_of_block = scheme.block or (None if scale.numel() == 1 else 1, None)
    row_of = torch.arange(shape[0]) // (rows_of_block or shape[0])
    scale = scale[row_of]
    zero = zero[row_of] if isinstance(zero, torch.Tensor) else torch.full_like(scale, zero)
    if q.dtype == torch.uint8 and scheme.bits == 8:  # to the signed bytes that QuantizedWeight has
        q, zero = (q.to(torch.int16) - 128).to(torch.int8), zero - 128
    minimum = None if not zero.any() else -scale * zero
    return QuantizedWeight(q.contiguous(), scale.contiguous(), minimum, columns_of_block or shape[1])


# q [out, in]; scale and zero with a value for each block; the group of each column, where columns are not in order
Unpacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor | float, torch.Tensor | None]


def _unpacked_scaled(scheme: Scheme, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> Unpacked:
    grid = (-1, 1) if scheme.block is None else _grid(scheme, *shape)
    zero = 0.0 if scheme.symmetric else parts["weight_zero_point"].float().reshape(grid)
    return parts["weight"], parts["weight_scale"].float().reshape(grid), zero, None


def _unpacked_packed(scheme: Scheme, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> Unpacked:
    """Integers and zeros are stored with half their range added, but for the one zero of a whole matrix."""
    half, grid = float(1 << (scheme.bits - 1)), _grid(scheme, *shape)
    q = _unpack(parts["weight_packed"], scheme.bits)[:, : shape[1]].contiguous()
    zero: torch.Tensor | float = half
    if not scheme.symmetric:
        stored = parts["weight_zero_point"]
        alone = scheme.block == (None, None)
        zero = stored.float().reshape(grid) + half if alone else _unpack(stored.T, scheme.bits)[:, : grid[0]].T.float()
    group_of = parts["weight_g_idx"].long() if scheme.reordered else None
    return q, parts["weight_scale"].float().reshape(grid), zero, group_of


def _unpacked_gptq(scheme: Scheme, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> Unpacked:
    q = _unpack(parts["qweight"].T, scheme.bits)
    zero = _gptq_zeros(scheme, parts["qzeros"])[:, : shape[0]].T.float()
    return q, parts["scales"].T.float(), zero, parts["g_idx"].long() if scheme.reordered else None


def _gptq_zeros(scheme: Scheme, words: torch.Tensor) -> torch.Tensor:
    """[groups, out] uint8. In the first format 1 is added to whole words, as it was subtracted, with carries.

    Some writers say that they write the first format and write the second: seen in zeros that are the middle of the
    range already, where quantisation was symmetric.
    """
    zeros = _unpack(words, scheme.bits)
    middle = 1 << (scheme.bits - 1)
    if not scheme.zeros_less_one or (scheme.symmetric and bool((zeros == middle).all())):
        return zeros
    return _unpack(words + sum(1 << shift for shift in range(0, 32, scheme.bits)), scheme.bits)


def _unpacked_awq(scheme: Scheme, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> Unpacked:
    q, zero = (_in_awq_order(_unpack(parts[name], scheme.bits)) for name in ("qweight", "qzeros"))
    return q.T.contiguous(), parts["scales"].T.float(), zero.T.float(), None


def _in_awq_order(values: torch.Tensor) -> torch.Tensor:
    """AutoAWQ packs each eight outputs as 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first; here back in order."""
    return values.view(values.shape[0], -1, 8)[:, :, [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)


def _unpacked_mxfp4(scheme: Scheme, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> Unpacked:
    """Twice the numbers are integers, and half the scales powers of two: so bytes hold both exactly."""
    halves = parts["weight_packed"].flatten(1)
    q = _TWICE_E2M1[torch.stack((halves & 0x0F, halves >> 4), -1).flatten(1).int()]
    return q, parts["weight_scale"].view(torch.float8_e8m0fnu).float() / 2, 0.0, None


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, n] int32 → the integers of 4 or 8 bits in each word, lowest first, [rows, n * 32 / bits] uint8"""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 0x0F, octets >> 4), -1).flatten(1)


_UNPACKED: Mapping[Layout, Callable[[Scheme, Mapping[str, torch.Tensor], tuple[int, int]], Unpacked]] = {
    Layout.SCALED: _unpacked_scaled,
    Layout.PACKED: _unpacked_packed,
    Layout.GPTQ: _unpacked_gptq,
    Layout.AWQ: _unpacked_awq,
    Layout.MXFP4: _unpacked_mxfp4,
}
