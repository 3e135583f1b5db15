"""`speculative="ngram"` on a real model: the same text, with tokens accepted where it repeats something."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from mini_sglang import LLM, EngineConfig, SamplingParams
from tests.tiny import Checkpoints, run_all, run_engine

REPEATED = [[7, 8, 9, 10, 11] * 6, [20, 21, 22, 23] * 8 + [20, 21], [5, 6, 7, 8, 9, 5, 6], [40]]
PARAMS = (
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.6, seed=3, max_tokens=40, ignore_eos=True, top_p=0.9, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, seed=4, max_tokens=40, logprobs=2),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, min_tokens=10, logit_bias={5: 2.0}),
)


def answers(checkpoints: Checkpoints, **settings: object) -> tuple[list[object], int]:
    """What the requests get, and the number of accepted tokens."""
    prompts = [prompt for prompt in REPEATED for _ in PARAMS]
    with run_engine(checkpoints.write("llama").path, **settings) as engine:
        outputs = run_all(engine, prompts, PARAMS * len(REPEATED), arrivals=3)
        stats = engine.stats()
    tokens = [[token_id for output in request for token_id in output.token_ids] for request in outputs]
    entries = [[entry for output in request for entry in output.logprobs or ()] for request in outputs]
    ends = [request[-1].finish_reason for request in outputs]
    chosen = [[entry.token_ids for entry in request] for request in entries]
    return [tokens, chosen, ends], 0 if stats.drafts is None else stats.drafts.num_accepted_tokens


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("gate", [False, True])
def test_text_is_the_same(checkpoints: Checkpoints, run_ahead: int, gate: bool) -> None:
    plain, _ = answers(checkpoints)
    drafted, accepted = answers(checkpoints, speculative="ngram", speculative_gate=gate, run_ahead=run_ahead)
    assert drafted == plain
    if not gate:  # whether drafts pay, a clock decides
        assert accepted > 40


def test_what_is_drawn_has_the_same_distribution(checkpoints: Checkpoints) -> None:
    """Not only by seed: the second of two tokens, over 600 seeds, drafted as what came most often."""

    class Usual:
        draft: tuple[int, ...] = ()

        def propose(self, request: object, most: int) -> list[int]:
            return list(self.draft)

        def forget(self, request: object) -> None:
            pass

    usual, prompt = Usual(), [3, 4, 5]
    fields = dataclasses.asdict(EngineConfig(model=str(checkpoints.write("llama").path), dtype="float32"))
    settings = {**fields, "speculative": "ngram", "speculative_gate": False}
    with LLM(proposer=usual, **settings) as llm:
        params = [SamplingParams(temperature=0.5, seed=seed, max_tokens=3, ignore_eos=True) for seed in range(600)]
        plain = llm.generate([prompt] * 600, params, progress=False)
        usual.draft = tuple(Counter(output.token_ids[1] for output in plain).most_common(1)[0][:1])
        drafted = llm.generate([prompt] * 600, params, progress=False)
        drafts = llm.engine.stats().drafts
    assert drafts is not None
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
