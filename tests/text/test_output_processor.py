"""Tokens of one request become text, stop strings, usage: what a caller sees of every kind of ending."""

from __future__ import annotations

import pytest

from mini_sglang.ipc.async_engine import merge_outputs
from mini_sglang.outputs import FinishReason, RequestOutput, TokenLogprobs, TokenOutput
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.output_processor import OutputProcessor
from mini_sglang.text.tokenizer import Tokenizer

TEXT = " Paris is the capital, and 👨‍👩‍👧 live there."
EOS = 2


def feed(
    tokenizer: Tokenizer,
    params: SamplingParams,
    ids: list[int],
    *,
    step: int = 1,
    finish_reason: FinishReason | None = FinishReason.LENGTH,
    stop_token_id: int | None = None,
) -> list[RequestOutput]:
    """Push `ids`, `step` at a time, the last with `finish_reason`; returns the outputs up to the finished one."""
    processor = OutputProcessor(tokenizer, "r", 5, params)
    outputs = []
    for start in range(0, len(ids), step):
        is_last = start + step >= len(ids)
        tokens = ids[start : start + step]
        outputs.append(
            processor.push(
                TokenOutput(
                    request_id="r",
                    token_ids=tokens,
                    logprobs=None if params.logprobs is None else [TokenLogprobs([i], [-1.0]) for i in tokens],
                    finish_reason=finish_reason if is_last else None,
                    stop_token_id=stop_token_id if is_last else None,
                    num_cached_tokens=3,
                )
            )
        )
        if outputs[-1].finished:
            break
    return outputs


@pytest.mark.parametrize("step", [1, 2, 7, 100])
def test_deltas_join_to_the_text_and_new_tokens_to_all_tokens(builtin_tokenizer: Tokenizer, step: int) -> None:
    ids = builtin_tokenizer.encode(TEXT)
    outputs = feed(builtin_tokenizer, SamplingParams(logprobs=0), ids, step=step)
    last = outputs[-1]
    assert last.text == "".join(output.text_delta for output in outputs) == TEXT
    assert last.token_ids == [token_id for output in outputs for token_id in output.new_token_ids] == ids
    assert last.logprobs == [logprob for output in outputs for logprob in output.new_logprobs or []]
    assert sum(output.num_new_tokens for output in outputs) == last.usage.completion_tokens == len(ids)
    assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (5, 3)
    assert last.finish_reason is FinishReason.LENGTH
    assert last.stop_reason is None


def test_each_token_has_its_log_probabilities_and_each_text_its_tokens(builtin_tokenizer: Tokenizer) -> None:
    ids = builtin_tokenizer.encode(" one two three")
    last = feed(builtin_tokenizer, SamplingParams(logprobs=0), ids)[-1]
    assert last.logprobs == [TokenLogprobs([token_id], [-1.0]) for token_id in ids]
    assert [last.num_tokens_of_text(len(text)) for text in ("", " one", " one t", " one two three")] == [0, 1, 2, 3]


def test_what_came_with_the_first_token_stays(builtin_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(builtin_tokenizer, "r", 5, SamplingParams(prompt_logprobs=0))
    prompt_logprobs = [TokenLogprobs([7], [-0.5])]
    first = TokenOutput(request_id="r", token_ids=[5], prompt_logprobs=prompt_logprobs, queued_s=0.25)
    for token_output in (first, TokenOutput(request_id="r", token_ids=[6])):
        output = processor.push(token_output)
        assert (output.prompt_logprobs, output.queued_s) == (prompt_logprobs, 0.25)


def test_each_token_keeps_its_time_however_late_it_is_fetched(builtin_tokenizer: Tokenizer) -> None:
    outputs = feed(builtin_tokenizer, SamplingParams(), builtin_tokenizer.encode(TEXT)[:5])
    times = [output.new_token_times[0] for output in outputs]
    assert times == sorted(times)
    fetched_late = merge_outputs(merge_outputs(outputs[1], outputs[2]), outputs[3])
    assert fetched_late.new_token_times == times[1:4]


def test_an_output_stays_as_it_was_when_later_ones_follow(builtin_tokenizer: Tokenizer) -> None:
    ids = builtin_tokenizer.encode(" one two three")
    outputs = feed(builtin_tokenizer, SamplingParams(), ids)
    assert [output.text for output in outputs] == [" one", " one two", " one two three"]
    assert [output.token_ids for output in outputs] == [ids[:1], ids[:2], ids]


@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_stop_string_ends_the_text_and_the_count_of_tokens(builtin_tokenizer: Tokenizer, step: int) -> None:
    ids = builtin_tokenizer.encode(TEXT)
    last = feed(builtin_tokenizer, SamplingParams(stop=["capital,"]), ids, step=step)[-1]
    assert last.text == " Paris is the "
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "capital,")
    assert builtin_tokenizer.decode(last.token_ids) == " Paris is the capital,"
    assert (
        last.usage.completion_tokens == len(last.token_ids) == len(builtin_tokenizer.encode(" Paris is the capital,"))
    )


