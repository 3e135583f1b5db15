"""However a checkpoint stores its experts, each one's weights reach the same slot."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from mini_sglang.weights.experts import name_experts, split_gpt_oss
from mini_sglang.weights.safetensors import open_safetensors
from tests.tiny import Checkpoints


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("fused", [False, True])
def test_each_experts_weights_have_one_name(checkpoints: Checkpoints, family: str, fused: bool) -> None:
    checkpoint = checkpoints.write(family, fused=fused, num_local_experts=4, num_experts_per_tok=2)
    stored = load_file(checkpoint.path / "model.safetensors")
    assert ("model.layers.1.mlp.experts.gate_up_proj" in stored) == fused
    tensors = name_experts(open_safetensors(checkpoint.path))
    state = checkpoint.model.state_dict()
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp"
        assert torch.equal(tensors[f"{prefix}.gate.weight"].dense(), state[f"{prefix}.gate.weight"])
        for expert in range(4):
            gate, up = state[f"{prefix}.experts.gate_up_proj"][expert].chunk(2)
            down = state[f"{prefix}.experts.down_proj"][expert]
            for name, wanted in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                tensor = tensors[f"{prefix}.experts.{expert}.{name}.weight"]
                assert tensor.shape == wanted.shape
                assert torch.equal(tensor.dense(), wanted)
    assert len([name for name in tensors if ".experts." in name]) == 2 * 4 * 3, "nothing else is left"


def test_gpt_osss_experts_have_the_same_names(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints.write("gpt_oss", num_local_experts=3, num_experts_per_tok=2)
    tensors = split_gpt_oss(open_safetensors(checkpoint.path))
    state = checkpoint.model.state_dict()
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp"
        assert torch.equal(tensors[f"{prefix}.gate.weight"].dense(), state[f"{prefix}.router.weight"])
        assert torch.equal(tensors[f"{prefix}.gate.bias"].dense(), state[f"{prefix}.router.bias"])
        for expert in range(3):
            both, bias = (state[f"{prefix}.experts.gate_up_proj{part}"][expert] for part in ("", "_bias"))
            down, down_bias = (state[f"{prefix}.experts.down_proj{part}"][expert] for part in ("", "_bias"))
            for name, wanted in (
                ("gate_proj.weight", both[:, 0::2].t()),
                ("up_proj.weight", both[:, 1::2].t()),
                ("down_proj.weight", down.t()),
                ("gate_proj.bias", bias[0::2]),
                ("up_proj.bias", bias[1::2]),
                ("down_proj.bias", down_bias),
            ):
                tensor = tensors[f"{prefix}.experts.{expert}.{name}"]
                assert tensor.shape == wanted.shape
                assert torch.equal(tensor.dense(), wanted)
    assert len([name for name in tensors if ".experts." in name]) == 2 * 3 * 6, "nothing else is left"


def test_other_tensors_keep_their_names(checkpoints: Checkpoints) -> None:
    tensors = open_safetensors(checkpoints.write("llama").path)
    assert name_experts(tensors) == split_gpt_oss(tensors) == tensors
