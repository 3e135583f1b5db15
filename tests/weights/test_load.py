"""Checkpoints written by transformers and by the gguf package reach their slots value by value, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_sglang.model_config import ModelConfig
from mini_sglang.weights.dummy import load_dummy_weights
from mini_sglang.weights.gguf import open_gguf
from mini_sglang.weights.gguf_file import GGUFFile
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.load import has_quantized_weights, load_weights
from mini_sglang.weights.model_config import load_model_config
from mini_sglang.weights.quantized_weight import QuantizedWeight
from mini_sglang.weights.tensor import CheckpointTensor, WeightsError, WeightSlot
from tests.tiny import Checkpoints


class Store:
    """Slots for every parameter of a model that keep the tensors they are given, dense and as blocks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.blocks: dict[str, QuantizedWeight] = {}
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.slots = {name: WeightSlot(shape, self._keeper(name)) for name, shape in shapes.items()}

    def _keeper(self, name: str) -> Callable[[CheckpointTensor], None]:
        def keep(tensor: CheckpointTensor) -> None:
            self.values[name] = tensor.dense().float().clone()
            if (blocks := tensor.quantized()) is not None:
                self.blocks[name] = blocks

        return keep

    def load(self, source: ModelSource, config: ModelConfig | None = None) -> None:
        load_weights(source, config or load_model_config(source), self.slots, show_progress=False)

    def assert_equals(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            assert torch.equal(self.values[name], parameter.float()), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_safetensors_load_value_by_value(checkpoints: Checkpoints, family: str, sharded: bool, tied: bool) -> None:
    checkpoint = checkpoints.write(family, sharded=sharded, tie_word_embeddings=tied)
    assert (len(list(checkpoint.path.glob("*.safetensors"))) > 1) == sharded
    store = Store(checkpoint.model)
    store.load(checkpoint.source)
    store.assert_equals(checkpoint.model)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_loads_value_by_value(checkpoints: Checkpoints, family: str, kind: str) -> None:
    checkpoint = checkpoints.write_gguf(family, kind=kind)
    store = Store(checkpoint.model)
    store.load(checkpoint.source)
    store.assert_equals(checkpoint.model)


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_gguf_of_llama_variants(checkpoints: Checkpoints, config: dict[str, Any]) -> None:
    checkpoint = checkpoints.write_gguf("llama", head_dim=32, **config)
    store = Store(checkpoint.model)
    store.load(checkpoint.source)
    store.assert_equals(checkpoint.model)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_blocks_spell_the_dense_values(checkpoints: Checkpoints, family: str, kind: str) -> None:
    checkpoint = checkpoints.write_gguf(family, kind=kind)
    store = Store(checkpoint.model)
    store.load(checkpoint.source)
    assert {name for name, value in store.values.items() if value.ndim == 2} == set(store.blocks)
    for name, blocks in store.blocks.items():
        assert blocks.minimum is not None
        assert (blocks.q.dtype, blocks.scale.dtype, blocks.minimum.dtype) == (torch.uint8, torch.float32, torch.float32)
        assert int(blocks.q.max()) <= 15
        scale, minimum = (part.repeat_interleave(blocks.group_size, dim=1) for part in (blocks.scale, blocks.minimum))
        assert torch.equal(blocks.q * scale + minimum, store.values[name]), name
        assert torch.equal(blocks.dense(), store.values[name]), name


def test_files_of_blocks_have_quantized_weights(checkpoints: Checkpoints) -> None:
    for kind in ("Q4_1", "Q5_0", "Q8_0"):
        assert has_quantized_weights(checkpoints.write_gguf("llama", kind=kind).source)
    assert not has_quantized_weights(checkpoints.write_gguf("llama", kind="F16").source)
    assert not has_quantized_weights(checkpoints.write("llama").source)


def test_one_error_lists_missing_unexpected_and_misshapen(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("llama")
    path = checkpoint.path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.extra.weight"] = torch.zeros(3)
    tensors["model.norm.weight"] = torch.zeros(63)
    save_file(tensors, path)
    store = Store(checkpoint.model)
    with pytest.raises(WeightsError) as error:
        store.load(checkpoint.source)
    message = str(error.value)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in message
    assert "1 unexpected: model.layers.1.mlp.extra.weight" in message
    assert "1 misshapen: model.norm.weight is [63], expected [64]" in message
    assert not store.values, "nothing is loaded from a checkpoint that does not fit"


def test_rotary_buffers_and_the_copy_of_a_tied_head_are_ignored(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("llama", tie_word_embeddings=True)
    path = checkpoint.path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    store = Store(checkpoint.model)
    store.load(checkpoint.source)
    store.assert_equals(checkpoint.model)


def test_a_head_slot_of_a_tied_model_gets_the_embedding(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("llama", tie_word_embeddings=True)
    store = Store(checkpoint.model)
    store.slots["lm_head.weight"] = WeightSlot((320, 64), store._keeper("lm_head.weight"))
    store.load(checkpoint.source)
    assert torch.equal(store.values["lm_head.weight"], store.values["model.embed_tokens.weight"])


def test_missing_shards_are_named(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("llama", sharded=True)
    shards = sorted(checkpoint.path.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(WeightsError, match=f"lacks 1 of {len(shards)} shards: {shards[1].name}"):
        Store(checkpoint.model).load(checkpoint.source)


def test_cut_files_are_named(checkpoints: Checkpoints) -> None:
    folder, packed = checkpoints.write("llama"), checkpoints.write_gguf("llama")
    config = load_model_config(folder.source)
    for checkpoint, path in ((folder, folder.path / "model.safetensors"), (packed, packed.path)):
        content = path.read_bytes()
        for length in (0, 10, 1000, len(content) - 10):
            path.write_bytes(content[:length])
            with pytest.raises(ValueError, match=path.name):
                Store(checkpoint.model).load(checkpoint.source, config)


def test_an_index_that_points_elsewhere_is_refused(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("llama")
    index = checkpoint.path / "model.safetensors.index.json"
    for content in ("[]", "{", '{"weight_map": 3}'):
        index.write_text(content)
        with pytest.raises(WeightsError, match=r"not a valid index"):
            Store(checkpoint.model).load(checkpoint.source)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}))
    with pytest.raises(WeightsError, match=r"outside its folder: \.\./model\.safetensors"):
        Store(checkpoint.model).load(checkpoint.source)


def test_integer_weights_are_refused(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("llama")
    path = checkpoint.path / "model.safetensors"
    save_file({**load_file(path), "model.norm.weight": torch.zeros(64, dtype=torch.int8)}, path)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight \(I8\)"):
        Store(checkpoint.model).load(checkpoint.source)


def test_bfloat16_stays_bfloat16(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints.write("llama")
    checkpoint.model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    source = ModelSource("half", tmp_path / "half", "safetensors")
    seen = []
    slots = {
        name: WeightSlot(tuple(parameter.shape), lambda tensor: seen.append(tensor.dense().dtype))
        for name, parameter in checkpoint.model.named_parameters()
    }
    load_weights(source, load_model_config(source), slots, show_progress=False)
    assert set(seen) == {torch.bfloat16}


def test_builtin_model_equals_the_gguf_packages_dequantisation(builtin_model: ModelSource) -> None:
    config = load_model_config(builtin_model)
    reader = gguf.GGUFReader(builtin_model.path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    wanted = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.3.mlp.down_proj.weight": "blk.3.ffn_down.weight",
        "model.layers.3.self_attn.v_proj.weight": "blk.3.attn_v.weight",
        "model.layers.3.self_attn.q_proj.weight": "blk.3.attn_q.weight",
    }
    values: dict[str, torch.Tensor] = {}

    def keep(tensor: CheckpointTensor) -> None:
        if tensor.name in wanted:
            values[tensor.name] = tensor.dense()

    tensors = open_gguf(GGUFFile(builtin_model.path), config)
    slots = {name: WeightSlot(tensor.shape, keep) for name, tensor in tensors.items()}
    load_weights(builtin_model, config, slots, show_progress=False)
    for name, gguf_name in wanted.items():
        raw = stored[gguf_name]
        expected = torch.from_numpy(gguf.quants.dequantize(raw.data, raw.tensor_type))
        if "q_proj" in name:  # interleaved rotary pairs → halves
            expected = expected.view(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
        assert torch.equal(values[name], expected), name


class TestDummyWeights:
    def fill(self, model: torch.nn.Module, seed: int, *, backwards: bool = False) -> dict[str, torch.Tensor]:
        store = Store(model)
        names = sorted(store.slots, reverse=backwards)
        slots = {name: store.slots[name] for name in names}
        load_dummy_weights(slots, seed=seed, device=torch.device("cpu"), show_progress=False)
        return store.values

    def test_depend_on_seed_and_name_alone(self, checkpoints: Checkpoints) -> None:
        model = checkpoints.write("llama").model
        first, again, other = self.fill(model, 7), self.fill(model, 7, backwards=True), self.fill(model, 8)
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not any(torch.equal(first[name], other[name]) for name in first)
        assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])

    def test_norms_are_around_one_and_the_rest_around_zero(self, checkpoints: Checkpoints) -> None:
        for name, value in self.fill(checkpoints.write("qwen3").model, 0).items():
            center = 1.0 if name.endswith("norm.weight") else 0.0
            assert abs(float(value.mean()) - center) < 0.02, name
            assert 0.005 < float(value.std()) < 0.05, name
