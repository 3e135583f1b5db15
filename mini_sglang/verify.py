"""`mini-sglang verify MODEL`: the same prompts here and in transformers, greedy, float32, compared token for token.

The engine runs all prompts in one batch, transformers one after the other without any of our code. A GGUF file reaches
transformers as a model filled with our dequantised tensors, since its own GGUF loading is slow and gets tokenizers
wrong; so does a quantised folder, for which it would want a library per format.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mini_sglang.config import EngineConfig
from mini_sglang.llm import LLM
from mini_sglang.model_config import ExpertsConfig, ModelConfig
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.weights.gguf import open_gguf
from mini_sglang.weights.hf_config import read_quantization
from mini_sglang.weights.hub import ModelSource, find_model
from mini_sglang.weights.model_config import load_model_config
from mini_sglang.weights.quantization import open_folder

PROMPTS = {
    "capital": "The capital of France is",
    "story": "Once upon a time, there was a little robot who",
    "one token": "A",
    "list": "1, 2, 3, 4,",
    "digits": "In 1969, 3.14159  is  a 42",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "json": '{"name": "Ada", "born": 1815, "field": "',
    "leading space": "   and then the door opened",
    "chinese": "法国的首都是",
    "accents": "Il était une fois, à Besançon, un garçon nommé",
    "emoji": "Family 👨‍👩‍👧 and flags 🇫🇷 are",
    "question": "Question: What is the boiling point of water?\nAnswer:",
    "long": "The quick brown fox jumps over the lazy dog. " * 60 + "The quick",  # more than one step's token budget
}

# The contract prompt's first 20 greedy tokens, recorded from transformers, by the last part of a model's name
CONTRACT_IDS = {
    "smollm2-135m": [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216],
    "qwen3-8b": [12095, 13, 576, 6722, 315, 9625, 374] * 2 + [12095, 13, 576, 6722, 315, 9625],
}


@dataclass(frozen=True)
class Comparison:
    """One prompt's greedy continuation by both, and transformers' margin (logits, best minus second) at each token."""

    name: str
    our_ids: list[int]
    their_ids: list[int]
    margins: list[float]

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs, or None."""
        pairs = zip(self.our_ids, self.their_ids, strict=True)
        return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def verify_model(config: EngineConfig, *, max_tokens: int = 20, report: Callable[[str], object] = print) -> bool:
    """Compare `config.model` with transformers, report line by line, and return whether all is equal.

    Raises what loading the model raises, and ValueError if `max_tokens` is below 1 or leaves no room for a prompt.
    """
    source = find_model(config)
    context_length = config.context_length or load_model_config(source).context_length
    longest = context_length - max_tokens  # a small model gets the beginnings of long prompts
    if longest < 1:
        raise ValueError(f"max_tokens must be below the context length {context_length}, got {max_tokens}")
    tokenizer = load_tokenizer(source)
    equal = _tokenizers_agree(source, tokenizer, report)
    prompts = {name: tokenizer.encode(text)[:longest] for name, text in PROMPTS.items()}
    for comparison in compare(config, source, prompts, max_tokens):
        equal &= comparison.first_difference is None
        for line in _describe(comparison, tokenizer):
            report(line)
        if comparison.name == "capital":
            equal &= _equals_recorded(config.model, comparison.our_ids, report)
    report(f"{config.model}: {'equal to transformers on all prompts' if equal else 'DIFFERENT, see above'}")
    return equal


