"""`quantize` writes folders that the engine, and compressed-tensors, read as what they say; and says how far off it is.

What a folder holds is decoded here, by the format's description and without the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mini_sglang.cli import main
from mini_sglang.quantize import Format, Report, quantize_model, show_report
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.quantization import open_folder
from mini_sglang.weights.tensor import WeightsError
from tests.tiny import (
    Checkpoints,
    TinyCheckpoint,
    generate_ids,
    greedy_ids,
    make_ragged_prompts,
    run_engine,
)
from tests.weights.quantized import FORMATS
from tests.weights.quantized import write as write_quantized

EVERY: tuple[Format, ...] = ("fp8", "fp8-block", "w4a16")
SIZES = {"hidden_size": 160, "intermediate_size": 224}  # of 128 no multiples, of 32 they are
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "fused": True,
    },
}


def checkpoint_with_zeros(
    checkpoints: Checkpoints, family: str, dtype: torch.dtype = torch.float32, **config: Any
) -> TinyCheckpoint:
    """A random model; of every matrix some blocks are zeros."""
    checkpoint = checkpoints.write(family, **{**SIZES, **MODELS[family], **config})
    path = checkpoint.path / "model.safetensors"
    tensors = load_file(path)
    for tensor in tensors.values():
        if tensor.ndim >= 2:
            tensor[..., :9, :64] = 0
            tensor[..., 9:10, :] = 0
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path, {"format": "pt"})
    return checkpoint


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder under its name in the file; float32, whatever a block shares a scale with."""
    paths = sorted(folder.glob("*.safetensors"))
    stored = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    (group,) = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    values: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if f"{module}.weight_scale" not in stored:
            values[name] = tensor.float()
        elif part in ("weight", "weight_packed"):
            scale = stored[f"{module}.weight_scale"].float()
            q = tensor.float() if part == "weight" else unpacked(tensor, stored[f"{module}.weight_shape"].tolist())
            values[f"{module}.weight"] = q * spread(group["weights"], scale)[: q.shape[0], : q.shape[1]]
    return values


def spread(stated: Mapping[str, Any], scale: torch.Tensor) -> torch.Tensor:
    """A scale for each weight, and beyond the edges for more."""
    match stated["strategy"]:
        case "channel":
            return scale.expand(-1, 1 << 12)
        case "group":
            return scale.repeat_interleave(stated["group_size"], 1)
        case _:
            down, along = stated["block_structure"]
            return scale.repeat_interleave(down, 0).repeat_interleave(along, 1)


