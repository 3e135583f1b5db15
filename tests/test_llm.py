"""`LLM` on the built-in model: what it answers, in which order, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mini_sglang import LLM, FinishReason, RequestOutput, SamplingParams
from tests.tiny import Checkpoints, until

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in REFERENCE["cases"]}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
CONTRACT = "The capital of France is"


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(llm: LLM) -> Any:
    """However a test used the engine: no request may be in it afterwards, and no page held by one."""
    yield
    while llm.engine.has_work:
        llm.engine.step()
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)


def test_all_reference_prompts_in_one_batch_give_the_reference_tokens(llm: LLM) -> None:
    outputs = llm.generate([case["prompt_ids"] for case in CASES.values()], GREEDY, progress=False)
    assert [output.token_ids for output in outputs] == [case["output_ids_ignore_eos"] for case in CASES.values()]
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)


def test_the_contract_prompt(llm: LLM) -> None:
    [output] = llm.generate(CONTRACT, greedy(20))
    assert output.token_ids == CASES["capital"]["output_ids_generate"]
    assert output.text == CASES["capital"]["text"]
    assert (output.usage.prompt_tokens, output.usage.completion_tokens, output.usage.total_tokens) == (5, 20, 25)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["1, 2, 3,", "Monday, Tuesday,", "a, b, c, d,"]
    lone = [llm.generate(prompt, greedy(6), progress=False)[0].text for prompt in prompts]
    # The first to arrive ends last: order comes from the prompts, not from who ends first.
    params = [greedy(6), greedy(3), greedy(1)]
    outputs = llm.generate(prompts, params, progress=False)
    assert outputs[0].text == lone[0]
    assert [lone[i].startswith(outputs[i].text) for i in range(3)] == [True] * 3
    assert [output.usage.completion_tokens for output in outputs] == [6, 3, 1]


def test_prompts_may_be_text_or_token_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode(CONTRACT)
    forms: list[Any] = [CONTRACT, [CONTRACT], ids, [ids], (CONTRACT,)]
    texts = [output.text for prompts in forms for output in llm.generate(prompts, greedy(2), progress=False)]
    assert texts == [" Paris."] * 5
    mixed: list[str | list[int]] = [CONTRACT, ids]
    assert [output.text for output in llm.generate(mixed, greedy(2))] == [" Paris."] * 2


def test_equal_prompts_in_one_batch_get_equal_answers(llm: LLM) -> None:
    outputs = llm.generate(["tick tock " * 60] * 13, greedy(2), progress=False)
    assert len({output.text for output in outputs}) == 1


def test_a_stream_yields_what_generate_returns(llm: LLM) -> None:
    outputs = list(llm.stream(CONTRACT, greedy(5)))
    [whole] = llm.generate(CONTRACT, greedy(5))
    assert "".join(output.text_delta for output in outputs) == whole.text == outputs[-1].text
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_streams_and_generate_may_interleave(llm: LLM) -> None:
    first, second = llm.stream(CONTRACT, greedy(4)), llm.stream("1, 2, 3,", greedy(4))
    texts = [next(first).text_delta, next(second).text_delta]
    [between] = llm.generate("a, b, c, d,", greedy(6))
    texts[1] += "".join(output.text_delta for output in second)
    texts[0] += "".join(output.text_delta for output in first)
    assert texts == [llm.generate(prompt, greedy(4))[0].text for prompt in (CONTRACT, "1, 2, 3,")]
    assert between.text == llm.generate("a, b, c, d,", greedy(6))[0].text


def test_a_stop_string_ends_a_request(llm: LLM) -> None:
    [output] = llm.generate(CONTRACT, greedy(20, stop=["answer"]))
    assert output.text == " Paris.\n\nThe "
    assert (output.finish_reason, output.stop_reason, output.usage.completion_tokens) == (
        FinishReason.STOP,
        "answer",
        6,
    )


def test_text_held_back_for_a_stop_string_is_not_lost(llm: LLM) -> None:
    [plain] = llm.generate(CONTRACT, greedy(6))
    stop = [plain.text[-4:] + "QQQ", "isx"]
    assert llm.generate(CONTRACT, greedy(6, stop=stop))[0].text == plain.text
    assert "".join(output.text_delta for output in llm.stream(CONTRACT, greedy(6, stop=stop))) == plain.text


def test_a_stop_token_ends_a_request_without_its_text(llm: LLM) -> None:
    [period] = llm.tokenizer.encode(".")
    [output] = llm.generate(CONTRACT, greedy(20, stop_token_ids=[period]))
    assert (output.text, output.stop_reason, output.finish_reason) == (" Paris", period, FinishReason.STOP)


def test_an_end_token_ends_a_chat_unless_ignored(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [ended] = llm.chat(messages, greedy(40), progress=False)
    assert ended.finish_reason is FinishReason.STOP
    assert ended.token_ids[-1] in llm.tokenizer.eos_token_ids
    assert "<|im_end|>" not in ended.text
    longer = ended.usage.completion_tokens + 3
    [ignoring] = llm.chat(messages, greedy(longer, ignore_eos=True), progress=False)
    assert (ignoring.finish_reason, ignoring.usage.completion_tokens) == (FinishReason.LENGTH, longer)


def test_every_request_gets_exactly_its_own_number_of_tokens(llm: LLM) -> None:
    limits = [1, 2, 5, 9]
    messages = [[{"role": "user", "content": "Reply with OK."}]] * len(limits)
    outputs = llm.chat(messages, [greedy(limit, ignore_eos=True) for limit in limits], progress=False)
    assert [output.usage.completion_tokens for output in outputs] == limits
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("What is 2+2?", "Name a colour.")]
    together = llm.chat(conversations, greedy(5), progress=False)
    assert [o.text for o in together] == [llm.chat(c, greedy(5), progress=False)[0].text for c in conversations]


def test_a_seed_gives_the_same_text_in_any_batch(llm: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=6)
    [alone] = llm.generate("Once upon a time", params)
    other = SamplingParams(max_tokens=6)
    assert llm.generate(["Hi", "Once upon a time", "A"], [other, params, other])[1].token_ids == alone.token_ids


def test_logprobs_come_one_per_token(llm: LLM) -> None:
    [output] = llm.generate(CONTRACT, greedy(3, logprobs=5))
    assert output.logprobs is not None
    assert [entry.token_ids[0] for entry in output.logprobs] == output.token_ids
    expected = dict(map(tuple, CASES["capital"]["first_step_top5"]))
    best = dict(zip(output.logprobs[0].token_ids[1:], output.logprobs[0].logprobs[1:], strict=True))
    assert best == pytest.approx(expected, abs=1e-3)


BAD_PROMPTS = [
    ("", "prompt must hold at least one token"),
    (b"Hi", "prompt must be a string or a list of token ids, got b'Hi'"),
    (bytearray(b"Hi"), "prompt must be a string or a list of token ids"),
    (memoryview(b"Hi"), "prompt must be a string or a list of token ids"),
    ([b"Hi"], "prompt must be a string or a list of token ids, got b'Hi'"),
    (["Hi", b"Ho"], r"prompts\[1\] must be a string or a list of token ids, got b'Ho'"),
    ([""], "prompt must hold at least one token"),
    ([[]], "prompt must hold at least one token"),
    (["Hi", ""], r"prompts\[1\] must hold at least one token"),
    (["Hi", [1, 49152]], r"prompts\[1\].*49151.*49152"),
    ([-1], "prompt"),
    ([1.5], "prompt"),
    ([True], "prompt"),
    ([None], "prompt"),
    ([[1, "a"]], "prompt"),
    (["Hi", 5], r"prompts\[1\]"),
    ("ab\ud83dcd", "prompt.*surrogate"),
    ([1] * 8192, "8192"),
    (5, "prompt must be a string or a list of token ids, got 5"),
    (None, "prompt must be a string or a list of token ids, got None"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_named_and_nothing_is_queued(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, greedy(2), progress=False)
    assert not llm.engine.has_work
    assert llm.generate(CONTRACT, greedy(1), progress=False)[0].text == " Paris"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"stop": "abc"}, "stop must be a list"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false, got 'no'"),
        ({"skip_special_tokens": 0}, "skip_special_tokens must be true or false, got 0"),
        ({"top_k": 1.5}, "top_k must be an integer"),
    ],
)
def test_a_bad_sampling_parameter_is_named(llm: LLM, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        llm.generate(["Hi", "Ho"], [SamplingParams(max_tokens=1), SamplingParams(**fields)], progress=False)
    assert not llm.engine.has_work


def test_as_many_sampling_parameters_as_prompts_are_needed(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate(["Hi", "Ho"], [greedy(1)], progress=False)
    for wrong in ({"temperature": 0}, 5, ["greedy"]):
        given: Any = wrong
        with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
            llm.generate("Hi", given, progress=False)
        with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
            next(llm.stream("Hi", given))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must not be empty"),
        ([[]], r"messages\[0\] must not be empty"),
        ([{"role": "wizard", "content": "Hi"}], r"messages\[0\].role.*wizard"),
        ([{"content": "Hi"}], r"messages\[0\].role"),
        (["Hi"], r"messages\[0\] must be a mapping"),
        ("Hi", "messages must be a list of messages, got 'Hi'"),
        ({"role": "user", "content": "Hi"}, "messages must be a list of messages"),
        ([[{"role": "user", "content": "Hi"}], []], r"messages\[1\] must not be empty"),
        ([[{"role": "user", "content": "Hi"}], {"role": "user"}], r"messages\[1\] must be a list of messages"),
        ([[{"role": "user", "content": "Hi"}], [{"role": "wizard"}]], r"messages\[1\]\[0\].role.*wizard"),
    ],
)
def test_a_bad_conversation_is_named(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, greedy(1), progress=False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must not be empty"),
        ({"role": "user", "content": "Hi"}, "messages must be a list of messages"),
        ([{"role": "wizard", "content": "Hi"}], r"messages\[0\].role.*wizard"),
    ],
)
def test_a_bad_conversation_is_named_in_a_stream_too(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(llm.stream_chat(messages, greedy(1)))


def test_leaving_a_stream_aborts_it_and_harms_no_other(llm: LLM) -> None:
    kept, left = llm.stream(CONTRACT, greedy(5)), llm.stream("1, 2, 3,", greedy(500))
    pieces = [next(kept)]
    next(left)
    left.close()
    pieces += kept
    assert "".join(piece.text_delta for piece in pieces) == llm.generate(CONTRACT, greedy(5))[0].text


def test_an_interrupt_aborts_the_call_and_leaves_the_model_usable(llm: LLM, interrupts: None) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Once upon a time"] * 4, greedy(4000, ignore_eos=True), progress=False)
    timer.join()
    assert llm.generate(CONTRACT, greedy(2), progress=False)[0].text == " Paris."


def test_it_works_in_another_thread(llm: LLM) -> None:
    outputs: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate(CONTRACT, greedy(2), progress=False)))
    thread.start()
    thread.join()
    assert outputs[0].text == " Paris."


def test_no_prompts_have_no_outputs(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert llm.generate([]) == llm.generate([], []) == llm.generate(()) == []
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="sampling_params must be one for all or one for each of 0 prompts, got 1"):
        llm.generate([], [greedy(1)])


def test_threads_are_served_in_the_same_steps(llm: LLM) -> None:
    prompts = [CONTRACT, "1, 2, 3,", "Monday, Tuesday,", "a, b, c, d,"]
    alone = [llm.generate(prompt, greedy(8), progress=False)[0].text for prompt in prompts]
    before = llm.engine.stats().num_steps
    together = threading.Barrier(len(prompts))

    def ask(prompt: str) -> list[str]:
        together.wait()
        streamed = "".join(output.text_delta for output in llm.stream(prompt, greedy(8)))
        return [streamed, *(llm.generate(prompt, greedy(8), progress=False)[0].text for _ in range(2))]

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [[text] * 3 for text in alone]
    assert llm.engine.stats().num_steps - before < 3 * 8 * len(prompts)
    assert llm.generate(CONTRACT, greedy(2), progress=False)[0].text == " Paris."


def test_a_stream_of_one_thread_may_be_read_and_left_in_another(llm: LLM) -> None:
    stream = llm.stream(CONTRACT, greedy(500, ignore_eos=True))
    first = next(stream).text_delta
    with ThreadPoolExecutor(1) as pool:
        assert [first, pool.submit(next, stream).result().text_delta] == [" Paris", "."]
        pool.submit(stream.close).result()
    assert not llm.engine.has_work


def test_a_failed_call_harms_no_other_thread(llm: LLM) -> None:
    whole = llm.generate(CONTRACT, greedy(12), progress=False)[0].text
    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(llm.generate, [CONTRACT] * 3, greedy(12), progress=False)
        for prompts in (["Hi", ""], [b"Hi"], ["Hi", [1, 49152]]):
            bad: Any = prompts
            with pytest.raises(ValueError, match="prompt"):
                llm.generate(bad, greedy(2), progress=False)
        assert [output.text for output in kept.result()] == [whole] * 3


def test_a_call_from_inside_a_step_is_an_error_and_no_deadlock(llm: LLM, interrupts: None) -> None:
    """A signal handler runs between two bytecodes of whatever the thread is doing."""
    found: list[object] = []

    def call_again(*_: object) -> None:
        try:
            found.append(llm.generate(CONTRACT, greedy(1), progress=False))
        except RuntimeError as error:
            found.append(str(error))

    signal.signal(signal.SIGUSR1, call_again)
    step = llm.engine.step

    def step_and_signal() -> Any:
        if not found:
            signal.raise_signal(signal.SIGUSR1)
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "step", step_and_signal)
        [output] = llm.generate(CONTRACT, greedy(2), progress=False)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert output.text == " Paris."
    assert len(found) == 1
    assert "inside a step" in str(found[0])


def test_a_stream_collected_as_garbage_inside_a_step_ends(llm: LLM) -> None:
    streams = [llm.stream(CONTRACT, greedy(500, ignore_eos=True))]
    next(streams[0])
    step = llm.engine.step

    def step_and_collect() -> Any:
        streams.clear()
        stats = llm.engine.stats()
        assert stats.num_running + stats.num_waiting == 2, "an abort in the middle of a step"
        patch.undo()
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "step", step_and_collect)
        [output] = llm.generate("1, 2, 3,", greedy(3), progress=False)
    assert output.usage.completion_tokens == 3
    assert not llm.engine.has_work


class Alarm(Exception):
    """What a caller's signal handler raises."""