def test_an_output_shows_its_text_when_printed(builtin_tokenizer: Tokenizer) -> None:
    last = feed(builtin_tokenizer, SamplingParams(), builtin_tokenizer.encode(" one two"))[-1]
    assert "text=' one two'" in repr(last)


def test_a_stop_string_is_shown_if_asked_for(builtin_tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=["capi"], include_stop_str_in_output=True)
    assert feed(builtin_tokenizer, params, builtin_tokenizer.encode(TEXT))[-1].text == " Paris is the capi"


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR])
def test_text_held_back_for_a_stop_string_comes_at_any_end(builtin_tokenizer: Tokenizer, reason: FinishReason) -> None:
    stop = ["ere.QQQ", "capQ", ".?"]
    outputs = feed(builtin_tokenizer, SamplingParams(stop=stop), builtin_tokenizer.encode(TEXT), finish_reason=reason)
    assert outputs[-1].text == "".join(output.text_delta for output in outputs) == TEXT
    assert outputs[-1].finish_reason is reason


def test_an_end_inside_a_character_gives_one_replacement_character(builtin_tokenizer: Tokenizer) -> None:
    ids = builtin_tokenizer.encode("👨")
    assert len(ids) > 1
    for length in range(1, len(ids)):
        outputs = feed(builtin_tokenizer, SamplingParams(), ids[:length])
        assert "".join(output.text_delta for output in outputs) == "\ufffd" == outputs[-1].text
    assert feed(builtin_tokenizer, SamplingParams(), ids)[-1].text == "👨"


def test_a_stop_string_can_match_in_the_text_that_the_end_sets_free(builtin_tokenizer: Tokenizer) -> None:
    ids = builtin_tokenizer.encode("ab👨")[:-1]
    last = feed(builtin_tokenizer, SamplingParams(stop=["\ufffd"]), ids)[-1]
    assert (last.text, last.finish_reason, last.stop_reason) == ("ab", FinishReason.STOP, "\ufffd")


def test_an_end_token_counts_but_has_no_text(builtin_tokenizer: Tokenizer) -> None:
    ids = [*builtin_tokenizer.encode(" Paris"), EOS]
    last = feed(builtin_tokenizer, SamplingParams(), ids, finish_reason=FinishReason.STOP, stop_token_id=EOS)[-1]
    assert (last.text, last.token_ids, last.stop_reason) == (" Paris", ids, None)
    assert last.usage.completion_tokens == len(ids)


def test_an_end_token_is_shown_if_special_tokens_are(builtin_tokenizer: Tokenizer) -> None:
    ids = [*builtin_tokenizer.encode(" Paris"), EOS]
    params = SamplingParams(skip_special_tokens=False)
    last = feed(builtin_tokenizer, params, ids, finish_reason=FinishReason.STOP, stop_token_id=EOS)[-1]
    assert last.text == " Paris<|im_end|>"


@pytest.mark.parametrize(("include", "text"), [(False, " one two"), (True, " one two three")])
def test_a_stop_token_of_the_caller_is_cut_like_a_stop_string(
    builtin_tokenizer: Tokenizer, include: bool, text: str
) -> None:
    ids = builtin_tokenizer.encode(" one two three")
    params = SamplingParams(stop_token_ids=[ids[-1]], include_stop_str_in_output=include)
    last = feed(builtin_tokenizer, params, ids, finish_reason=FinishReason.STOP, stop_token_id=ids[-1])[-1]
    assert (last.text, last.stop_reason, last.token_ids) == (text, ids[-1], ids)


def test_nothing_changes_after_the_end(builtin_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(builtin_tokenizer, "r", 1, SamplingParams(stop=[" two"]))
    ids = builtin_tokenizer.encode(" one two three")
    first = processor.push(TokenOutput(request_id="r", token_ids=ids))
    late = processor.push(TokenOutput(request_id="r", token_ids=ids, finish_reason=FinishReason.STOP))
    assert (late.text_delta, late.num_new_tokens, late.new_token_ids) == ("", 0, [])
    assert (
        (late.text, late.token_ids, late.stop_reason)
        == (first.text, first.token_ids, " two")
        == (
            " one",
            ids[:2],
            " two",
        )
    )


def test_an_error_keeps_what_came_before_it(builtin_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(builtin_tokenizer, "r", 1, SamplingParams())
    processor.push(TokenOutput(request_id="r", token_ids=builtin_tokenizer.encode(" one")))
    failed = TokenOutput(request_id="r", token_ids=[], finish_reason=FinishReason.ERROR, error="step failed")
    last = processor.push(failed)
    assert (last.text, last.finish_reason, last.error) == (" one", FinishReason.ERROR, "step failed")


def test_an_error_of_a_field_is_a_sentence_about_it(builtin_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(builtin_tokenizer, "r", 1, SamplingParams())
    refused = TokenOutput(
        request_id="r", token_ids=[], finish_reason=FinishReason.ERROR, error="is too deep", error_field="regex"
    )
    last = processor.push(refused)
    assert last.error == str(last.field_error) == "regex is too deep"
    assert last.field_error is not None
    assert last.field_error.field == "regex"