def compare(
    config: EngineConfig, source: ModelSource, prompts: dict[str, list[int]], max_tokens: int
) -> list[Comparison]:
    """Continue every prompt (token ids) by `max_tokens` greedy tokens on a CPU in float32; end tokens are ignored."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    config = config.replace(device="cpu", dtype="float32", weights="dense")
    with LLM(**dataclasses.asdict(config)) as llm:
        ours = [output.token_ids for output in llm.generate(list(prompts.values()), params)]
    model = load_reference(source)
    comparisons = []
    for (name, prompt_ids), our_ids in zip(prompts.items(), ours, strict=True):
        their_ids, margins = reference_greedy(model, prompt_ids, max_tokens)
        comparisons.append(Comparison(name, our_ids, their_ids, margins))
    return comparisons


def load_reference(source: ModelSource) -> Any:
    """The transformers model, float32, ready to run."""
    config, is_folder = load_model_config(source), source.kind == "safetensors"
    if is_folder and read_quantization(source.path) is None:
        return AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()
    hf_config = AutoConfig.from_pretrained(source.path) if is_folder else _hf_config(config)
    hf_config.quantization_config = None
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    names = model.state_dict()
    tensors = open_folder(source.path, names) if is_folder else open_gguf(source.gguf, config)
    state = _with_fused_experts({name: tensor.dense().float() for name, tensor in tensors.items()})
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    if unexpected or set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise ValueError(f"{source.path}: transformers' model lacks {missing} and has no place for {unexpected}")
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def reference_greedy(model: Any, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """transformers' greedy ids, and at each of them by how much the best logit leads the second."""
    model.generation_config = GenerationConfig()  # the checkpoint's may have penalties and end tokens
    output = model.generate(
        torch.tensor([prompt_ids]),  # [1, tokens] int64
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best_two = [logits[0].topk(2).values.tolist() for logits in output.logits]
    return output.sequences[0, len(prompt_ids) :].tolist(), [best - second for best, second in best_two]


def _tokenizers_agree(source: ModelSource, tokenizer: Tokenizer, report: Callable[[str], object]) -> bool:
    """Whether transformers' tokenizer gives the same prompt ids. For a GGUF file transformers has none to compare."""
    if source.kind == "gguf":
        return True
    reference = AutoTokenizer.from_pretrained(source.path)
    equal = True
    for name, text in PROMPTS.items():
        ours, theirs = tokenizer.encode(text), list(reference.encode(text))
        if ours != theirs:
            equal = False
            report(f"{name}: the prompt's token ids differ\n  here          {ours}\n  transformers  {theirs}")
    return equal


def _equals_recorded(model: str, our_ids: list[int], report: Callable[[str], object]) -> bool:
    """Whether the contract prompt's tokens are the recorded ones; True for a model without a record."""
    recorded = CONTRACT_IDS.get(Path(model).name.lower())
    if recorded is None:
        return True
    number = min(len(recorded), len(our_ids))
    equal = our_ids[:number] == recorded[:number]
    report(f"  recorded      {'equal' if equal else f'DIFFERENT: {recorded[:number]}'}")
    return equal


def _describe(comparison: Comparison, tokenizer: Tokenizer) -> list[str]:
    index = comparison.first_difference
    lines = [
        f"{comparison.name}: {'equal' if index is None else 'DIFFERENT'}",
        f"  here          {comparison.our_ids}",
        f"  transformers  {comparison.their_ids}",
    ]
    if index is not None:
        ours, theirs = comparison.our_ids[index], comparison.their_ids[index]
        lines.append(
            f"  token {index} differs: {ours} {tokenizer.decode([ours])!r} here, "
            f"{theirs} {tokenizer.decode([theirs])!r} there, "
            f"where the best logit leads the second by {comparison.margins[index]:.4f}"
        )
    return lines


def _with_fused_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with all experts of a layer in two tensors, as transformers 5 holds them: gate above up, and down."""
    fused: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, list[torch.Tensor]]] = {}  # prefix of a layer's experts -> projection -> by expert
    for name, tensor in state.items():
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight", name)
        if match is None:
            fused[name] = tensor
        else:  # experts follow each other in order
            parts.setdefault(match[1], {}).setdefault(match[2], []).append(tensor)
    for prefix, experts in parts.items():
        gate, up, down = (torch.stack(experts[part]) for part in ("gate", "up", "down"))
        fused |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}.down_proj": down}
    return fused


def _hf_config(config: ModelConfig) -> Any:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind != "linear":
            rope["original_max_position_embeddings"] = scaling.original_context_length
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        if scaling.kind == "yarn":
            rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            rope |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    return AutoConfig.for_model(
        config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        pad_token_id=None,  # a family's own may lie beyond this vocabulary
        **_hf_experts(config.experts),
    )


def _hf_experts(experts: ExpertsConfig | None) -> dict[str, Any]:
    """Settings under Mixtral's and Qwen3-MoE's names: each reads its own, and keeps the others as unused attributes."""
    if experts is None:
        return {}
    return {
        "num_local_experts": experts.num_experts,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize_weights,
        "mlp_only_layers": sorted(experts.dense_layers),
    }
