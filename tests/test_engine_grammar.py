"""Requests with a grammar beside free ones: in any schedule each gets the answer that it would get alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import mini_sglang.text.tokenizer
from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.execution.executor import StepHandle
from mini_sglang.grammar.compiler import GrammarCompiler
from mini_sglang.outputs import FinishReason, TokenOutput
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import ScheduledBatch, StepResult
from mini_sglang.scheduling.speculation import Proposer
from mini_sglang.text.tokenizer import load_tokenizer
from tests.tiny import Checkpoints

FREE = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
DIGITS = SamplingParams(regex="[0-9]{20}", temperature=0)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
OBJECT = SamplingParams(
    response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}, max_tokens=60, temperature=1, seed=1
)


class Silent:
    """A proposer that never has anything."""

    def propose(self, request: Request, most: int) -> list[int]:
        return []

    def forget(self, request: Request) -> None:
        pass


TextOf = Callable[[list[int]], str]
MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(checkpoints: Checkpoints) -> Iterator[MakeEngine]:
    engines = []

    def make(proposer: Proposer | None = None, **settings: Any) -> Engine:
        path = str(checkpoints.write().path)
        config = EngineConfig(**{"model": path, "dtype": "float32", "num_threads": 1, "num_pages": 64, **settings})
        engine = Engine(config, proposer=proposer)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def run(engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
    """The tokens of each request."""
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    for output in finish(engine):
        assert output.error is None, output.error
        tokens[output.request_id] += output.token_ids
    return tokens


def finish(engine: Engine) -> list[TokenOutput]:
    outputs = []
    while engine.has_work:
        outputs += list(engine.step())
        engine.check()
    assert engine.stats().num_used_pages == 0
    return outputs


@pytest.fixture
def text_of(tiny_tokenizer: PreTrainedTokenizerFast) -> TextOf:
    return lambda tokens: tiny_tokenizer.decode(tokens)


def mixed(count: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Every third one free; prompts that share beginnings and ones that do not."""
    kinds = (FREE, DIGITS, OBJECT)
    prompts = [[5 + index % 2] * (3 + 9 * (index % 4)) + [10 + index] for index in range(count)]
    return {f"r{index}": (prompt, kinds[index % 3]) for index, prompt in enumerate(prompts)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"run_ahead": 1},
        {"run_ahead": 1, "max_prefill_tokens": 8, "max_running_requests": 4},
        {"run_ahead": 1, "num_pages": 8},  # too few for all: requests are preempted and resume
        {"run_ahead": 0, "num_pages": 13, "page_size": 8, "max_prefill_tokens": 16},
        {"cache": "naive", "run_ahead": 2},
        {"speculative": "ngram", "speculative_gate": False, "page_size": 3, "max_prefill_tokens": 8},
        {"speculative": "ngram", "speculative_gate": False, "run_ahead": 1, "num_pages": 8},
    ],
)
def test_every_request_gets_its_lone_answer(make_engine: MakeEngine, settings: dict[str, Any], text_of: TextOf) -> None:
    requests = mixed(12)
    alone = make_engine()
    expected = {name: run(alone, {name: request})[name] for name, request in requests.items()}
    engine = make_engine(**settings)
    engine.scheduler.expected_output = 0.0  # admits boldly
    for _ in range(2):  # the second time prompts are cached
        assert run(engine, requests) == expected
    if settings.get("num_pages"):
        assert engine.stats().num_preemptions > 0
    for name, (_, params) in requests.items():
        text = text_of(expected[name])
        if params is DIGITS:
            assert len(text) == 20
            assert text.isdecimal()
        elif params is OBJECT:
            assert isinstance(json.loads(text)["size"], int)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_what_a_grammar_forces_takes_no_steps_of_its_own(make_engine: MakeEngine, run_ahead: int) -> None:
    """With a proposer that never has anything."""
    params = SamplingParams(regex="[ab](, and then what comes next: [0-9]){5}", temperature=1, seed=2, logprobs=1)
    requests = {"x": ([7, 8, 9], params), "y": ([9], FREE)}
    expected = run(make_engine(), requests)
    engine = make_engine(Silent(), speculative_gate=False, speculative_tokens=64, run_ahead=run_ahead)
    assert run(engine, requests) == expected
    drafts = engine.stats().drafts
    assert drafts is not None
    assert drafts.num_drafts == 5
    assert drafts.num_draft_tokens == drafts.num_accepted_tokens == len(expected["x"]) - 6  # a letter and five digits


def test_choices_of_one_prompt_follow_one_grammar_each_for_itself(make_engine: MakeEngine, text_of: TextOf) -> None:
    params = [SamplingParams(regex="[a-z]{3}|[0-9]{5}", seed=seed) for seed in range(12)]
    answers = run(make_engine(run_ahead=1), {str(seed): ([7, 8, 9], each) for seed, each in enumerate(params)})
    texts = {text_of(tokens) for tokens in answers.values()}
    assert len(texts) > 1
    assert {len(text) for text in texts} <= {3, 5}


