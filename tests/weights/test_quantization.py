"""A published quantised checkpoint is the model that transformers makes of its dequantised weights, in every format.

What does not fit, and what is not supported, is refused by name before any weight is loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mini_sglang.execution.worker
from mini_sglang.kernels.cpu.kernels import CpuKernels
from mini_sglang.kernels.interface import ExpertVariant, Matrix
from mini_sglang.kernels.torch_experts import TorchExperts
from mini_sglang.kernels.torch_kernels import TorchMatrix, dense_experts
from mini_sglang.layers.placement import Placement
from mini_sglang.parallel.sharding import copy_shard, shard_evenly, whole
from mini_sglang.weights.load import load_weights
from mini_sglang.weights.model_config import load_model_config
from mini_sglang.weights.quantization import open_folder
from mini_sglang.weights.quantization_config import Quantization, quantization_from_hf
from mini_sglang.weights.quantized_weight import QuantizedWeight
from mini_sglang.weights.tensor import CheckpointTensor, WeightsError, WeightSlot
from tests.tiny import (
    Checkpoints,
    TinyCheckpoint,
    generate_ids,
    greedy_ids,
    make_ragged_prompts,
    run_engine,
    use_thread_workers,
)
from tests.weights import quantized
from tests.weights.quantized import FORMATS, Format, compressed, write

BY_LIBRARY = Path(__file__).parent.parent / "data" / "compressed_tensors.safetensors"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 72, "norm_topk_prob": True}
MODELS: dict[str, tuple[Format, dict[str, Any]]] = {
    "biases, tied head": (FORMATS["awq, groups of 64"], {"family": "qwen2", "tie_word_embeddings": True}),
    "experts, fp8 blocks": (quantized.fp8_blocks(48, 64), {"family": "qwen3_moe", **EXPERTS}),
    "experts, packed": (
        FORMATS["pack-quantized, groups of 64, asymmetric"],
        {"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "experts, gptq": (FORMATS["gptq, groups of 32, desc_act"], {"family": "qwen3_moe", **EXPERTS}),
    "a quantised head": (
        Format({**FORMATS["gptq, groups of 32"].config, "lm_head": True}, FORMATS["gptq, groups of 32"].quantize, ()),
        {"family": "qwen3"},
    ),
}


# Formats that kernels could multiply as they are, and an intermediate size that fits them: on 3 ranks, cuts go through
# groups of 64 and 128 and through whole rows.
KEPT = {
    "fp8, blocks of 128 x 128": 200,
    "fp8, per channel": 200,
    "float-quantized, tensor": 200,
    "int-quantized, channel": 200,
    "int-quantized, groups of 32": 200,
    "pack-quantized, groups of 128": 384,
    "awq, groups of 64": 384,
    "gptq, groups of 32": 384,
}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[QuantizedWeight]:
    """The matrices that layers kept as they are stored. They are multiplied, on every rank, by their dense values."""
    matrices: list[QuantizedWeight] = []

    def quantized_matrix(self: Any, weight: QuantizedWeight, bias: torch.Tensor | None) -> Matrix:
        matrices.append(weight)
        return TorchMatrix(self, weight.dense(), bias)

    def keeping(*settings: Any, **named: Any) -> Placement:
        return replace(Placement(*settings, **named), packed=True)

    def quantized_experts(
        self: Any, gate_up: QuantizedWeight, down: QuantizedWeight, number: int, variant: ExpertVariant
    ) -> TorchExperts:
        matrices.extend((gate_up, down))
        ups, downs = (weight.dense().unflatten(0, (number, -1)) for weight in (gate_up, down))
        return dense_experts(self, ups, downs, variant)

    monkeypatch.setattr(CpuKernels, "quantized_matrix", quantized_matrix)
    monkeypatch.setattr(CpuKernels, "quantized_experts", quantized_experts)
    monkeypatch.setattr(mini_sglang.execution.worker, "Placement", keeping)
    return matrices


@pytest.fixture(autouse=True)
def thread_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_workers(monkeypatch)


def assert_same_weights(checkpoint: TinyCheckpoint) -> None:
    """Every weight is, bit for bit in float32, what the writer says that the checkpoint holds."""
    state = per_expert(checkpoint.model.state_dict())
    values: dict[str, torch.Tensor] = {}

    def keeper(name: str) -> Callable[[CheckpointTensor], None]:
        def keep(tensor: CheckpointTensor) -> None:
            values[name] = tensor.dense().float()
            assert_same_parts(tensor)

        return keep

    slots = {name: WeightSlot(tuple(value.shape), keeper(name)) for name, value in state.items()}
    load_weights(checkpoint.source, load_model_config(checkpoint.source), slots, show_progress=False)
    assert set(values) == set(state)
    for name, value in state.items():
        assert torch.equal(values[name], value), name


def assert_same_parts(tensor: CheckpointTensor) -> None:
    """What each of three ranks fills its part with is that part of the dense values, along either dimension."""
    dense = tensor.dense()
    for cut in range(dense.ndim):
        for rank in range(3):
            shards = [shard_evenly(n, rank, 3, 16) if at == cut else whole(n) for at, n in enumerate(dense.shape)]
            target, expected = (torch.full([shard.size for shard in shards], torch.nan) for _ in range(2))
            tensor.copy_to(target, *shards)
            copy_shard(expected, dense, *shards)
            assert torch.equal(target, expected), tensor.name


def per_expert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor for each expert and projection, under the names that the engine uses."""
    named: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        module, _, part = name.rpartition(".")
        if part not in ("gate_up_proj", "down_proj"):
            named[name] = tensor
            continue
        projections = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(tensor):
            for projection, rows in zip(projections, matrix.chunk(len(projections)), strict=True):
                named[f"{module}.{expert}.{projection}.weight"] = rows
    return named


