"""An answer ends where it would end without drafts: every kind of end at every place of an accepted run."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Iterator, Mapping

import msgspec
import pytest

from mini_sglang import LLM, RequestOutput, SamplingParams
from mini_sglang.request import Request
from tests.tiny import Checkpoints

MOST = 5  # tokens of a draft: the second step samples those at places 1 to 6, of which the last is not drafted
PLACES = range(1, MOST + 2)
PROMPT = [7, 8, 9]


class GoesOn:
    """Drafts a known answer, also behind the end of a request."""

    answer: list[int]

    def propose(self, request: Request, most: int) -> list[int]:
        return self.answer[len(request.output_ids) :][:most]

    def forget(self, request: Request) -> None:
        pass


class Both:
    """An engine without drafts and one with, and an answer of letters that comes to no end, each of them another."""

    def __init__(self, plain: LLM, drafting: LLM, proposer: GoesOn) -> None:
        self.plain, self.drafting = plain, drafting
        self.letters = [
            plain.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in string.ascii_lowercase
        ]
        self.params = SamplingParams(seed=11, max_tokens=12, allowed_token_ids=self.letters)
        [output] = plain.generate([PROMPT], self.params, progress=False)
        self.text, self.token_ids = output.text, output.token_ids
        assert len(set(self.token_ids[: MOST + 3])) == MOST + 3
        proposer.answer = self.token_ids

    def ask(self, changes: list[Mapping[str, object]]) -> list[RequestOutput]:
        """The plain answers to requests with these changes, which are what comes with drafts too."""
        params = [msgspec.structs.replace(self.params, **each) for each in changes]
        expected, got = (
            llm.generate([PROMPT] * len(params), params, progress=False) for llm in (self.plain, self.drafting)
        )
        assert list(map(_seen, got)) == list(map(_seen, expected))
        return expected


def _seen(output: RequestOutput) -> tuple[object, ...]:
    tokens = output.usage.completion_tokens
    return output.text, output.token_ids, output.finish_reason, output.stop_reason, tokens, output.error


@pytest.fixture(scope="module")
def both(checkpoints: Checkpoints) -> Iterator[Both]:
    model, proposer = str(checkpoints.write("llama").path), GoesOn()
    with (
        LLM(model, dtype="float32", num_threads=1, num_pages=64) as plain,
        LLM(
            model,
            dtype="float32",
            num_threads=1,
            num_pages=64,
            proposer=proposer,
            speculative_tokens=MOST,
            speculative_gate=False,
        ) as drafting,
    ):
        yield Both(plain, drafting, proposer)
        drafts = drafting.engine.stats().drafts
        assert drafts is not None
        assert all(drafts.num_accepted_at), "no draft was accepted whole"


ENDS: Mapping[str, Callable[[Both, int], Mapping[str, object]]] = {
    "stop token": lambda both, place: {"stop_token_ids": [both.token_ids[place]]},
    "max_tokens": lambda both, place: {"max_tokens": place + 1},
    "stop string": lambda both, place: {"stop": [both.text[place]]},
    "stop string of two tokens": lambda both, place: {"stop": [both.text[place - 1 : place + 1]]},
    "min_tokens reached": lambda both, place: {"stop_token_ids": [both.token_ids[place]], "min_tokens": place},
    "grammar": lambda both, place: {
        "regex": f"[a-z]{{{place + 1}}}",
        "logit_bias": dict.fromkeys(both.letters, 50.0),  # a grammar leaves tokens of several letters too
        "allowed_token_ids": None,
    },
}


@pytest.mark.parametrize("end", list(ENDS))
def test_an_answer_ends_at_any_place_of_a_run(both: Both, end: str) -> None:
    answers = both.ask([ENDS[end](both, place) for place in PLACES])
    assert [answer.usage.completion_tokens for answer in answers] == [place + 1 for place in PLACES]


def test_an_end_token_ends_the_answer_at_any_place_of_a_run(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in PLACES:
        for engine in (both.plain.engine, both.drafting.engine):
            changed = dataclasses.replace(engine.model_config, eos_token_ids=frozenset([both.token_ids[place]]))
            monkeypatch.setattr(engine, "model_config", changed)
        [answer] = both.ask([{}])
        assert (answer.finish_reason, answer.usage.completion_tokens) == ("stop", place + 1)


def test_an_end_that_is_held_back_is_rejected_at_any_place_of_a_run(both: Both) -> None:
    stops = [{"stop_token_ids": [both.token_ids[place]], "min_tokens": place + 1} for place in PLACES]
    for place, answer in zip(PLACES, both.ask([*stops]), strict=True):
        assert answer.token_ids[:place] == both.token_ids[:place]
        assert answer.token_ids[place] != both.token_ids[place]