def test_an_answer_ends_with_its_grammar(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for params in (SamplingParams(choice=["a1"]), SamplingParams(choice=["a1"], ignore_eos=True, min_tokens=9)):
        engine.add_request("x", [7, 8, 9], params)
        *_, last = finish(engine)
        assert last.finish_reason is FinishReason.STOP
    assert engine.stats().num_finished == 2


def test_penalties_biases_and_logprobs_go_with_a_grammar(make_engine: MakeEngine, text_of: TextOf) -> None:
    params = SamplingParams(
        regex="[0-9]{12}", temperature=1, seed=3, top_p=0.9, top_k=40, repetition_penalty=1.3, logprobs=2,
        logit_bias={50: 20.0},
    )  # fmt: skip
    engine = make_engine(run_ahead=1)
    engine.add_request("x", [7, 8, 9], params)
    outputs = finish(engine)
    assert text_of([token for output in outputs for token in output.token_ids]).isdecimal()
    assert all(output.logprobs for output in outputs if output.token_ids)


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(run_ahead=1)
    engine.add_request("bad", [7, 8, 9], SamplingParams(regex="["))
    engine.add_request("good", [7, 8, 9], FREE)
    outputs = finish(engine)
    (bad,) = [output for output in outputs if output.request_id == "bad"]
    assert (bad.finish_reason, bad.error_field) == (FinishReason.ERROR, "regex")
    assert bad.error is not None
    assert bad.error.startswith("cannot be followed")
    assert sum(len(output.token_ids) for output in outputs if output.request_id == "good") == 30
    with pytest.raises(ValueError, match=r"^regex cannot be followed"):
        engine.check_grammar(SamplingParams(regex="["))


def test_aborts_at_any_moment_leave_nothing_behind(make_engine: MakeEngine) -> None:
    engine = make_engine(run_ahead=1)
    for steps in range(12):
        engine.add_request("x", [7, 8, 9], DIGITS)
        engine.add_request("y", [7, 8], FREE)
        for _ in range(steps):
            engine.step()
        engine.abort("x")
        engine.abort("y")
        finish(engine)
    assert len(run(engine, {"x": ([7, 8, 9], DIGITS)})["x"]) > 0


@pytest.mark.parametrize("fails", ["launch", "result"])
def test_a_failed_step_ends_its_requests_and_the_next_ones_are_right(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    engine = make_engine(run_ahead=1)
    requests = {"x": ([7, 8, 9], DIGITS), "y": ([7, 8], FREE)}
    expected = run(engine, requests)
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    for _ in range(6):
        engine.step()

    def fail(*_: object) -> StepResult:
        raise MemoryError("no memory for this step")

    with monkeypatch.context() as patch:
        patch.setattr(*{"launch": (engine.executor, "launch"), "result": (StepHandle, "result")}[fails], fail)
        engine.step()
    finish(engine)
    assert run(engine, requests) == expected


def test_other_requests_do_not_wait_while_a_grammar_compiles(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(run_ahead=1)
    engine.check_grammar(DIGITS)
    compile_grammar = GrammarCompiler.compile

    def compile_slowly(*arguments: Any) -> Any:
        time.sleep(1.0)
        return compile_grammar(*arguments)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    engine.add_request("slow", [7, 8, 9], DIGITS)
    engine.add_request("free", [7, 8, 9], FREE)
    ended = [output.request_id for output in finish(engine) if output.finish_reason is not None]
    assert ended == ["free", "slow"]


def test_free_requests_are_in_every_step_beside_one_that_waits_for_masks(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(run_ahead=1)
    batches: list[ScheduledBatch] = []
    launch = engine.executor.launch

    def launch_and_note(batch: ScheduledBatch) -> Any:
        batches.append(batch)
        return launch(batch)

    monkeypatch.setattr(engine.executor, "launch", launch_and_note)
    run(engine, {"x": ([7, 8, 9], DIGITS), "y": ([7, 8], FREE), "z": ([9], FREE)})
    masked = [batch for batch in batches if batch.masks]
    assert all(len(batch.masks) == 1 for batch in masked)
    assert all(len(mask) >= 320 // 8 for batch in masked for [mask] in batch.masks.values())
    free_rows = [len(batch.rows) - len(batch.masks) for batch in batches]
    assert free_rows[1:30] == [2] * 29  # the first step may hold one back until x has computed what both begin with
    assert sum(free_rows) == 60


def test_the_tokenizer_is_loaded_with_the_first_grammar(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []

    def load(source: Any) -> Any:
        loaded.append(source)
        return load_tokenizer(source)

    monkeypatch.setattr(mini_sglang.text.tokenizer, "load_tokenizer", load)
    engine = make_engine()
    run(engine, {"x": ([7, 8], FREE)})
    assert not loaded
    run(engine, {"x": ([7, 8], DIGITS), "y": ([9], DIGITS)})
    engine.check_grammar(OBJECT)
    assert len(loaded) == 1


def test_a_model_without_a_tokenizer_refuses_grammars_alone(checkpoints: Checkpoints) -> None:
    path = checkpoints.write().path
    hidden = [file for file in path.iterdir() if file.name.startswith("tokenizer")]
    for file in hidden:
        file.rename(file.with_name(f"hidden-{file.name}"))
    try:
        engine = Engine(EngineConfig(model=str(path), dtype="float32", num_threads=1, num_pages=64))
        assert len(run(engine, {"x": ([7, 8], FREE)})["x"]) == 30
        with pytest.raises(ValueError, match=r"^regex is not supported with this model"):
            engine.check_grammar(DIGITS)
        engine.close()
    finally:
        for file in hidden:
            file.with_name(f"hidden-{file.name}").rename(file)
