"""What a workload has to move and multiply at the very least, and how long the hardware's ceilings make that take.

Arithmetic over a model's sizes and the workload's lengths. Knows no engine and measures nothing (`hardware.py` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mini_sglang.model_config import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """What the device was seen to do at best."""

    bytes_per_second: float  # of a copy on the device, bytes read plus bytes written
    flops_per_second: float  # of a large matrix product

    def times(self, devices: int) -> Ceilings:
        """What `devices` of them do at best, if they never wait for each other."""
        return Ceilings(self.bytes_per_second * devices, self.flops_per_second * devices)

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The least time of one operation, limited by the one or by the other."""
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


@dataclass(frozen=True)
class Traffic:
    """Bytes and FLOPs that a workload cannot avoid; FLOPs are those of matrix products with weights."""

    weight_bytes: int  # all weights, but of experts those that are chosen, once a step of the longest answer
    kv_read_bytes: int  # every decoded token reads its sequence's keys and values once
    kv_written_bytes: int
    prompt_flops: int
    decode_flops: int

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        prompts: Sequence[int],
        outputs: Sequence[int],
        *,
        weight_bytes: float,
        kv_bytes: int,
        head_bytes: float | None = None,
    ) -> Traffic:
        """`prompts` and `outputs`: the lengths of each sequence, all of which start at once; bytes are per value.

        The output head has as many as other weights, unless `head_bytes` says how many.
        """
        in_layers, head = num_weights(model)
        per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * kv_bytes
        lengths = list(zip(prompts, outputs, strict=True))
        # the prompts, then a token of each sequence that goes on
        steps = [sum(prompts), *(sum(output > step for output in outputs) for step in range(1, max(outputs)))]
        return cls(
            weight_bytes=round(
                sum(weights_read(model, tokens) for tokens in steps) * weight_bytes
                + head * len(steps) * (weight_bytes if head_bytes is None else head_bytes)
            ),
            kv_read_bytes=per_token * sum(sum(range(prompt + 1, prompt + output)) for prompt, output in lengths),
            kv_written_bytes=per_token * (sum(prompts) + sum(outputs)),
            prompt_flops=2 * in_layers * sum(prompts),
            decode_flops=2 * in_layers * (sum(outputs) - len(outputs)) + 2 * head * sum(outputs),
        )

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes

    def floor_seconds(self, ceilings: Ceilings) -> float:
        """The least time: all bytes at the rate of a copy, then the prompts' products at the rate of a large one.

        Decoding is taken to be limited by bytes alone, as it is for up to about 250 rows on an H100 in bfloat16.
        """
        return self.num_bytes / ceilings.bytes_per_second + self.prompt_flops / ceilings.flops_per_second


def num_weights(model: ModelConfig) -> tuple[int, int]:
    """Weights in the layers' matrices that one token meets, and in the output head. The embedding is looked up only."""
    return round(weights_read(model, 1)), model.hidden_size * model.vocab_size


def weights_read(model: ModelConfig, tokens: int) -> float:
    """Weights in the layers' matrices that a step of `tokens` tokens has to read.

    Of a mixture these are the experts that the tokens are expected to choose, if all are chosen equally often.
    """
    attention = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    experts = model.experts
    sparse = 0 if experts is None else sum(layer not in experts.dense_layers for layer in range(model.num_layers))
    dense_mlps = (model.num_layers - sparse) * 3 * model.hidden_size * model.intermediate_size
    weights = float(model.num_layers * attention + dense_mlps)
    if experts is not None:
        left_out = (1 - experts.experts_per_token / experts.num_experts) ** tokens  # of each expert: the chance
        chosen = experts.num_experts * (1 - left_out)
        weights += sparse * model.hidden_size * (experts.num_experts + 3 * experts.intermediate_size * chosen)
    return weights
