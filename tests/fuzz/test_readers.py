"""Readers of model files take any bytes: they read them, or raise one of their documented errors, and say why.

Never another exception, a hang or a giant allocation. Inputs are damaged checkpoints, and headers made up from parts.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from mini_sglang.text.tokenizer import load_tokenizer
from mini_sglang.weights.gguf import open_gguf
from mini_sglang.weights.gguf_config import config_from_gguf
from mini_sglang.weights.gguf_file import GGUFFile
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.model_config import load_model_config
from mini_sglang.weights.quantization import open_folder
from tests.fuzz.budget import fuzz, kept
from tests.tiny import Checkpoints
from tests.weights.quantized import FORMATS
from tests.weights.quantized import write as write_quantized

Damage = list[tuple[int, bytes]]  # bytes to write at each place
MOST_READ = 1 << 20  # values of a tensor that are worth reading

EXTREMES = st.sampled_from([0, 1, 2, 3, 8, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1])
WRITTEN = st.one_of(
    st.binary(min_size=1, max_size=8),
    EXTREMES.map(lambda number: struct.pack("<Q", number)),
    EXTREMES.map(lambda number: struct.pack("<I", number % 2**32)),
    st.floats(width=32).map(lambda number: struct.pack("<f", number)),
)


def damages(header_bytes: int, size: int) -> st.SearchStrategy[tuple[Damage, int]]:
    """What is written where, most of it in the header, and where the file is cut."""
    places = st.integers(0, header_bytes - 1) | st.integers(0, size - 1)
    ends = st.just(size) | st.integers(0, size) | st.integers(0, header_bytes)
    return st.tuples(st.lists(st.tuples(places, WRITTEN), max_size=4), ends)


def damaged(content: bytes, damage: tuple[Damage, int]) -> bytes:
    changed = bytearray(content)
    for place, written in damage[0]:
        changed[place : place + len(written)] = written
    return bytes(changed[: damage[1]])


def says_why(error: Exception) -> None:
    assert len(str(error)) > 10
    assert len(str(error)) < 5000


# -- GGUF --------------------------------------------------------------------------------------------------------------


def read_gguf(path: Path) -> None:
    source = ModelSource("fuzzed", path, "gguf")
    try:
        file = GGUFFile(path)
        tensors = open_gguf(file, config_from_gguf(file))
        for tensor in tensors.values():
            if tensor.shape and sum(tensor.shape) < MOST_READ:
                tensor.dense()
                tensor.quantized()
    except (ValueError, FileNotFoundError) as error:
        says_why(error)
    try:
        tokenizer = load_tokenizer(source)
        tokenizer.decode(tokenizer.encode("Hello, wörld 12"))
    except (ValueError, FileNotFoundError) as error:
        says_why(error)


@pytest.fixture(scope="module")
def gguf_bytes(checkpoints: Checkpoints) -> bytes:
    return checkpoints.write_gguf("llama").path.read_bytes()


def test_damaged_gguf(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "fuzzed.gguf"

    def check(damage: tuple[Damage, int]) -> None:
        path.write_bytes(damaged(gguf_bytes, damage))
        read_gguf(path)

    header = min(info.offset for info in GGUFFile(_written(path, gguf_bytes)).tensors.values())
    fuzz(check, damages(header, len(gguf_bytes)))


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _entry(key: str, value: Any) -> bytes:
    """One metadata entry, of the type that fits the value."""
    return _text(key) + _typed(value)


def _typed(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<IQ", 10, value) if value >= 0 else struct.pack("<Iq", 11, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case _:
            kinds = {type(item) for item in value}
            items = list(value) if len(kinds) == 1 else [str(item) for item in value]
            packed = [_typed(item) for item in items]
            kind = packed[0][:4] if packed else struct.pack("<I", 8)
            same = [item for item in packed if item[:4] == kind]
            return struct.pack("<I", 9) + kind + struct.pack("<Q", len(same)) + b"".join(item[4:] for item in same)


KEYS = [
    *("general.alignment", "split.count", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens"),
    *("tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.eos_token_id"),
    *("tokenizer.ggml.bos_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.chat_template"),
    *("tokenizer.chat_templates", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.padding_token_id"),
]
ARCHITECTURE_KEYS = [
    *("block_count", "embedding_length", "feed_forward_length", "context_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "attention.sliding_window"),
]
SCALARS: st.SearchStrategy[Any] = st.one_of(
    EXTREMES,
    st.integers(-5, 40),
    st.floats(width=32),
    st.booleans(),
    st.sampled_from(
        ["gpt2", "llama", "gpt-2", "yarn", "linear", "a", "b", "ab", "a b", "<0x41>", "<|im_end|>", "", "▁"]
    ),
)
VALUES = SCALARS | st.lists(SCALARS, max_size=4)
BASE: dict[str, Any] = {
    "block_count": 2, "embedding_length": 8, "feed_forward_length": 8, "context_length": 64, "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def test_made_up_gguf(tmp_path: Path) -> None:
    path = tmp_path / "fuzzed.gguf"
    tensors = st.lists(
        st.tuples(
            st.sampled_from(["token_embd.weight", "output.weight", "rope_freqs.weight", "blk.0.attn_q.weight", "x"]),
            st.lists(st.sampled_from([0, 1, 2, 4, 8, 32, 64, 2**32, 2**63]), max_size=5),
            st.sampled_from([0, 1, 2, 3, 8, 12, 30, 99]),
            st.sampled_from([0, 32, 64, 2**63]),
        ),
        max_size=3,
    )
    inputs = st.fixed_dictionaries(
        {
            "architecture": st.sampled_from(["llama", "olmo2", "qwen2", "qwen3", "qwen3moe", "smollm3"]),
            "own": st.dictionaries(st.sampled_from(ARCHITECTURE_KEYS), VALUES, max_size=4),
            "other": st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6),
            "tensors": tensors,
        }
    )

    def check(made: dict[str, Any]) -> None:
        entries = [_entry("general.architecture", made["architecture"])]
        entries += [_entry(f"{made['architecture']}.{key}", value) for key, value in {**BASE, **made["own"]}.items()]
        entries += [_entry(key, value) for key, value in made["other"].items()]
        table = [
            _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
            for name, shape, kind, offset in made["tensors"]
        ]
        counts = struct.pack("<IQQ", 3, len(table), len(entries))
        path.write_bytes(b"GGUF" + counts + b"".join(entries) + b"".join(table) + b"\0" * 512)
        read_gguf(path)

    fuzz(check, inputs)


@pytest.mark.parametrize("path", kept("gguf"), ids=lambda path: path.stem)
def test_kept_gguf(path: Path) -> None:
    read_gguf(path)


# -- safetensors -------------------------------------------------------------------------------------------------------


def read_safetensors(folder: Path) -> None:
    try:
        for tensor in open_folder(folder, ()).values():
            tensor.dense()
    except (ValueError, FileNotFoundError) as error:
        says_why(error)


def test_damaged_safetensors(checkpoints: Checkpoints, tmp_path: Path) -> None:
    content = (checkpoints.write("llama").path / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")

    def check(damage: tuple[Damage, int]) -> None:
        (tmp_path / "model.safetensors").write_bytes(damaged(content, damage))
        read_safetensors(tmp_path)

    fuzz(check, damages(header, len(content)))


@pytest.mark.parametrize("name", ["fp8, blocks of 24 x 56", "pack-quantized, channel, asymmetric", "gptq, 8 bits"])
def test_damaged_quantised_safetensors(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = write_quantized(checkpoints, FORMATS[name], num_hidden_layers=1).path
    content = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")

    def check(damage: tuple[Damage, int]) -> None:
        (folder / "model.safetensors").write_bytes(damaged(content, damage))
        read_safetensors(folder)

    fuzz(check, damages(header, len(content)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70) | EXTREMES | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def test_made_up_index(checkpoints: Checkpoints, tmp_path: Path) -> None:
    content = (checkpoints.write("llama").path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    names = st.sampled_from(["model.safetensors", "other.safetensors", "../a", "", ".", "/", "a\0b"])
    tensors = st.sampled_from(["model.norm.weight", "x", "lm_head.weight"])
    maps = st.fixed_dictionaries({"weight_map": st.dictionaries(tensors, names | JSON, max_size=3) | JSON})

    def check(index: Any) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        read_safetensors(tmp_path)

    fuzz(check, maps | JSON)


# -- config.json and what stands beside it -----------------------------------------------------------------------------

CONFIG_KEYS = [
    *("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("num_hidden_layers", "max_position_embeddings", "vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling"),
    *("rope_parameters", "partial_rotary_factor", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "no_rope_layers", "eos_token_id"),
    *("no_rope_layer_interval", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "quantization_config"),
    "original_max_position_embeddings",
]
ROPE = st.dictionaries(
    st.sampled_from(
        [
            *("rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "mscale"),
            *("mscale_all_dim", "beta_fast", "beta_slow", "original_max_position_embeddings", "rope_theta", "truncate"),
        ]
    ),
    st.sampled_from(["yarn", "linear", "llama3", "default"]) | JSON | st.floats(0, 1e308),
    max_size=7,
)
FAMILIES = ["llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3", "qwen3_moe", "smollm3"]
WHOLE_CONFIG: dict[str, Any] = {
    "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 32,
}  # fmt: skip
QUANTIZATION_KEYS = [
    *("fmt", "expert_dtype", "weight_block_size", "modules_to_not_convert", "ignored_layers", "bits", "w_bit"),
    *("group_size", "q_group_size", "version", "zero_point", "desc_act", "sym", "checkpoint_format", "pack_dtype"),
    *("format", "ignore", "targets", "weights", "num_bits", "type", "strategy", "symmetric", "dynamic", "actorder"),
    *("block_structure", "sparsity_config", "transform_config", "config_groups"),
]
SETTINGS = st.dictionaries(
    st.sampled_from(QUANTIZATION_KEYS),
    st.sampled_from([4, 8, 128, -1, "int", "float", "group", "block", "gemm", ["Linear"], ["re:.*"], ["re:("], [1, 2]])
    | JSON,
    max_size=6,
)
QUANTIZATIONS = st.builds(
    lambda method, group, changes: {
        "quant_method": method,
        **({"bits": 4, "group_size": 32, "format": "pack-quantized", "config_groups": {"a": group}}),
        **changes,
    },
    st.sampled_from(["fp8", "awq", "gptq", "compressed-tensors"]) | JSON,
    st.builds(lambda weights, changes: {"targets": ["Linear"], "weights": weights, **changes}, SETTINGS, SETTINGS)
    | JSON,
    SETTINGS,
)
CONFIGS = st.builds(
    lambda family, changes, quantization: {
        "model_type": family,
        **WHOLE_CONFIG,
        **({} if quantization is None else {"quantization_config": quantization}),
        **changes,
    },
    st.sampled_from(FAMILIES),
    st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON | ROPE, max_size=5),
    st.none() | QUANTIZATIONS,
)
TOKENS = st.sampled_from(["<|end|>", "a"]) | JSON
ENTRIES = st.fixed_dictionaries({}, optional={"content": TOKENS, "id": JSON})
TOKENIZER_CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "eos_token": TOKENS | ENTRIES,
        "added_tokens_decoder": st.dictionaries(st.sampled_from(["0", "7", "x", "²"]), ENTRIES | JSON) | JSON,
    },
)
TOKENIZERS = st.fixed_dictionaries({}, optional={"added_tokens": st.lists(ENTRIES | JSON, max_size=3) | JSON})


def test_made_up_configs(tmp_path: Path) -> None:
    source = ModelSource("fuzzed", tmp_path, "safetensors")

    def check(files: dict[str, Any]) -> None:
        for name, content in files.items():
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        try:
            config = load_model_config(source)
            assert config.num_layers >= 1
        except (ValueError, FileNotFoundError) as error:
            says_why(error)

    nested = b'{"model_type": ' + b"[" * 100_000
    check({"config.json": nested, "tokenizer_config.json": {}, "tokenizer.json": {}, "generation_config.json": {}})
    fuzz(
        check,
        st.fixed_dictionaries(
            {
                "config.json": CONFIGS | CONFIGS | CONFIGS | JSON | st.binary(max_size=20),
                "tokenizer_config.json": st.just({}) | TOKENIZER_CONFIGS | JSON,
                "tokenizer.json": TOKENIZERS | JSON,
                "generation_config.json": st.just({}) | st.fixed_dictionaries({"eos_token_id": JSON}) | JSON,
            }
        ),
    )
