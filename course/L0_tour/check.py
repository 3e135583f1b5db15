"""The checks of lesson L0: what a request counts, and the loop of launch and read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mini_sglang.learn.checking import LessonError, expect, guards
from mini_sglang.outputs import FinishReason
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams

COUNTS = "L0: What a request counts"
LOOP = "L0: The loop"
FAILING = "L0: When a step fails"
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


# -- a request --------------------------------------------------------------------------------------------------------


def test_known_are_the_tokens_of_the_prompt_and_those_of_the_answer_that_were_read() -> None:
    request = Request("r", [5, 6, 7], SamplingParams(), output_ids=[8, 9])
    expect(request.num_known_tokens, 5, "known tokens of a prompt of 3 and 2 of its answer", read=COUNTS)


def test_what_is_not_computed_yet_counts_too() -> None:
    request = Request("r", [5, 6, 7], SamplingParams(), num_computed_tokens=1)
    expect(request.num_tokens, 3, "tokens of a prompt of 3 of which 1 is computed", read=COUNTS)


@guards("waits-for-the-value")
def test_a_token_that_is_being_sampled_counts_before_its_value_is_known() -> None:
    request = Request("r", [5, 6, 7], SamplingParams(), num_computed_tokens=3)
    rule = "whoever computes the last token samples one more"
    expect(request.num_tokens, 4, "tokens of a prompt of 3, all computed, none read", invariant=rule, read=COUNTS)


@guards("told-to-go-on")
def test_end_tokens_of_the_model_do_not_end_an_answer_that_ignores_them() -> None:
    request = Request("r", [5], SamplingParams(ignore_eos=True), eos_token_ids=frozenset({1, 2}))
    expect(sorted(request.stop_ids), [], "end tokens with ignore_eos", read=COUNTS)
    own = Request("r", [5], SamplingParams(ignore_eos=True, stop_token_ids=[9]), eos_token_ids=frozenset({1, 2}))
    expect(sorted(own.stop_ids), [9], "end tokens with ignore_eos and stop_token_ids=[9]", read=COUNTS)


@guards("stop-ids-replace-the-end")
def test_stop_tokens_of_the_caller_stand_beside_those_of_the_model() -> None:
    request = Request("r", [5], SamplingParams(stop_token_ids=[9]), eos_token_ids=frozenset({1, 2}))
    expect(sorted(request.stop_ids), [1, 2, 9], "end tokens with stop_token_ids=[9]", read=COUNTS)
    plain = Request("r", [5], SamplingParams(), eos_token_ids=frozenset({1, 2}))
    expect(sorted(plain.stop_ids), [1, 2], "end tokens of a caller who said nothing", read=COUNTS)


# -- the loop, with a scheduler that wants three steps ----------------------------------------------------------------


def test_without_run_ahead_every_step_is_read_before_the_next_is_launched() -> None:
    told = loop(run_ahead=0)
    wanted = ["launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]
    expect(told.events, wanted, "what the engine did, with run_ahead 0", read=LOOP)


@guards("answer-to-the-wrong-step")
def test_a_result_goes_to_the_batch_that_it_was_launched_with() -> None:
    wrong = [pair for pair in loop(run_ahead=1).updates if pair[0] != pair[1]]
    rule = "update gets a batch and the result of that very batch"
    expect(wrong, [], "(batch, result) of calls of update that do not belong together", invariant=rule, read=LOOP)


@guards("reads-the-newest")
def test_steps_are_read_in_the_order_in_which_they_were_launched() -> None:
    read = [int(event.split()[1]) for event in loop(run_ahead=1).events if event.startswith("read")]
    expect(read, sorted(read), "steps in the order in which they were read", read=LOOP)


@guards("reads-too-soon")
def test_with_run_ahead_a_step_is_launched_before_the_one_before_is_read() -> None:
    events = loop(run_ahead=1).events[:3]
    rule = "with run_ahead 1 the device always has a step to work on"
    expect(
        events, ["launch 1", "launch 2", "read 1"], "the first things that the engine did", invariant=rule, read=LOOP
    )


@guards("last-step-never-read")
def test_what_was_launched_is_read_when_there_is_nothing_left_to_launch() -> None:
    wanted = ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]
    expect(loop(run_ahead=1).events, wanted, "all that the engine did, with run_ahead 1", read=LOOP)


# -- the loop, with everything else real ------------------------------------------------------------------------------


@guards("one-bad-step-ends-all")
def test_a_step_that_cannot_be_launched_ends_its_own_requests_only() -> None:
    with tiny_engine(run_ahead=0) as engine:
        launch = engine.executor.launch

        def fail(batch: Any) -> Any:
            engine.executor.launch = launch
            raise MemoryError("no memory for this step")

        engine.add_request("unlucky", [3, 4, 5], SamplingParams(temperature=0, max_tokens=4))
        engine.executor.launch = fail
        try:
            ended = [(output.request_id, output.finish_reason) for output in engine.step()]
        except MemoryError as error:
            ended = [("the engine itself", repr(error))]
        wanted = [("unlucky", FinishReason.ERROR)]
        rule = "an error ends the requests of its step and nobody else's"
        expect(ended, wanted, "who ended when a launch raised MemoryError", invariant=rule, read=FAILING)
        expect(len(generate(engine)), 4, "tokens of a request that came afterwards", invariant=rule, read=FAILING)


def test_a_step_that_cannot_be_read_ends_its_own_requests_only() -> None:
    def fail() -> Any:
        raise MemoryError("no memory for this step")

    with tiny_engine(run_ahead=0) as engine:
        launch = engine.executor.launch
        engine.executor.launch = lambda batch: SimpleNamespace(result=fail)
        engine.add_request("unlucky", [3, 4, 5], SamplingParams(temperature=0, max_tokens=4))
        ended = [(output.request_id, output.finish_reason) for output in engine.step()]
        engine.executor.launch = launch
        expect(ended, [("unlucky", FinishReason.ERROR)], "who ended when a result raised MemoryError", read=FAILING)
        expect(len(generate(engine)), 4, "tokens of a request that came afterwards", read=FAILING)


def test_running_ahead_changes_no_token() -> None:
    tokens = []
    for run_ahead in (0, 1):
        with tiny_engine(run_ahead) as engine:
            tokens.append(generate(engine))
    expect(len(tokens[0]), 4, "tokens of an answer of 4 with run_ahead 0, in at most 20 steps", read=LOOP)
    expect(tokens[1], tokens[0], "greedy tokens with run_ahead 1, expected those with run_ahead 0", read=LOOP)


# -- how the checks set things up -------------------------------------------------------------------------------------


class Script:
    """A scheduler that wants three steps and an executor that launches them; both write down what happens."""

    next_step = 1  # for the observer, as are the rows and times below

    def __init__(self) -> None:
        self.events: list[str] = []
        self.updates: list[tuple[int, int]] = []  # (step of the batch, step of the result)
        self._wanted = iter([1, 2, 3])

    def schedule(self) -> Any:
        step = next(self._wanted, None)
        return None if step is None else SimpleNamespace(step=step, new_requests=[])

    def launch(self, batch: Any) -> Any:
        self.events.append(f"launch {batch.step}")
        return SimpleNamespace(result=lambda: self._read(batch.step), device_us=None)

    def _read(self, step: int) -> int:
        self.events.append(f"read {step}")
        return step

    def fail(self, batch: Any, error: str) -> Any:
        raise LessonError(error, "no error", f"launching and reading step {batch.step}", read=LOOP)

    def update(self, batch: Any, result: int) -> Any:
        from mini_sglang.outputs import StepOutputs

        self.updates.append((0 if batch is None else batch.step, result))
        return StepOutputs()


def loop(run_ahead: int) -> Script:
    """Call the loop more often than is needed; what did it do?"""
    script = Script()
    with tiny_engine(run_ahead) as engine:
        real, engine.scheduler = engine.scheduler, script
        launch, engine.executor.launch = engine.executor.launch, script.launch
        for _ in range(8):
            engine._launch_and_read()
        engine.scheduler, engine.executor.launch = real, launch
    return script


@contextmanager
def tiny_engine(run_ahead: int) -> Iterator[Any]:
    """The real engine with a model of two layers and random weights."""
    from mini_sglang.config import EngineConfig
    from mini_sglang.engine import Engine

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        config = EngineConfig(
            model=folder, load_format="dummy", dtype="float32", num_pages=16, num_threads=1, run_ahead=run_ahead
        )
        engine = Engine(config)
        yield engine
        engine.close()


def generate(engine: Any) -> list[int]:
    """The answer to a prompt of three tokens, in at most 20 calls of step."""
    engine.add_request("next", [7, 8, 9], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    tokens: list[int] = []
    for _ in range(20):
        for output in engine.step():
            tokens += output.token_ids
    return tokens