def unpacked(words: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Eight weights to a word, the first in its lowest bits, 8 more than they are."""
    q = torch.tensor([[(word >> 4 * place & 15) - 8 for word in row for place in range(8)] for row in words.tolist()])
    assert list(q.shape) == shape
    return q.float()


def transformers_model(checkpoint: TinyCheckpoint, values: Mapping[str, torch.Tensor], folder: Path) -> Any:
    """The checkpoint's model with these weights."""
    folder.mkdir()
    (folder / "config.json").write_text((checkpoint.path / "config.json").read_text())
    save_file(
        {name: value.contiguous() for name, value in values.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def quantised(checkpoint: TinyCheckpoint, out: Path, to: Format, **settings: Any) -> Report:
    return quantize_model(checkpoint.source, out, to, show_progress=False, **settings)


@pytest.mark.parametrize("to", EVERY)
@pytest.mark.parametrize("family", MODELS)
def test_the_engine_generates_what_transformers_does_with_the_weights_that_were_written(
    family: str, to: Format, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = checkpoint_with_zeros(checkpoints, family)
    quantised(checkpoint, tmp_path / "out", to)
    values = decoded(tmp_path / "out")
    assert all(bool(value.isfinite().all()) for value in values.values())
    model = transformers_model(checkpoint, values, tmp_path / "decoded")
    prompts = make_ragged_prompts(3, 320)
    expected = [greedy_ids(model, prompt, 8) for prompt in prompts]
    with run_engine(tmp_path / "out") as engine:
        assert generate_ids(engine, prompts, num_tokens=8) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("to", EVERY)
def test_matrices_are_close_and_all_else_is_equal(
    to: Format, dtype: torch.dtype, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = checkpoint_with_zeros(checkpoints, "llama", dtype)
    report = quantised(checkpoint, tmp_path / "out", to)
    before, after = load_file(checkpoint.path / "model.safetensors"), decoded(tmp_path / "out")
    assert set(before) == set(after)
    for name, w in before.items():
        if name.endswith("_proj.weight"):
            error = float((after[name] - w.float()).norm() / w.float().norm())
            assert 0 < error < (0.11 if to == "w4a16" else 0.03)
            assert report.error([name.removesuffix(".weight")]) == pytest.approx(error, rel=1e-4)
            assert not after[name][w == 0].any()
        else:
            assert torch.equal(after[name], w.float())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for name, tensor in stored.items() if name.endswith("weight_scale")} == {dtype}


def test_what_is_written_is_read_by_the_package_as_it_is_decoded(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoint_with_zeros(checkpoints, "llama", torch.bfloat16)
    for to in EVERY:
        quantised(checkpoint, tmp_path / to, to)
        read = open_folder(tmp_path / to, ())
        for name, value in decoded(tmp_path / to).items():
            assert torch.equal(read[name].dense().float(), value), name


def test_a_folder_of_several_files_holds_what_one_file_does(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoint_with_zeros(checkpoints, "mixtral")
    quantised(checkpoint, tmp_path / "one", "w4a16")
    report = quantised(checkpoint, tmp_path / "several", "w4a16", most_bytes=60_000)
    paths = sorted((tmp_path / "several").glob("*.safetensors"))
    assert [path.name for path in paths] == [
        f"model-{i:05}-of-{len(paths):05}.safetensors" for i in range(1, len(paths) + 1)
    ]
    assert len(paths) > 3
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert set(index["weight_map"]) == set(one)
    assert index["metadata"]["total_size"] == report.bytes_after == sum(tensor.nbytes for tensor in one.values())
    for name, tensor in one.items():
        assert torch.equal(load_file(tmp_path / "several" / index["weight_map"][name])[name], tensor)


def test_what_stays_as_it_is_is_named_as_ignored(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for family, router in (("mixtral", "block_sparse_moe.gate"), ("qwen3_moe", "mlp.gate")):
        quantised(checkpoint_with_zeros(checkpoints, family), tmp_path / family, "fp8")
        stated = json.loads((tmp_path / family / "config.json").read_text())["quantization_config"]
        assert stated["ignore"] == ["lm_head", *(f"model.layers.{layer}.{router}" for layer in range(2))]


@pytest.mark.parametrize(("hidden", "intermediate", "group"), [(256, 384, 128), (192, 256, 64), (256, 160, 32)])
def test_groups_are_the_largest_that_divide_all_inputs(
    hidden: int, intermediate: int, group: int, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = checkpoints.write("llama", hidden_size=hidden, intermediate_size=intermediate, head_dim=64)
    assert f"each {group} inputs" in quantised(checkpoint, tmp_path / "out", "w4a16").scheme
    assert not decoded(tmp_path / "out")["model.layers.0.mlp.down_proj.weight"].isnan().any()


def test_matrices_whose_inputs_fill_no_group_stay_and_are_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints.write("llama", intermediate_size=200)
    report = quantised(checkpoint, tmp_path / "out", "w4a16")
    kept = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert report.not_quantized == kept
    assert stated["ignore"] == ["lm_head", *kept]
    model = transformers_model(checkpoint, decoded(tmp_path / "out"), tmp_path / "decoded")
    prompts = make_ragged_prompts(2, 320)
    with run_engine(tmp_path / "out") as engine:
        assert generate_ids(engine, prompts, num_tokens=8) == [greedy_ids(model, prompt, 8) for prompt in prompts]


def test_other_files_come_along(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints.write("llama").path
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("do")
    (folder / "pytorch_model.bin").write_text("not this")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")})
    )
    quantised(TinyCheckpoint(folder, None), tmp_path / "out", "fp8")
    left = {path.relative_to(folder) for path in folder.rglob("*")} - {
        path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")
    }
    assert left == {Path("pytorch_model.bin"), Path("model.safetensors.index.json")}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out"))
    assert {name: value for name, value in after.items() if name != "quantization_config"} == before


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for out in (tmp_path, tmp_path / "notes"):
        with pytest.raises(ValueError, match="is not an empty folder"):
            quantised(checkpoints.write("llama"), out, "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    (tmp_path / "notes").unlink()
    quantised(checkpoints.write("llama"), tmp_path, "fp8")
    assert (tmp_path / "config.json").is_file()


def test_a_quantised_model_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    quantised(checkpoints.write("llama"), tmp_path / "out", "fp8")
    again = ModelSource("again", tmp_path / "out", "safetensors")
    with pytest.raises(ValueError, match="model 'again' is quantised already"):
        quantize_model(again, tmp_path / "twice", "w4a16")
    with pytest.raises(ValueError, match="is quantised already"):
        quantised(write_quantized(checkpoints, FORMATS["awq, groups of 32"]), tmp_path / "twice", "fp8")
    with pytest.raises(ValueError, match="is a GGUF file"):
        quantised(checkpoints.write_gguf("llama"), tmp_path / "twice", "fp8")
    assert not (tmp_path / "twice").exists()


def test_gpt_oss_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Others would not find its experts under the names that they have here."""
    source = checkpoints.write("gpt_oss", num_local_experts=4, num_experts_per_tok=2).source
    with pytest.raises(ValueError, match="quantising gpt_oss is not supported"):
        quantize_model(source, tmp_path / "out", "fp8")


@pytest.mark.parametrize("to", EVERY)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_refused(
    value: float, to: Format, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = checkpoints.write("llama")
    path = checkpoint.path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = value
    save_file(tensors, path)
    with pytest.raises(
        WeightsError, match=r"layers\.1\.mlp\.up_proj\.weight holds values that are infinite or not numbers"
    ):
        quantised(checkpoint, tmp_path / "out", to)
    assert not (tmp_path / "out" / "config.json").exists()  # so that no part of it is taken for a model


def test_a_model_without_matrices_that_fit_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints.write("llama", hidden_size=40, head_dim=10, intermediate_size=60)
    with pytest.raises(ValueError, match="no matrix that w4a16 could quantise"):
        quantised(checkpoint, tmp_path / "out", "w4a16")
    assert not (tmp_path / "out").exists()


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_error_of_each_layer(
    checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.write("qwen3_moe", **MODELS["qwen3_moe"]).path
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--to", "fp8-block"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if "layer" in line)
    assert [cell.strip() for cell in head.strip("┃").split("┃")] == [
        *("layer", "q", "k", "v", "o", "gate", "up", "down", "all"),
    ]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == ["0", "1"]
    assert all(2 < float(cell) < 3 for row in rows for cell in row[1:])
    assert any(line.endswith(" % all 32 matrices") for line in lines)
    assert lines[-1].startswith("float8, a scale for each block of 128 by 128, rounded to nearest: ")


def test_the_worst_matrices_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 11) for part in ("gate", "up", "down")]
    errors = dict(zip(names, (4.0, 1.0, 0.0, 25.0, 9.0, 16.0), strict=True))
    show_report(Report("4 bits", 2_000_000, 1_000_000, [], dict.fromkeys(names, 1e4), errors), Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.replace("│", " ").split() for line in lines if line.startswith("│")]
    assert rows == [["0", "2.00", "1.00", "0.00", "1.29"], ["11", "5.00", "3.00", "4.00", "4.08"]]
    worst = [
        f"{error} % model.layers.11.mlp.{part}_proj"
        for error, part in (("3.00", "up"), ("4.00", "down"), ("5.00", "gate"))
    ]
    assert lines[-5:] == [*worst, "3.03 % all 6 matrices", "4 bits, rounded to nearest: 2.0 MB became 1.0 MB"]


# -- compressed-tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", EVERY)
def test_compressed_tensors_reads_the_same_weights(to: Format, checkpoints: Checkpoints, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    quantised(checkpoint_with_zeros(checkpoints, "llama"), tmp_path / "out", to)
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationConfig.model_validate(stated).config_groups["group_0"]
    compressor = compressors.BaseCompressor.get_value_from_registry(stated["format"])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in decoded(tmp_path / "out").items():
        module = name.removesuffix("weight")
        if f"{module}weight_scale" in stored:
            parts = {key.removeprefix(module): tensor for key, tensor in stored.items() if key.startswith(module)}
            assert torch.equal(compressor.decompress(parts, scheme)["weight"], value), name