def without_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


def assert_same_tokens(checkpoint: TinyCheckpoint, ranks: tuple[int, ...]) -> None:
    prompts = make_ragged_prompts(4, 320)
    expected = [greedy_ids(checkpoint.model, prompt, 8) for prompt in prompts]
    for tp in ranks:
        with run_engine(checkpoint.path, tp=tp) as engine:
            assert generate_ids(engine, prompts, num_tokens=8) == expected, f"tp {tp}"
            assert generate_ids(engine, prompts[:1], num_tokens=8) == expected[:1], f"alone, tp {tp}"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_its_dequantised_weights(name: str, checkpoints: Checkpoints) -> None:
    checkpoint = write(checkpoints, FORMATS[name])
    assert_same_weights(checkpoint)
    assert_same_tokens(checkpoint, (1, 2, 3))


@pytest.mark.parametrize("name", MODELS)
def test_biases_experts_and_heads(name: str, checkpoints: Checkpoints) -> None:
    form, config = MODELS[name]
    checkpoint = write(checkpoints, form, **config)
    assert_same_weights(checkpoint)
    assert_same_tokens(checkpoint, (1, 2, 3))


@pytest.mark.parametrize("name", KEPT)
def test_matrices_that_ranks_keep_as_they_are_stored_are_the_dequantised_ones(
    name: str, checkpoints: Checkpoints, kept: list[QuantizedWeight]
) -> None:
    checkpoint = write(checkpoints, FORMATS[name], intermediate_size=KEPT[name])
    assert_same_tokens(checkpoint, (1, 2, 3))
    assert len(kept) == (1 + 2 + 3) * 2 * 4  # on each rank qkv, o, gate and up, and down of both layers


@pytest.mark.parametrize(
    ("name", "size"), [("fp8, blocks of 128 x 128", 200), ("fp8, per channel", 72), ("awq, groups of 64", 192)]
)
def test_experts_that_ranks_keep_as_they_are_stored_are_the_dequantised_ones(
    name: str, size: int, checkpoints: Checkpoints, kept: list[QuantizedWeight]
) -> None:
    config = {**EXPERTS, "moe_intermediate_size": size}
    checkpoint = write(checkpoints, FORMATS[name], "qwen3_moe", **config)
    assert_same_tokens(checkpoint, (1, 2, 3))
    assert len(kept) == (1 + 2 + 3) * 2 * 4  # on each rank qkv, o, gates and ups, and downs of both layers


