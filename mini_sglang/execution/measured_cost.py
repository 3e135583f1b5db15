"""What steps take on this machine, measured once when the engine starts: where steps are bounded or drafts weighed."""

from __future__ import annotations

import time

import torch

from mini_sglang.execution.model_runner import Runner
from mini_sglang.model_config import ModelConfig
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import UNKNOWN, NewPages, NewRequest, Row, ScheduledBatch
from mini_sglang.scheduling.step_cost import StepCost

_TIMED = {"cpu": (1, 32), "cuda": (16, 1024)}  # tokens of the prompts that are timed
_DRAFTED = 3  # tokens that are timed where a model drafts


def measured_cost(
    runner: Runner,
    model: ModelConfig,
    device: str,
    page_size: int,
    *,
    most_tokens: int,
    num_parameters: int,
    drafts: bool,
) -> StepCost:
    """What steps take, by two prompts: a short one, which takes what any step takes, and a longer one.

    They have at most `most_tokens`. A token of KV is read as fast as a weight, and a pair of tokens multiplied as fast
    as a token by the weights. With `drafts` a model drafts, whose tokens are timed too.
    """

    def time_us(tokens: int, draft: list[int] | None = None) -> float:
        batch, start = prompt_step(tokens, page_size, draft), time.perf_counter()
        runner.run(batch)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6

    few, many = (min(tokens, most_tokens) for tokens in _TIMED[device])
    step_us, prompt_us = (min(time_us(tokens) for _ in range(2)) for tokens in (few, many))
    token_us = max(prompt_us - step_us, step_us / 10) / max(many - few, 1)
    kv_numbers = 2 * model.num_layers * model.num_kv_heads * model.head_dim  # of one token
    context_us = step_us * kv_numbers / num_parameters
    pair_us = token_us * 2 * model.num_layers * model.num_heads * model.head_dim / num_parameters
    draft_us, drafted = 0.0, min(_DRAFTED, most_tokens - 1)
    if drafts and drafted:
        by_model, known = (min(time_us(drafted + 1, [token] * drafted) for _ in range(3)) for token in (UNKNOWN, 0))
        draft_us = max(by_model - known, 0.0) / drafted
    return StepCost(step_us, token_us, context_us, token_us, pair_us, draft_us)


def prompt_step(tokens: int, page_size: int, draft: list[int] | None = None) -> ScheduledBatch:
    """A step that computes a prompt of zeros in slot 0, on the first pages; the last tokens may be drafted."""
    return ScheduledBatch(
        step=0,
        rows=[Row(slot=0, start=0, count=tokens, samples=1 + len(draft or ()))],
        new_requests=[NewRequest(0, [0] * tokens, tokens, SamplingParams(temperature=0), seed=0)],
        new_pages=[NewPages(slot=0, first_index=0, page_ids=list(range(-(-tokens // page_size))))],
        page_copies=[],
        drafts={0: draft} if draft else {},
    )
