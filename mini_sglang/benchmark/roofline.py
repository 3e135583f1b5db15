"""What a workload has to move and multiply at the very least, and how long the hardware's ceilings make that take.

Arithmetic over a model's sizes and the workload's lengths. Knows no engine and measures nothing (`hardware.py` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mini_sglang.models.config import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """What the device was seen to do at best."""

    bytes_per_second: float  # of a copy on the device, bytes read plus bytes written
    flops_per_second: float  # of a large matrix product

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The least time of one operation, limited by the one or by the other."""
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


@dataclass(frozen=True)
class Traffic:
    """Bytes and FLOPs that a workload cannot avoid; FLOPs are those of matrix products with weights."""

    weight_bytes: int  # all weights, once a step of the longest answer
    kv_read_bytes: int  # every decoded token reads its sequence's keys and values once
    kv_written_bytes: int
    prompt_flops: int
    decode_flops: int

    @classmethod
    def of(
        cls, model: ModelConfig, prompts: Sequence[int], outputs: Sequence[int], *, weight_bytes: int, kv_bytes: int
    ) -> Traffic:
        """`prompts` and `outputs`: the lengths of each sequence, all of which start at once; bytes are per value."""
        in_layers, head = num_weights(model)
        per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * kv_bytes
        lengths = list(zip(prompts, outputs, strict=True))
        return cls(
            weight_bytes=(in_layers + head) * weight_bytes * max(outputs),
            kv_read_bytes=per_token * sum(sum(range(prompt + 1, prompt + output)) for prompt, output in lengths),
            kv_written_bytes=per_token * (sum(prompts) + sum(outputs)),
            prompt_flops=2 * in_layers * sum(prompts),
            decode_flops=2 * in_layers * (sum(outputs) - len(outputs)) + 2 * head * sum(outputs),
        )

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes

    @property
    def flops(self) -> int:
        return self.prompt_flops + self.decode_flops

    def floor_seconds(self, ceilings: Ceilings) -> float:
        """The least time: all bytes at the rate of a copy, then the prompts' products at the rate of a large one.

        Decoding is taken to be limited by bytes alone, as it is for up to about 250 rows on an H100 in bfloat16.
        """
        return self.num_bytes / ceilings.bytes_per_second + self.prompt_flops / ceilings.flops_per_second


def num_weights(model: ModelConfig) -> tuple[int, int]:
    """Weights in the layers' matrices, and in the output head. The embedding is looked up, not read.

    ValueError for a mixture of experts, of which a step reads what its tokens chose.
    """
    if model.experts is not None:
        raise ValueError(f"the floor of a mixture of experts ({model.architecture}) is not known to bench")
    attention = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    return (attention + mlp) * model.num_layers, model.hidden_size * model.vocab_size