def raise_alarm(*_: object) -> None:
    raise Alarm("time is up")


class Torn(BaseException):
    """What no step survives, as a second Ctrl-C."""


def test_an_exception_that_tears_a_step_apart_leaves_the_model_usable(llm: LLM) -> None:
    """Wherever it comes: other calls are told, no page is lost, answers stay right."""
    expected = llm.generate(CONTRACT, greedy(5), progress=False)[0].text

    def tear(*_: object) -> None:
        raise Torn("no more")

    def generate_long(timer: threading.Timer) -> None:
        timer.start()
        llm.generate(["Once", "Twice", "Thrice"], greedy(500, ignore_eos=True), progress=False)

    before = signal.signal(signal.SIGUSR2, tear)
    errors = []
    try:
        for delay_ms in (1, 10, 25, 45):
            other = llm.stream("1, 2, 3,", greedy(4, ignore_eos=True))
            next(other)
            timer = threading.Timer(delay_ms / 1000, os.kill, (os.getpid(), signal.SIGUSR2))
            with pytest.raises(Torn):
                generate_long(timer)
            timer.join()
            *_, last = other
            assert last.finished
            errors.append(last.error)
            llm.engine.check()
            stats = llm.engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)
            assert llm.generate(CONTRACT, greedy(5), progress=False)[0].text == expected
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert "a step was torn apart by Torn: no more" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM, signal.SIGTERM])
def test_a_signal_at_any_moment_ends_its_call_alone(llm: LLM, number: signal.Signals) -> None:
    expected = llm.generate(CONTRACT, greedy(3), progress=False)[0].text
    before = signal.signal(number, raise_alarm)

    def generate_for_ever(timer: threading.Timer) -> None:
        timer.start()
        while True:
            llm.generate(["Once upon a time"] * 2, greedy(3, ignore_eos=True), progress=False)

    try:
        for delay_ms in (1, 12, 27):
            timer = threading.Timer(delay_ms / 1000, os.kill, (os.getpid(), number))
            other = llm.stream(CONTRACT, greedy(3))
            pieces = [next(other).text_delta]
            with pytest.raises(Alarm):
                generate_for_ever(timer)
            timer.join()
            stats = llm.engine.stats()
            assert stats.num_running + stats.num_waiting <= 1, "the interrupted call's requests are still there"
            pieces += [output.text_delta for output in other]
            assert "".join(pieces) == expected
    finally:
        signal.signal(number, before)


