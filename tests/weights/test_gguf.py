"""What GGUF files hold: every supported type is read, and an error names the others."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from mini_sglang.model_config import ModelConfig
from mini_sglang.parallel.sharding import copy_shard, shard_evenly, whole
from mini_sglang.weights.gguf import hf_name, open_gguf
from mini_sglang.weights.gguf_config import config_from_gguf
from mini_sglang.weights.gguf_file import GGUFFile
from mini_sglang.weights.gguf_types import TensorType
from mini_sglang.weights.tensor import WeightsError
from tests.tiny import Checkpoints

CONFIG = ModelConfig(
    architecture="qwen2",
    vocab_size=8,
    hidden_size=256,
    intermediate_size=256,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=128,
    context_length=16,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
)


def test_types_are_those_of_the_gguf_package() -> None:
    ours = {kind.name: (kind.value, kind.block_size, kind.block_bytes) for kind in TensorType}
    assert ours == {kind.name: (kind.value, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}


def write_raw(path: Path, kind: gguf.GGMLQuantizationType, rows: int = 6, columns: int = 512) -> np.ndarray[Any, Any]:
    """One tensor of random blocks; returns the stored bytes by row."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 64, (rows, columns // block_size * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_values_are_the_gguf_packages(tmp_path: Path, kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    stored = write_raw(tmp_path / "raw.gguf", quantisation)
    expected = gguf.quants.dequantize(stored, quantisation).reshape(6, 512)
    tensor = open_gguf(GGUFFile(tmp_path / "raw.gguf"), CONFIG)["model.layers.0.mlp.up_proj.weight"]
    assert tensor.shape == (6, 512)
    assert torch.equal(tensor.dense(), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_as_they_are_stored_hold_the_same_values(tmp_path: Path, kind: str) -> None:
    write_raw(tmp_path / "raw.gguf", gguf.GGMLQuantizationType[kind])
    tensor = open_gguf(GGUFFile(tmp_path / "raw.gguf"), CONFIG)["model.layers.0.mlp.up_proj.weight"]
    stored = tensor.quantized()
    assert stored is not None
    assert torch.equal(stored.dense(), tensor.dense())
    bits = 4 if kind.startswith("Q4") else 8
    assert stored.q.dtype == (torch.uint8 if bits == 4 else torch.int8)
    assert stored.group_size == (16 if kind == "Q6_K" else 32)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_values_that_are_not_quantised_have_no_blocks(tmp_path: Path, kind: str) -> None:
    write_raw(tmp_path / "raw.gguf", gguf.GGMLQuantizationType[kind])
    assert open_gguf(GGUFFile(tmp_path / "raw.gguf"), CONFIG)["model.layers.0.mlp.up_proj.weight"].quantized() is None


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q8_0"])
def test_reordered_rows_are_reordered_as_blocks_too(checkpoints: Checkpoints, kind: str) -> None:
    checkpoint = checkpoints.write_gguf("llama", kind=kind)
    file = GGUFFile(checkpoint.path)
    tensors = open_gguf(file, config_from_gguf(file))
    for name in ("q_proj", "k_proj", "v_proj"):
        tensor = tensors[f"model.layers.0.self_attn.{name}.weight"]
        stored = tensor.quantized()
        assert stored is not None
        assert torch.equal(stored.dense(), tensor.dense())


def test_many_rows_are_dequantised_in_parts(tmp_path: Path) -> None:
    stored = write_raw(tmp_path / "raw.gguf", gguf.GGMLQuantizationType.Q8_0, rows=3000, columns=1024)
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q8_0)
    tensor = open_gguf(GGUFFile(tmp_path / "raw.gguf"), CONFIG)["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(tensor.dense(), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rank_gets_its_part_of_the_dense_values(tmp_path: Path, kind: str, ranks: int) -> None:
    """Of 1000 rows, which take several chunks, and of 1024 columns, which cuts leave within blocks."""
    write_raw(tmp_path / "raw.gguf", gguf.GGMLQuantizationType[kind], rows=1000, columns=1024)
    tensor = open_gguf(GGUFFile(tmp_path / "raw.gguf"), CONFIG)["model.layers.0.mlp.up_proj.weight"]
    for rank in range(ranks):
        for shards in (
            (shard_evenly(1000, rank, ranks, 16), whole(1024)),
            (whole(1000), shard_evenly(1024, rank, ranks, 16)),
        ):
            target, expected = (torch.full([shard.size for shard in shards], torch.nan) for _ in range(2))
            tensor.copy_to(target, *shards)
            copy_shard(expected, tensor.dense(), *shards)
            assert torch.equal(target, expected)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "TQ1_0"])
def test_other_types_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    write_raw(tmp_path / "raw.gguf", gguf.GGMLQuantizationType[kind])
    with pytest.raises(WeightsError, match=rf"blk\.0\.ffn_up\.weight \({kind}\).*supported are .*Q4_K"):
        open_gguf(GGUFFile(tmp_path / "raw.gguf"), CONFIG)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_q_norm.weight", "model.layers.12.self_attn.q_norm.weight"),
        ("blk.3.ffn_gate_inp.weight", "model.layers.3.mlp.gate.weight"),
        ("blk.1.post_attention_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
        ("blk.1.post_ffw_norm.weight", "model.layers.1.post_feedforward_layernorm.weight"),
        ("blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias"),
        ("blk.0.ssm_a.weight", "blk.0.ssm_a.weight"),
        ("something", "something"),
    ],
)
def test_names(name: str, expected: str) -> None:
    assert hf_name(name) == expected


def test_metadata_equals_what_the_gguf_package_reads(checkpoints: Checkpoints) -> None:
    path = checkpoints.write_gguf("llama").path
    expected = {
        name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")
    }
    assert GGUFFile(path).metadata == expected


def test_files_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for content, message in (
        (b"", "holds 0 bytes"),
        (b"PK\3\4" + bytes(100), "does not begin with 'GGUF'"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(100), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(100), "version 50331648"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 100, "cut short"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            GGUFFile(path)


def test_arrays_of_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    array = struct.pack("<IQ", gguf.GGUFValueType.ARRAY, 1)  # of arrays, of which there is one
    path.write_bytes(struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", gguf.GGUFValueType.ARRAY) + array * 3000)
    with pytest.raises(ValueError, match=r"x\.gguf: arrays of arrays"):
        GGUFFile(path)


def test_an_olmo_3_is_not_taken_for_an_olmo_2(checkpoints: Checkpoints) -> None:
    """llama.cpp has one name for both."""
    file = GGUFFile(checkpoints.write_gguf("olmo2").path)
    file.metadata["olmo2.attention.sliding_window"] = 4096
    with pytest.raises(ValueError, match="sliding_window 4096 is not supported for architecture 'olmo2'"):
        config_from_gguf(file)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'"),
        ({"llama.expert_count": 8}, "no llama.expert_used_count"),
        ({"llama.attention.value_length": 8}, "attention.value_length 8"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8"),
        ({"llama.attention.head_count": [4, 2]}, "differs between layers"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
        ({"llama.block_count": None}, "no llama.block_count"),
    ],
)
def test_metadata_that_is_not_supported_is_named(
    checkpoints: Checkpoints, entries: dict[str, Any], message: str
) -> None:
    file = GGUFFile(checkpoints.write_gguf("llama").path)
    file.metadata.update(entries)
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_gguf(file)


def test_a_source_reads_the_header_once(checkpoints: Checkpoints) -> None:
    source = checkpoints.write_gguf("llama").source
    assert source.gguf is source.gguf
    assert source.gguf.metadata["general.architecture"] == "llama"
