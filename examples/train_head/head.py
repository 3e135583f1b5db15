"""An EAGLE-3 head (arXiv 2503.01840) in plain PyTorch: its layer, how it is unrolled in training, and its files.

Pair n of a text is the target's state g at position n and the token at n + 1; the head's guess is the token at n + 2,
and its own state is the g of the next pair. `export` writes a folder with the names that SpecForge and vLLM read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from mini_sglang.model_config import ModelConfig
from mini_sglang.quantize import pack_int4
from mini_sglang.weights.quantize import quantize_int4

KeysValues = tuple[Tensor, Tensor]  # [batch, kv_heads, length, head_dim] each


def target_layers(num_layers: int) -> tuple[int, int, int]:
    """The target's layers whose inputs a head reads. Raises ValueError if the model has no three such layers."""
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise ValueError(f"a head reads the inputs of layers 2, L // 2 and L - 3, which need L >= 7, got {num_layers}")
    return layers


class Norm(nn.RMSNorm):
    """In float32, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Attention(nn.Module):
    """A query at pair n attends to the pairs up to n, and to what the head itself added after pair n."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.head_dim, self.num_groups = size, config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(2 * hidden, config.num_heads * size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.num_kv_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.num_kv_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_heads * size, hidden, bias=False)
        self.rope_theta = config.rope_theta

    def forward(self, x: Tensor, step: int, past: list[KeysValues]) -> Tensor:
        """x: [batch, length, 2 hidden] of step `step`; appends its keys and values to `past`, one entry per step."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        frequencies = self.rope_theta ** -(torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        angles = torch.outer(
            torch.arange(x.shape[1], device=x.device) + step + 1, frequencies
        )  # [length, head_dim / 2]
        cos, sin = (torch.cat((part, part), -1).to(q.dtype) for part in (angles.cos(), angles.sin()))
        q, k = (y * cos + _half_turned(y) * sin for y in (q, k))
        past.append((k, v))
        (keys, values), *drafts = [
            (k.repeat_interleave(self.num_groups, 1), v.repeat_interleave(self.num_groups, 1)) for k, v in past
        ]
        if not drafts:
            attended = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        else:
            length = x.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (q @ keys.mT).masked_fill(~mask, -math.inf)
            own = torch.stack([(q * own_keys).sum(-1) for own_keys, _ in drafts], -1)  # [batch, heads, length, steps]
            weights = (torch.cat((scores, own), -1) / math.sqrt(self.head_dim)).softmax(-1, torch.float32).to(v.dtype)
            attended = weights[..., :length] @ values
            for index, (_, own_values) in enumerate(drafts):
                attended = attended + weights[..., length + index, None] * own_values
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


def _half_turned(y: Tensor) -> Tensor:
    first, second = y.chunk(2, -1)
    return torch.cat((-second, first), -1)


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, intermediate: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(hidden, eps)  # of the token's embedding
        self.hidden_norm = Norm(hidden, eps)  # of g
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = MLP(hidden, intermediate)

    def forward(self, embedded: Tensor, g: Tensor, step: int, past: list[KeysValues]) -> Tensor:
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(g)), -1)
        h = g + self.self_attn(x, step, past)
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Head(nn.Module):
    """Parameters under the names of the published format. `draft_ids` [D] int64: the draft vocabulary, ascending."""

    def __init__(self, config: ModelConfig, intermediate: int, draft_ids: Tensor) -> None:
        super().__init__()
        self.config, self.draft_ids = config, draft_ids
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config, intermediate)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)

    @torch.no_grad()
    def begin_like(self, target: Any, scale: float) -> None:
        """Begin as the target's state at the last of the three layers, seen through its last layer's MLP and its own
        lm_head. `scale` brings that state to about 1."""
        hidden, last = self.config.hidden_size, target.model.layers[-1]
        nn.init.normal_(self.fc.weight, std=0.1 * scale / math.sqrt(hidden))
        self.fc.weight[:, 2 * hidden :] += scale * torch.eye(hidden, device=self.fc.weight.device)
        self.norm.weight.copy_(target.model.norm.weight)
        self.lm_head.weight.copy_(target.lm_head.weight[self.draft_ids.to(target.device)])
        if last.mlp.gate_proj.weight.shape == self.midlayer.mlp.gate_proj.weight.shape:
            self.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
            for name in ("gate_proj", "up_proj"):
                getattr(self.midlayer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
            self.midlayer.mlp.down_proj.weight.copy_(scale * last.mlp.down_proj.weight)

    def unroll(self, states: Tensor, embedded: Tensor, num_steps: int) -> list[Tensor]:
        """The head's states of each step, [batch, length, hidden], where step i reads those of step i - 1 as g.

        states: [batch, length, 3 hidden], the target's; embedded: [batch, length + num_steps, hidden], of the tokens.
        Row n of step i is pair n + i of a draft that began at pair n, so all steps keep to the same causal mask.
        """
        length, g, past, steps = states.shape[1], self.fc(states), list[KeysValues](), list[Tensor]()
        for step in range(num_steps):
            g = self.midlayer(embedded[:, step + 1 : step + 1 + length], g, step, past)
            steps.append(g)
        return steps

    def tensors(self) -> dict[str, Tensor]:
        """As the published format names them, in float16, with the two maps of the draft vocabulary."""
        draft_ids = self.draft_ids.cpu()
        tensors = {name: tensor.detach().half().cpu().contiguous() for name, tensor in self.state_dict().items()}
        tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
        tensors["t2d"] = torch.isin(torch.arange(self.config.vocab_size), draft_ids)
        return tensors

    def logits(self, h: Tensor) -> Tensor:
        """[..., hidden] to [..., D]."""
        out: Tensor = self.lm_head(self.norm(h))
        return out


def export(tensors: dict[str, Tensor], config: ModelConfig, intermediate: int, folder: Path, *, packed: bool) -> None:
    """Write config.json and model.safetensors, of `Head.tensors`: in float16, or `packed`.

    Then the output head, the largest matrix, has 4 bits a weight and a scale for each 32 inputs, and the others have 8
    bits and a scale for each output, rounded to nearest, as compressed-tensors stores them.
    """
    size = len(tensors["d2t"])
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.context_length,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    if packed:
        settings["quantization_config"] = _PACKED
        tensors = {part: value for name, tensor in tensors.items() for part, value in _packed(name, tensor).items()}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _packed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The output head in 4 bits, eight weights to a word, other matrices in 8 bits; anything else as it is."""
    module = name.removesuffix(".weight")
    if tensor.dim() != 2:
        return {name: tensor}
    if module != "lm_head":
        scale = (tensor.float().abs().amax(1, keepdim=True) / 127).half().clamp_min(torch.finfo(torch.half).tiny)
        return {name: (tensor / scale).round().to(torch.int8), f"{module}.weight_scale": scale}
    parts = pack_int4(quantize_int4(tensor, 32, scale_dtype=torch.float16))
    parts["weight_scale"] = parts["weight_scale"].half()
    return {f"{module}.{part}": value for part, value in parts.items()}


def _group(target: str, layout: str, **weights: object) -> dict[str, object]:
    return {
        "targets": [target],
        "weights": {"type": "int", "symmetric": True, "dynamic": False, **weights},
        "format": layout,
    }


_PACKED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": _group("re:lm_head", "pack-quantized", num_bits=4, strategy="group", group_size=32),
        "group_1": _group("Linear", "int-quantized", num_bits=8, strategy="channel"),
    },
    "ignore": [],
}