def test_gpt_oss_is_its_dequantised_experts(checkpoints: Checkpoints) -> None:
    assert_same_tokens(quantized.write_gpt_oss(checkpoints), (1, 2, 3))


def test_gpt_oss_keeps_its_experts_as_they_are_stored(checkpoints: Checkpoints, kept: list[QuantizedWeight]) -> None:
    assert_same_tokens(quantized.write_gpt_oss(checkpoints), (1, 2, 3))
    assert len(kept) == (1 + 2 + 3) * 2 * 2  # on each rank gates and ups, and downs of both layers
    assert {weight.group_size for weight in kept} <= {16, 32}


# -- what compressed-tensors itself wrote ------------------------------------------------------------------------------


def test_matrices_that_compressed_tensors_wrote_are_what_it_makes_of_them(tmp_path: Path) -> None:
    """The file holds matrices of 19 rows that version 0.20 of the library compressed and decompressed."""
    with safe_open(BY_LIBRARY, framework="pt") as file:
        schemes = json.loads(file.metadata()["schemes"])
    tensors = load_file(BY_LIBRARY)
    assert len(schemes) == 10
    for name, scheme in schemes.items():
        stored = {key: value for key, value in tensors.items() if key.startswith(f"{name}.")}
        expected = stored.pop(f"{name}.decompressed")
        save_file(stored, tmp_path / "model.safetensors")
        config = {"quantization_config": compressed(scheme["format"], scheme["weights"])}
        (tmp_path / "config.json").write_text(json.dumps(config))
        read = open_folder(tmp_path, ())
        assert set(read) == {f"{name}.weight"}
        assert read[f"{name}.weight"].shape == expected.shape
        assert torch.equal(read[f"{name}.weight"].dense(), expected), name


# -- what the config says ----------------------------------------------------------------------------------------------


def parsed(stated: dict[str, Any]) -> Quantization:
    quantization = quantization_from_hf({"quantization_config": stated})
    assert quantization is not None
    return quantization


def test_a_named_module_comes_before_its_class_and_an_ignored_one_before_both() -> None:
    one = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
    groups = {
        "group_0": one,
        "group_1": {"targets": ["re:.*down_proj$"], "weights": {**one["weights"], "num_bits": 8}},  # type: ignore[dict-item]
    }
    stated = compressed("pack-quantized", {}, config_groups=groups, ignore=["lm_head", "re:.*layers\\.0\\.mlp"])
    quantization = parsed(stated)
    bits = {
        name: scheme.bits if (scheme := quantization.scheme_of(name)) else None
        for name in ("model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj")
    }
    assert list(bits.values()) == [8, 4, None]
    assert quantization.scheme_of("lm_head") is None
    assert quantization.scheme_of("model.embed_tokens") is None


