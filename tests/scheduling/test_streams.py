"""Requests that compute one token in every step: their rows, tokens and counters, with steps on their way or not."""

from __future__ import annotations

import msgspec
import pytest

from mini_sglang.config import ResolvedConfig
from mini_sglang.outputs import FinishReason, StepOutputs, TokenLogprobs, TokenOutput
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import ScheduledBatch, StepResult
from mini_sglang.scheduling.scheduler import Scheduler

END = 7


def scheduler(**fields: object) -> Scheduler:
    defaults = {"page_size": 8, "num_pages": 2048, "context_length": 400}
    defaults |= {"max_prefill_tokens": 512, "max_running_requests": 64}
    return Scheduler(ResolvedConfig(**{**defaults, **fields}))  # type: ignore[arg-type]


def add(scheduler: Scheduler, name: str, prompt: list[int] | None = None, **params: object) -> Request:
    request = Request(name, prompt or [1, 2], SamplingParams(**params), frozenset([END]))  # type: ignore[arg-type]
    scheduler.add(request)
    return request


def launch(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def read(scheduler: Scheduler, batch: ScheduledBatch, *token_ids: int) -> StepOutputs:
    """Read a step; one token id stands for one that every row samples."""
    count = sum(row.samples for row in batch.rows)
    tokens = list(token_ids) * count if len(token_ids) == 1 else list(token_ids)
    return scheduler.update(batch, StepResult(tokens, [None] * count))


def decoding(count: int, **fields: object) -> Scheduler:
    """`count` requests that have their first token."""
    result = scheduler(**fields)
    for number in range(count):
        add(result, str(number), [number, number])
    read(result, launch(result), 5)
    return result


def test_rows_follow_the_running_requests_as_they_come_and_go() -> None:
    subject = decoding(3)
    first, second = launch(subject), launch(subject)
    assert [row.start for row in first.rows] == [2, 2, 2]
    assert [row.start for row in second.rows] == [3, 3, 3]
    assert first.is_decode
    subject.abort("1")
    third = launch(subject)
    slots = [row.slot for row in first.rows]
    assert [row.slot for row in third.rows] == [slots[0], slots[2]]
    add(subject, "new")
    joining, joined = launch(subject), launch(subject)
    assert [row.count for row in joining.rows] == [1, 1, 1]  # half of the new prompt is cached
    assert not joining.is_decode  # but its slot is new
    assert [row.count for row in joined.rows] == [1, 1, 1]
    assert joined.is_decode


def test_tokens_come_as_columns_and_what_is_special_by_itself() -> None:
    subject = decoding(3)
    outputs = read(subject, launch(subject), 4, END, 6)
    assert (outputs.request_ids, outputs.token_ids) == (["0", "2"], [4, 6])
    (ended,) = outputs.others
    assert (ended.request_id, ended.token_ids, ended.finish_reason) == ("1", [END], FinishReason.STOP)
    assert (len(outputs), outputs.num_tokens) == (3, 3)
    assert {output.request_id: output.token_ids for output in outputs} == {"0": [4], "2": [6], "1": [END]}


def test_columns_survive_the_wire() -> None:
    outputs = StepOutputs(["a", "b"], [1, 2], [TokenOutput(request_id="c", token_ids=[3])])
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(outputs), type=StepOutputs)
    assert list(decoded) == list(outputs)


def test_an_end_token_of_one_request_does_not_end_another() -> None:
    subject = scheduler()
    add(subject, "stops")
    add(subject, "ignores", [3, 4], ignore_eos=True)
    read(subject, launch(subject), 5)
    outputs = read(subject, launch(subject), END)
    assert {output.request_id: output.finish_reason for output in outputs} == {
        "stops": FinishReason.STOP,
        "ignores": None,
    }


def test_logprobs_reach_those_who_asked() -> None:
    subject = scheduler()
    add(subject, "plain")
    add(subject, "asks", [3, 4], logprobs=1)
    read(subject, launch(subject), 5)
    entry = TokenLogprobs([6], [-0.5])
    outputs = subject.update(launch(subject), StepResult([5, 6], [None, entry]))
    assert {output.request_id: output.logprobs for output in outputs} == {"plain": None, "asks": [entry]}


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_tokens_on_their_way_to_a_request_that_has_ended_are_dropped(reason: FinishReason) -> None:
    subject = decoding(2)
    batches = [launch(subject), launch(subject)]
    subject.abort("0", reason)
    for batch in batches:
        outputs = read(subject, batch, 8, 9)
        assert (list(outputs.request_ids), list(outputs.token_ids), outputs.others) == (["1"], [9], [])
    subject.check()


def test_a_member_leaves_with_the_step_that_samples_its_last_token() -> None:
    subject = scheduler()
    request = add(subject, "a", max_tokens=3)
    batches = [launch(subject) for _ in range(3)]
    assert subject.schedule() is None
    endings = [[output.finish_reason for output in read(subject, batch, 5)] for batch in batches]
    assert endings == [[None], [None], [FinishReason.LENGTH]]
    assert request.output_ids == [5, 5, 5]


def test_a_page_is_asked_for_in_the_step_that_begins_it() -> None:
    subject = scheduler(page_size=4)
    add(subject, "a", [1, 2, 3])
    pages = []
    for _ in range(7):
        batch = launch(subject)
        pages.append([(new.first_index, len(new.page_ids)) for new in batch.new_pages])
        read(subject, batch, 5)
    assert pages == [[(0, 1)], [], [(1, 1)], [], [], [], [(2, 1)]]


def test_counters_are_right_whenever_somebody_asks() -> None:
    subject = scheduler()
    request = add(subject, "a")
    read(subject, launch(subject), 5)
    for step in range(2, 12):
        batch = launch(subject)
        assert (request.num_computed_tokens, request.last_step, request.num_tokens) == (step + 1, step, step + 2)
        read(subject, batch, 5)


@pytest.mark.parametrize("asked_every", [1, 7, 100])
def test_output_is_right_whenever_somebody_asks(asked_every: int) -> None:
    """Two decode; a third joins, and one leaves."""
    subject = scheduler()
    first, second = add(subject, "a", max_tokens=100), add(subject, "b", [3, 4], max_tokens=100)
    third, expected = None, []
    for step in range(60):
        if step == 25:
            third = add(subject, "c", [5, 6], max_tokens=100)
        batch = launch(subject)
        tokens = [1000 * row.slot + 100 + step for row in batch.rows if row.samples]
        expected.append(100 + step)
        subject.update(batch, StepResult(tokens, [None] * len(tokens)))
        if step == 40:
            subject.abort("b")
        if step % asked_every == 0:
            assert first.output_ids == expected
    assert third is not None
    assert first.output_ids == expected
    assert second.output_ids == [1000 + token for token in expected[:41]]
    assert third.output_ids == [2000 + token for token in expected[25:]]


def test_a_result_of_the_wrong_length_is_refused() -> None:
    subject = decoding(2)
    with pytest.raises(ValueError, match="step 2 samples 2 tokens, not 1"):
        subject.update(launch(subject), StepResult([5], [None]))
