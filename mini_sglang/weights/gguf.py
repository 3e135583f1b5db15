"""The tensors of a GGUF file under Hugging Face names, in Hugging Face's row order, dequantised or as they are stored.

`quantized` returns blocks as they are stored: those of Q4_0 and Q4_1 are unpacked here, the others in `gguf_blocks.py`.
It knows no model, only which rows llama.cpp reorders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from mini_sglang.model_config import ModelConfig
from mini_sglang.weights.chunks import computed_tensor
from mini_sglang.weights.gguf_blocks import BLOCK_TYPES, unpack_blocks
from mini_sglang.weights.gguf_file import GGUFFile, TensorInfo
from mini_sglang.weights.gguf_types import TensorType
from mini_sglang.weights.quantized_weight import QuantizedWeight
from mini_sglang.weights.tensor import CheckpointTensor, WeightsError, listed

_FLOATS = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}
FOUR_BIT_TYPES = frozenset({TensorType.Q4_0, TensorType.Q4_1})
QUANTIZED_TYPES = FOUR_BIT_TYPES | set(BLOCK_TYPES)
_SUPPORTED = QUANTIZED_TYPES | set(_FLOATS)
_CHUNK_BYTES = 1 << 18  # stored bytes to dequantise at a time: bounds the temporaries, which are several times larger
_GROUP_SIZE = 32  # weights per block of Q4_0 and Q4_1

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# Rotary factors of Llama 3.1: part of the configuration (see gguf_config.py), not a weight.
_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})


def open_gguf(file: GGUFFile, config: ModelConfig) -> dict[str, CheckpointTensor]:
    """Every tensor of the file by its Hugging Face name, or by its GGUF name if it has none; nothing is read yet.

    Raises WeightsError that lists the tensors whose type cannot be dequantised.
    """
    refused = [f"{t.name} ({t.type.name})" for t in file.tensors.values() if t.type not in _SUPPORTED]
    if refused:
        raise WeightsError(
            f"{file.path}: quantisation of {len(refused)} tensors is not supported: {listed(refused)}; "
            f"supported are {', '.join(sorted(kind.name for kind in _SUPPORTED))}"
        )
    permuted = _permuted_heads(config)
    tensors: dict[str, CheckpointTensor] = {}
    for info in file.tensors.values():
        if info.name not in _NOT_WEIGHTS:
            name = hf_name(info.name)
            if len(info.shape) == 3:  # all experts of a layer
                prefix, _, part = name.partition(".experts.")
                parts = [f"{prefix}.experts.{expert}.{part}" for expert in range(info.shape[0])]
                tensors |= {part: _tensor(file, info, part, expert=index) for index, part in enumerate(parts)}
            else:
                tensors[name] = _tensor(file, info, name, permuted.get(_module(name)))
    return tensors


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _tensor(
    file: GGUFFile, info: TensorInfo, name: str, heads: int | None = None, expert: int | None = None
) -> CheckpointTensor:
    """One tensor, or with `expert` that expert's part of one.

    With `heads`, the file has rows in llama.cpp's interleaved rotary order, and they are returned half-split.
    """
    shape = info.shape if expert is None else info.shape[1:]

    def read() -> npt.NDArray[np.uint8]:
        """The stored bytes by row, [rows, bytes per row]. Blocks never span rows, so rows can be reordered as bytes."""
        rows = np.asarray(file.read(info))
        if expert is not None:
            return rows[expert * shape[0] :][: shape[0]]
        if heads is None:
            return rows
        if len(shape) == 1:  # a bias: one element is one row
            rows = rows.reshape(shape[0], -1)
        return rows[half_split_order(rows.shape[0], heads)]

    def chunks(start: int, stop: int) -> Iterator[torch.Tensor]:
        rows = read().reshape(shape[0], -1)
        step = max(1, _CHUNK_BYTES // rows.shape[1])
        for at in range(start, stop, step):
            chunk = rows[at : min(at + step, stop)]
            yield _values(chunk, info.type).reshape(len(chunk), *shape[1:])

    return computed_tensor(name, shape, chunks, lambda: _stored(read(), info.type))


def _values(rows: npt.NDArray[np.uint8], kind: TensorType) -> torch.Tensor:
    """Dequantise some rows."""
    stored = _stored(rows, kind)
    return torch.from_numpy(rows).view(_FLOATS[kind]).float() if stored is None else stored.dense()


def _stored(rows: npt.NDArray[np.uint8], kind: TensorType) -> QuantizedWeight | None:
    """Stored bytes by row → the same blocks unpacked; None if they are of floats"""
    if kind in BLOCK_TYPES:
        return unpack_blocks(rows, kind)
    if kind not in FOUR_BIT_TYPES:
        return None
    q, scale, minimum = (torch.from_numpy(array) for array in _unpack(rows, kind))
    return QuantizedWeight(q, scale, minimum, _GROUP_SIZE)


def _unpack(
    rows: npt.NDArray[np.uint8], kind: TensorType
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Unpack rows of 4-bit blocks → q [rows, columns] uint8, scale and minimum [rows, columns / 32] float32.

    A block is fp16 scale d, in Q4_1 also fp16 minimum m, and 16 bytes whose low nibbles are the first 16 weights;
    w = d * q + m in Q4_1 and d * (q - 8) in Q4_0.
    """
    num_floats = 2 if kind is TensorType.Q4_1 else 1
    blocks = rows.reshape(rows.shape[0], -1, 2 * num_floats + _GROUP_SIZE // 2)
    floats = np.ascontiguousarray(blocks[:, :, : 2 * num_floats]).view(np.float16).astype(np.float32)
    scale = floats[:, :, 0].copy()
    minimum = floats[:, :, 1].copy() if num_floats == 2 else scale * np.float32(-8)
    nibbles = blocks[:, :, 2 * num_floats :]
    q = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=-1).reshape(rows.shape[0], -1)
    return q, scale, minimum


def half_split_order(num_rows: int, heads: int) -> npt.NDArray[np.intp]:
    """Indices that turn rows of interleaved rotary pairs (0, 1), (2, 3), … into two halves per head."""
    return np.arange(num_rows).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)


def _permuted_heads(config: ModelConfig) -> Mapping[str, int]:
    """Modules whose rows llama.cpp's converter interleaves, with their head counts: q and k of its LlamaModels."""
    if config.architecture not in ("llama", "mixtral", "smollm3"):
        return {}
    return {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}


def _module(name: str) -> str:
    return name.split(".")[-2] if "." in name else name
