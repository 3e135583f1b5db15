"""A GGUF file of random weights in Q4_0, 470 MB: as large as a small model that people run, with nothing to download.

A Llama of 780 million weights, with the tokenizer of the file that it is made like. What it says means nothing.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from mini_sglang.weights.gguf_file import GGUFFile

_HIDDEN, _INTERMEDIATE, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 1536, 4096, 28, 24, 8, 64


def write_random_gguf(path: Path, like: GGUFFile) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    _add_config(writer, vocab_size=len(like.metadata["tokenizer.ggml.tokens"]))
    _add_tokenizer(writer, like)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(like.metadata["tokenizer.ggml.tokens"]), _HIDDEN)}
    for layer in range(_LAYERS):
        for part, outputs, inputs in (
            ("attn_q", _HEADS * _HEAD_DIM, _HIDDEN),
            ("attn_k", _KV_HEADS * _HEAD_DIM, _HIDDEN),
            ("attn_v", _KV_HEADS * _HEAD_DIM, _HIDDEN),
            ("attn_output", _HIDDEN, _HEADS * _HEAD_DIM),
            ("ffn_gate", _INTERMEDIATE, _HIDDEN),
            ("ffn_up", _INTERMEDIATE, _HIDDEN),
            ("ffn_down", _HIDDEN, _INTERMEDIATE),
        ):
            shapes[f"blk.{layer}.{part}"] = outputs, inputs
    for name, (outputs, inputs) in shapes.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if name == "token_embd" else gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(f"{name}.weight", _blocks(draw, outputs, inputs, kind), raw_dtype=kind)
    norms = [f"blk.{layer}.{norm}" for layer in range(_LAYERS) for norm in ("attn_norm", "ffn_norm")]
    for name in [*norms, "output_norm"]:
        writer.add_tensor(f"{name}.weight", np.ones(_HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(draw: np.random.Generator, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random blocks of one small scale, [rows, bytes per row] uint8"""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (rows, columns // size, num_bytes), np.uint8)
    blocks[:, :, :2] = np.array([0.002], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def _add_config(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_vocab_size(vocab_size)
    writer.add_context_length(8192)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INTERMEDIATE)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_dimension_count(_HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)


def _add_tokenizer(writer: gguf.GGUFWriter, like: GGUFFile) -> None:
    known = {key.removeprefix("tokenizer.ggml."): value for key, value in like.metadata.items()}
    writer.add_tokenizer_model(known["model"])
    writer.add_tokenizer_pre(known["pre"])
    writer.add_token_list(known["tokens"])
    writer.add_token_types(known["token_type"])
    writer.add_token_merges(known["merges"])
    writer.add_bos_token_id(known["bos_token_id"])
    writer.add_eos_token_id(known["eos_token_id"])
