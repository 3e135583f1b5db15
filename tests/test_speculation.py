"""Speculation on real models: the same text and distribution, with tokens accepted, and proposers of one's own."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_sglang import LLM, Engine, EngineConfig, SamplingParams
from mini_sglang.request import Request
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


class Likely:
    """Drafts the likeliest end of each text."""

    def __init__(self, chances: dict[tuple[int, ...], float]) -> None:
        self._descending = sorted(chances, key=chances.__getitem__, reverse=True)

    def propose(self, request: Request, most: int) -> list[int]:
        begun = tuple(request.output_ids)
        return list(next(text for text in self._descending if text[: len(begun)] == begun)[len(begun) :])

    def forget(self, request: Request) -> None:
        pass


def test_sampled_texts_are_as_frequent_as_the_model_says(checkpoints: Checkpoints) -> None:
    """Three tokens in a row out of five, at temperature 1: chi-squared against transformers, plain and drafted."""
    checkpoint, prompt, five, count = checkpoints.write("llama"), [3, 4, 5], [40, 60, 80, 100, 120], 2000
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, chance in chances.items():
            with torch.inference_mode():
                logits = checkpoint.model(torch.tensor([[*prompt, *text]])).logits[0, -1, five]
            for token_id, share in zip(five, logits.softmax(-1).tolist(), strict=True):
                longer[*text, token_id] = chance * share
        chances = longer
    for proposer, first_seed in ((None, 0), (Likely(chances), count)):
        seeds = range(first_seed, first_seed + count)
        params = [SamplingParams(seed=seed, max_tokens=3, allowed_token_ids=five) for seed in seeds]
        with LLM(
            str(checkpoint.path), dtype="float32", num_threads=1, speculative_gate=False, proposer=proposer
        ) as llm:
            texts = Counter(
                tuple(output.token_ids) for output in llm.generate([prompt] * count, params, progress=False)
            )
            drafts = llm.engine.stats().drafts
        assert drafts is None if proposer is None else drafts is not None
        if drafts is not None:
            assert count / 10 < drafts.num_accepted_tokens < drafts.num_draft_tokens - count / 10
        seldom = [text for text, chance in chances.items() if chance * count < 5]
        cells = [(texts[text], chance * count) for text, chance in chances.items() if text not in seldom]
        cells.append((sum(texts[text] for text in seldom), sum(chances[text] for text in seldom) * count))
        chi_squared = sum((seen - expected) ** 2 / expected for seen, expected in cells)
        freedom = len(cells) - 1
        assert freedom > 20
        assert chi_squared < freedom + 4 * math.sqrt(2 * freedom)


def test_the_proposer_of_the_documentation_is_asked() -> None:
    page = Path(__file__).parent.parent / "docs" / "speculation.md"
    [example] = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(example, str(page), "exec"), names)
    with names["llm"] as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        [output] = llm.generate(["Hello, world\nHello, world\nHello"], params, progress=False)
        drafts = llm.engine.stats().drafts
    assert output.text.startswith(", world\nHello, world")
    assert drafts.num_accepted_at[:3] == [drafts.num_drafts, drafts.num_drafts, 0]


class Beyond:
    """Drafts a token that the model has, and one that it does not have."""

    def propose(self, request: Request, most: int) -> list[int]:
        return [5, 320]

    def forget(self, request: Request) -> None:
        pass


def test_a_token_that_the_model_does_not_have_costs_no_request_its_answer(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model=str(checkpoints.write("llama").path), dtype="float32", num_threads=1)
    params = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)] * 2
    tokens = []
    for proposer in (None, Beyond()):
        engine = Engine(config.replace(speculative_gate=False), proposer=proposer)
        outputs = run_all(engine, [[7, 8], [40]], params)
        tokens.append([[token_id for one in request for token_id in one.token_ids] for request in outputs])
        drafts = engine.stats().drafts
        engine.close()
    assert tokens[0] == tokens[1]
    assert drafts is not None
    assert drafts.num_draft_tokens == drafts.num_drafts > 0
    assert "proposer Beyond drafts token 320, but token ids are between 0 and 319" in caplog.text