def test_an_exception_of_the_reader_ends_its_stream(llm: LLM) -> None:
    def read() -> None:
        for _ in llm.stream(CONTRACT, greedy(500, ignore_eos=True)):
            raise Alarm

    with pytest.raises(Alarm):
        read()
    assert not llm.engine.has_work


def test_salts_keep_prefixes_apart(llm: LLM) -> None:
    prompt = "Salt and pepper, sugar and spice. " * 10

    def cached(salt: str) -> int:
        return llm.generate(prompt, greedy(1), cache_salt=salt, progress=False)[0].usage.cached_tokens

    llm.engine.flush_cache()
    assert (cached("a"), cached("b")) == (0, 0)
    assert cached("a") == cached("b") > 0
    outputs = llm.generate([prompt] * 2, greedy(1), cache_salt=["a", "c"], progress=False)
    assert [output.usage.cached_tokens > 0 for output in outputs] == [True, False]
    [streamed] = llm.stream(prompt, greedy(1), cache_salt="b")
    assert streamed.usage.cached_tokens > 0


def test_smaller_priorities_run_first(checkpoints: Checkpoints) -> None:
    settings: dict[str, Any] = {"num_pages": 16, "num_threads": 1, "max_running_requests": 1, "schedule": "priority"}
    with LLM(str(checkpoints.write("llama").path), **settings) as other:
        outputs = other.generate([[5, 6]] * 3, greedy(4), priority=[2, -1, 1], progress=False)
        last = [output.new_token_times[-1] for output in outputs]
        assert sorted(range(3), key=last.__getitem__) == [1, 2, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": 1.5}, "priority must be an integer of 32 bits, got 1.5"),
        ({"priority": True}, "priority must be an integer"),
        ({"priority": 2**31}, "priority must be an integer of 32 bits"),
        ({"priority": [1, 2]}, "priority must be one for all or one for each of 1 prompts, got 2"),
        ({"cache_salt": 5}, "cache_salt must be a string"),
        ({"cache_salt": b"a"}, "cache_salt must be a string"),
        ({"cache_salt": "a" * 257}, "cache_salt must be a string of at most 256 characters"),
    ],
)
def test_a_bad_priority_or_salt_is_named(llm: LLM, fields: dict[str, Any], message: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for call in (
        lambda: llm.generate(CONTRACT, greedy(1), progress=False, **fields),
        lambda: llm.chat(messages, greedy(1), progress=False, **fields),
        lambda: next(llm.stream(CONTRACT, greedy(1), **fields)),
        lambda: next(llm.stream_chat(messages, greedy(1), **fields)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not llm.engine.has_work


def test_a_chat_takes_content_in_parts(llm: LLM) -> None:
    plain: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2+2?"},
    ]
    parts: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}], "name": None},
    ]
    [first], [second] = (llm.chat(messages, greedy(4), progress=False) for messages in (plain, parts))
    assert (first.token_ids, first.usage.prompt_tokens) == (second.token_ids, second.usage.prompt_tokens)


