"""Grammars are checked in a child process: honest ones in no time, hostile ones refused within a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from mini_sglang.grammar.checker import GrammarChecker
from mini_sglang.grammar.compiler import Vocabulary
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.tokenizer import Tokenizer

SLOW = SamplingParams(regex="((a{50}){50}){50}")  # takes most of a minute, if it is let
DIGITS = SamplingParams(regex="[0-9]+")
WithChecker = Callable[[Callable[[GrammarChecker], Awaitable[None]]], None]


def schema(value: Any) -> SamplingParams:
    return SamplingParams(response_format={"type": "json_schema", "json_schema": {"schema": value}})


@pytest.fixture
def with_checker(builtin_tokenizer: Tokenizer) -> WithChecker:
    """`with_checker(test)`: run a coroutine function of a checker whose child is ready."""
    tokenizer = builtin_tokenizer
    make_vocabulary = partial(Vocabulary.of, tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)

    def run(test: Callable[[GrammarChecker], Awaitable[None]]) -> None:
        async def main() -> None:
            checker = GrammarChecker(make_vocabulary)
            try:
                await checker.check(SamplingParams(regex="ready"))
                await test(checker)
            finally:
                await checker.close()

        asyncio.run(main())

    return run


async def refusal(checker: GrammarChecker, params: SamplingParams) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the caller looks at the message
        await checker.check(params)
    return str(raised.value)


def test_what_compiles_passes_and_what_does_not_is_refused_by_name(with_checker: WithChecker) -> None:
    async def test(checker: GrammarChecker) -> None:
        await checker.check(DIGITS)
        await checker.check(SamplingParams(choice=["a", "b"], grammar_after="</think>"))
        assert (await refusal(checker, SamplingParams(regex="["))).startswith("regex cannot be followed")
        assert (await refusal(checker, SamplingParams(regex="["))).startswith("regex cannot be followed")
        await checker.check(DIGITS)

    with_checker(test)


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_ones_pass(with_checker: WithChecker) -> None:
    async def test(checker: GrammarChecker) -> None:
        for params in (SLOW, SLOW, SamplingParams(regex=f"x{SLOW.regex}")):
            assert (await refusal(checker, params)).startswith("regex takes more than 2 s of a processor or 256 MiB")
            await checker.check(SamplingParams(regex=f"{params.regex}{{0}}"))  # by a new child

    with_checker(test)


def test_the_event_loop_goes_on_meanwhile(with_checker: WithChecker) -> None:
    async def test(checker: GrammarChecker) -> None:
        check = asyncio.create_task(refusal(checker, SLOW))
        ticks = 0
        while not check.done():
            await asyncio.sleep(0.005)
            ticks += 1
        assert ticks > 20

    with_checker(test)


def test_whoever_leaves_while_a_grammar_is_checked_disturbs_nobody(with_checker: WithChecker) -> None:
    async def test(checker: GrammarChecker) -> None:
        leaving = [asyncio.create_task(checker.check(SamplingParams(regex=f"a{index}"))) for index in range(5)]
        staying = [asyncio.create_task(checker.check(SamplingParams(regex=f"a{index % 2}"))) for index in range(10)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*staying)
        assert (await refusal(checker, SamplingParams(regex="a("))).startswith("regex cannot be followed")

    with_checker(test)


def test_a_child_that_was_killed_is_replaced(with_checker: WithChecker) -> None:
    async def test(checker: GrammarChecker) -> None:
        assert checker._child is not None
        checker._child.kill()
        checker._child.wait()
        await checker.check(DIGITS)

    with_checker(test)


def test_closing_ends_the_child(with_checker: WithChecker) -> None:
    async def test(checker: GrammarChecker) -> None:
        assert checker._child is not None
        await checker.close()
        assert checker._child.returncode is not None

    with_checker(test)
