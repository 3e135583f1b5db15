"""Speculation in random schedules: whatever is drafted for whom beside whom, each gets the tokens of the plain run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mini_sglang import Engine, EngineConfig, SamplingParams
from mini_sglang.outputs import FinishReason
from tests.drafting import Knowing
from tests.tiny import Checkpoints, run_engine, use_thread_workers


class Ask(NamedTuple):
    prompt: list[int]
    params: SamplingParams


class Answer(NamedTuple):
    token_ids: list[int]
    reason: FinishReason | None
    chosen: list[list[int]]  # the tokens that log-probabilities are of


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "of": {"type": "integer"}}, "required": ["of"]}
BEGINNING = [(7 * index) % 90 + 5 for index in range(40)]
ASKS = {
    "greedy": Ask(BEGINNING[:30], GREEDY),
    "same": Ask(BEGINNING[:30], GREEDY),
    "longer": Ask([*BEGINNING, 9], SamplingParams(temperature=0, max_tokens=9, logprobs=2)),
    "seeded": Ask(BEGINNING[:12], SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True)),
    "filtered": Ask([4], SamplingParams(temperature=0.8, seed=4, top_p=0.9, top_k=40, max_tokens=17, logprobs=1)),
    "penalised": Ask([8, 8], SamplingParams(temperature=0, max_tokens=20, frequency_penalty=1, logit_bias={8: 9.0})),
    "held back": Ask(BEGINNING[:21], SamplingParams(seed=5, max_tokens=20, min_tokens=9, logit_bias={2: 7.0})),
    "short": Ask([5, 6, 7], SamplingParams(temperature=0, max_tokens=1)),
    "looked up": Ask(BEGINNING[:17], SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1)),
    "regex": Ask(BEGINNING[:9], SamplingParams(regex="[a-z]{3}, always the same, [0-9]{6}", temperature=1, seed=6)),
    "choice": Ask([11], SamplingParams(choice=["abc, def", "abc, dab"], temperature=0)),
    "schema": Ask(  # whose limit is below that of any pool: it decides where the way to the end begins
        BEGINNING[:33],
        SamplingParams(
            response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            temperature=1,
            seed=7,
            max_tokens=40,
            logprobs=0,
        ),
    ),
}


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> Path:
    return checkpoints.write("llama").path


@pytest.fixture(scope="module")
def plain(model: Path) -> Mapping[str, Answer]:
    with run_engine(model) as engine:
        return {name: Run(engine, {name: ask}).to_the_end()[name] for name, ask in ASKS.items()}


class Run:
    """Requests in an engine, by id."""

    def __init__(self, engine: Engine, asks: Mapping[str, Ask]) -> None:
        self._engine = engine
        self.answers: dict[str, Answer] = {}
        for name, ask in asks.items():
            self.add(name, ask)

    def add(self, name: str, ask: Ask) -> None:
        self._engine.add_request(name, ask.prompt, ask.params)
        self.answers[name] = Answer([], None, [])

    def step(self) -> None:
        for output in self._engine.step():
            assert output.error is None, output.error
            answer = self.answers[output.request_id]
            assert answer.reason is None, f"{output.request_id} goes on after its end"
            token_ids, chosen = answer.token_ids + output.token_ids, list(answer.chosen)
            chosen += [entry.token_ids for entry in output.logprobs or ()]
            self.answers[output.request_id] = Answer(token_ids, output.finish_reason, chosen)
        self._engine.check()

    def to_the_end(self) -> Mapping[str, Answer]:
        while self._engine.has_work:
            self.step()
        return self.answers


@pytest.mark.parametrize("accuracy", [0.7, 1.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1, "max_prefill_tokens": 13, "num_pages": 400, "max_running_requests": 5},
        {"page_size": 3, "run_ahead": 1, "num_pages": 26},
        {"page_size": 16, "run_ahead": 1, "max_prefill_tokens": 24, "max_running_requests": 3},
        {"page_size": 3, "run_ahead": 2, "cache": "naive", "num_pages": 80},
        {"page_size": 4, "tp": 2, "num_pages": 60},
    ],
    ids=["pages of 1, chunked", "pages of 3, preempted", "pages of 16, few at once", "run-ahead of 2", "two ranks"],
)
def test_each_gets_the_plain_answer_in_any_company(
    model: Path, plain: Mapping[str, Answer], settings: dict[str, Any], accuracy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come at random, several with the same prompt, and some are aborted."""
    use_thread_workers(monkeypatch)
    rng = random.Random(str(settings))
    proposer = Knowing({name: answer.token_ids for name, answer in plain.items()}, accuracy)
    config = EngineConfig(model=str(model), dtype="float32", num_threads=1, speculative_gate=False, **settings)
    engine, aborted = Engine(config, proposer=proposer), set()
    try:
        engine.scheduler.expected_output = 0.0  # admits boldly
        run = Run(engine, {})
        for turn in range(60):
            name = rng.choice(list(ASKS))
            run.add(f"{name}:{turn}", ASKS[name])
            if rng.random() < 0.2:
                aborted.add(leaving := rng.choice([name for name, answer in run.answers.items() if not answer.reason]))
                engine.abort(leaving)
            for _ in range(rng.randrange(4)):
                run.step()
        for name, answer in run.to_the_end().items():
            expected = plain[name.partition(":")[0]]
            if name in aborted:
                assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
            else:
                assert answer == expected, name
        stats = engine.stats()
        assert stats.drafts is not None
        assert stats.drafts.num_accepted_tokens > 50
        assert (stats.drafts.num_accepted_tokens < stats.drafts.num_draft_tokens) == (accuracy < 1)
        assert stats.num_used_pages == 0
        assert stats.num_preemptions > 0 or settings["page_size"] != 3 or settings["run_ahead"] == 2
    finally:
        engine.close()


def test_rows_with_and_without_drafts_stand_in_any_order(model: Path, plain: Mapping[str, Answer]) -> None:
    """Right and wrong drafts, one under a grammar, a request without, and prompts that take several steps."""
    known = {name: plain[name].token_ids for name in ("greedy", "regex")}
    known["filtered"] = [token ^ 1 for token in plain["filtered"].token_ids]
    config = EngineConfig(model=str(model), dtype="float32", num_threads=1, cache="naive", max_prefill_tokens=25)
    engine = Engine(config.replace(speculative_gate=False), proposer=Knowing(known, 1.0, whole=True))
    try:
        for order in itertools.permutations(["greedy", "regex", "filtered", "longer"]):
            answers = Run(engine, {name: ASKS[name] for name in order}).to_the_end()
            assert answers == {name: plain[name] for name in order}, order
    finally:
        engine.close()