def test_groups_may_have_formats_of_their_own() -> None:
    groups = {
        "group_0": {
            "targets": ["re:.*self_attn.*"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float"},
        },
        "group_1": {"targets": ["Linear"], "format": "pack-quantized", "weights": {"num_bits": 4, "group_size": 32}},
    }
    quantization = parsed(compressed("mixed-precision", {}, config_groups=groups))
    schemes = [
        quantization.scheme_of(name) for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
    ]
    assert [(scheme.bits, scheme.is_float, scheme.block) for scheme in schemes if scheme] == [
        (8, True, (None, None)),
        (4, False, (1, 32)),
    ]


def test_a_checkpoint_of_quantised_activations_or_kv_cache_alone_is_read(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("llama")
    groups = {"group_0": {"targets": ["Linear"], "weights": None, "input_activations": {"num_bits": 8}}}
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    quantized.add_config(checkpoint.path, compressed("dense", {}, config_groups=groups, kv_cache_scheme=cache))
    path = checkpoint.path / "model.safetensors"
    save_file({**load_file(path), "model.layers.0.self_attn.k_scale": torch.ones(1)}, path)
    assert_same_weights(checkpoint)


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "hqq"}, "quant_method 'hqq'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt'"),
        ({"load_in_8bit": True}, "quant_method 'unknown'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two numbers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size must be"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers must be a list"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits 8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "marlin"}, "version 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, "zero_point False"),
        ({"quant_method": "gptq", "group_size": 128}, "has no 'bits'"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4}, "group_size must be"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": "yes"}, "desc_act must be true or false"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "is_marlin_format": True}, "is_marlin_format True"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "format": "marlin"}, "format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"-:x": {}}}, "dynamic"),
        (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "format 'nvfp4-pack-quantized'"),
        (compressed("marlin-24", {"num_bits": 4, "type": "int"}), "format 'marlin-24'"),
        (compressed("sparse-24-bitmask", {"num_bits": 8, "type": "float"}), "format 'sparse-24-bitmask'"),
        (compressed("dense", {"num_bits": 8, "type": "float"}), "format 'dense'"),
        (compressed("float-quantized", {"num_bits": 4, "type": "float"}), "num_bits 4"),
        (compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}), "group_size 16"),
        (compressed("pack-quantized", {"num_bits": 3, "type": "int"}), "num_bits 3"),
        (compressed("pack-quantized", {"num_bits": 4, "type": "float"}), "type 'float'"),
        (compressed("int-quantized", {"strategy": "token"}), "strategy 'token'"),
        (compressed("int-quantized", {"strategy": "group"}), "group_size must be"),
        (compressed("int-quantized", {}, sparsity_config={"format": "sparse-bitmask"}), "sparsity_config"),
        (compressed("int-quantized", {}, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (compressed("int-quantized", {}, config_groups=None), "config_groups"),
        (compressed("int-quantized", {}, ignore=["re:("]), "'re:(' is not a valid pattern"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(stated: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="quantization_config") as error:
        quantization_from_hf({"quantization_config": stated})
    assert named in str(error.value)


def test_a_refused_checkpoint_does_not_begin_to_load(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("llama")
    quantized.add_config(checkpoint.path, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ValueError, match="bitsandbytes"), run_engine(checkpoint.path):
        pass


@pytest.mark.parametrize(
    ("name", "file", "stated"),
    [
        ("gptq, groups of 32, desc_act", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True}),
        ("awq, groups of 64", "quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True}),
        ("awq, groups of 64", "quantize_config.json", {"bits": 4, "group_size": 64, "zero_point": True}),
    ],
)
def test_a_config_in_a_file_of_its_own_is_read(
    name: str, file: str, stated: dict[str, Any], checkpoints: Checkpoints
) -> None:
    checkpoint = write(checkpoints, FORMATS[name])
    without_config(checkpoint.path)
    of_tool = {"damp_percent": 0.01, "sym": False, "model_file_base_name": "model", **stated}
    (checkpoint.path / file).write_text(json.dumps(of_tool))
    assert_same_weights(checkpoint)


def test_what_config_json_says_comes_before_a_file_of_its_own(checkpoints: Checkpoints) -> None:
    checkpoint = write(checkpoints, FORMATS["gptq, groups of 32"])
    (checkpoint.path / "quantize_config.json").write_text(json.dumps({"bits": 8, "group_size": 64}))
    assert_same_weights(checkpoint)


def test_a_file_of_its_own_is_refused_by_name_before_anything_loads(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("llama")
    (checkpoint.path / "quantize_config.json").write_text(json.dumps({"bits": 3, "group_size": 64}))
    with pytest.raises(ValueError, match=r"quant_method 'gptq'.*bits 3"):
        load_model_config(checkpoint.source)


# -- tensors that do not fit the config --------------------------------------------------------------------------------

MODULE = "model.layers.1.mlp.up_proj"  # [200, 160]


def drop(part: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(f"{MODULE}.{part}")


def put(part: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({f"{MODULE}.{part}": value})


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("fp8, blocks of 128 x 128", drop("weight_scale_inv"), "weight_scale is missing"),
        ("fp8, blocks of 128 x 128", put("weight_scale_inv", torch.ones(2, 3)), "is [2, 3], expected [2, 2]"),
        ("fp8, blocks of 128 x 128", put("weight", torch.ones(200, 160, dtype=torch.int8)), "weight is of dtype I8"),
        ("int-quantized, channel", put("weight_scale", torch.ones(200, 5)), "is [200, 5], expected [200, 1]"),
        ("int-quantized, channel, asymmetric", drop("weight_zero_point"), "weight_zero_point is missing"),
        ("pack-quantized, channel", put("weight_shape", torch.tensor([200, 168])), "weight_shape [200, 168] does"),
        ("pack-quantized, groups of 32", put("weight_scale", torch.ones(200, 2)), "is [200, 2], expected [200, 5]"),
        ("awq, groups of 128", put("scales", torch.ones(5, 200)), "scales is [5, 200], expected [2, 200]"),
        ("gptq, groups of 32", drop("qzeros"), "qzeros is missing"),
        ("gptq, groups of 32, desc_act", drop("g_idx"), "g_idx is missing"),
        ("gptq, groups of 32", put("qweight", torch.ones(20, 200, dtype=torch.int64)), "qweight is of dtype I64"),
    ],
)  # fmt: skip
def test_a_matrix_that_does_not_fit_its_config_is_named(
    name: str, damage: Callable[[dict[str, torch.Tensor]], object], problem: str, checkpoints: Checkpoints
) -> None:
    folder = write(checkpoints, FORMATS[name]).path
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="1 matrices cannot be read as") as error:
        open_folder(folder, ())
    assert MODULE in str(error.value)
    assert problem in str(error.value)


def test_columns_of_groups_that_do_not_exist_are_named(checkpoints: Checkpoints) -> None:
    folder = write(checkpoints, FORMATS["gptq, groups of 32, desc_act"]).path
    tensors = load_file(folder / "model.safetensors")
    put("g_idx", torch.full((160,), 5, dtype=torch.int32))(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"{MODULE}: columns belong to groups outside of the 5"):
        open_folder(folder, ())[f"{MODULE}.weight"].dense()


def test_a_quantised_module_that_the_config_ignores_is_named(checkpoints: Checkpoints) -> None:
    form = FORMATS["fp8, blocks of 128 x 128"]
    folder = write(checkpoints, form).path
    quantized.add_config(folder, {**form.config, "modules_to_not_convert": ["lm_head", MODULE]})
    with pytest.raises(WeightsError, match=rf"1 matrices .* {MODULE}: it is quantised, though quantization_config"):
        open_folder(folder, ())


def test_quantised_weights_without_a_config_are_refused(checkpoints: Checkpoints) -> None:
    folder = write(checkpoints, FORMATS["awq, groups of 64"]).path
    without_config(folder)
    with pytest.raises(WeightsError, match=r"has no quantization_config: .*qweight \(I32\)"):
        open_folder(folder, ())


def test_scales_of_activations_and_of_the_kv_cache_are_passed_over_and_logged(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(checkpoints, FORMATS["fp8, per tensor, static"]).path
    with caplog.at_level(logging.INFO, logger="mini_sglang"):
        tensors = open_folder(folder, ())
    assert not [name for name in tensors if "scale" in name]
    assert "14 matrices (fp8) are dequantised" in caplog.text
    assert "28 scales for them are passed over" in caplog.text  # two for each matrix


@pytest.mark.parametrize(("value", "left"), [(0.0, False), (0.5, True)])
def test_a_bias_that_the_model_has_no_place_for_is_left_out_if_it_is_zero(
    value: float, left: bool, checkpoints: Checkpoints
) -> None:
    folder = write(checkpoints, FORMATS["gptq, groups of 32"]).path
    tensors = load_file(folder / "model.safetensors")
    put("bias", torch.full((200,), value))(tensors)
    save_file(tensors, folder / "model.safetensors")
    assert (f"{MODULE}.bias" in open_folder(folder, ())) == left
    assert f"{MODULE}.bias" in open_folder(folder, {f"{MODULE}.bias"})