def test_the_progress_bar_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([CONTRACT] * 2, greedy(1))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err


def test_a_closed_model_refuses_work_and_closes_twice(checkpoints: Checkpoints) -> None:
    with LLM(str(checkpoints.write("llama").path), num_pages=4, num_threads=1) as other:
        other.generate([5], greedy(1), progress=False)
    other.close()
    with pytest.raises(ValueError, match="closed"):
        other.generate([5], greedy(1), progress=False)


def test_closing_ends_a_call_of_another_thread(checkpoints: Checkpoints) -> None:
    other = LLM(str(checkpoints.write("llama").path), num_pages=64, num_threads=1)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(other.generate, [[5]] * 2000, greedy(60, ignore_eos=True), progress=False)
        until(lambda: other.engine.stats().num_running > 1)
        other.close()
        with pytest.raises(ValueError, match="this LLM was closed"):
            call.result()


def test_closing_ends_a_stream(checkpoints: Checkpoints) -> None:
    other = LLM(str(checkpoints.write("llama").path), num_pages=64, num_threads=1)
    stream = other.stream([5, 6], greedy(60, ignore_eos=True))
    next(stream)
    other.close()
    with pytest.raises(ValueError, match="this LLM was closed"):
        next(stream)


def test_two_models_live_side_by_side(llm: LLM, checkpoints: Checkpoints) -> None:
    with LLM(str(checkpoints.write("qwen2").path), num_pages=4, num_threads=1) as other:
        first, second = llm.stream(CONTRACT, greedy(2)), other.stream([5, 6], greedy(2))
        next(first), next(second)
        assert [output.text_delta for output in first] == ["."]
        assert [output.finished for output in second] == [True]


def test_an_unknown_engine_setting_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="pagesize"):
        LLM("smollm2-135m", pagesize=16)
    with pytest.raises(ValueError, match="page_size"):
        LLM("smollm2-135m", page_size=0)
