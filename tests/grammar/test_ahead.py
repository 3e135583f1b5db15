"""Looking ahead changes no mask: along any draft they are those that a matcher gives that takes token by token."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from mini_sglang.grammar.ahead import Ahead, Lookahead
from mini_sglang.grammar.compiler import GrammarCompiler, Matcher, Vocabulary
from mini_sglang.sampling_params import SamplingParams

TOKENS = [bytes([octet]) for octet in range(256)] + [b"the", b"then", b" a", b"ab", b'":', b'"name', b"", b"12", b"}"]
END = TOKENS.index(b"")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "number"}, "of": {"type": "array"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": SamplingParams(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    "any object": SamplingParams(response_format={"type": "json_object"}),
    "regex": SamplingParams(regex="(ab|[0-9]{3}){2,}; the rest of it is always the same(!|[?])"),
    "choice": SamplingParams(choice=["yes, of course", "yes, indeed", "no"]),
    "calls": SamplingParams(
        tool_grammar=json.dumps([{"lark_grammar": 'start: "{\\"name\\": \\"go\\", \\"to\\": " /[0-9]+/ "}"'}])
    ),
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(TOKENS, [], [END]))


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(token_ids: list[int]) -> str:
    return b"".join(TOKENS[token_id] for token_id in token_ids).decode()


def tokens_of(mask: bytes) -> list[int]:
    allowed = int.from_bytes(mask, "little")
    return [token_id for token_id in range(allowed.bit_length()) if allowed >> token_id & 1]


@pytest.mark.parametrize("limit", [12, 40])
@pytest.mark.parametrize("name", list(GRAMMARS))
def test_masks_and_ends_are_those_of_one_token_at_a_time(compiler: GrammarCompiler, name: str, limit: int) -> None:
    """Drafts are right, wrong, forbidden or too long, and verified in part; the limit leads answers to their end."""
    rng, params, num_kept = random.Random(name), GRAMMARS[name], 0
    for _ in range(20):
        answer, masks = _answer(compiler.compile(params, limit), limit, rng)
        ahead, known = Lookahead(compiler.compile(params, limit)), 0
        while known < len(answer):
            draft = [token if rng.random() < 0.9 else rng.randrange(len(TOKENS)) for token in answer[known:][:6]]
            found = ahead.look(draft, rng.randrange(9))
            assert found is not None
            pairs = zip(found.draft, answer[known:], strict=False)
            num_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            assert found.masks[: num_right + 1] == masks[known:][: num_right + 1]
            num_accepted = min(num_right, rng.randint(0, len(found.draft)))  # the gate may cut it
            ahead.advance(answer[known : known + num_accepted + 1])
            known, num_kept = known + num_accepted + 1, num_kept + num_accepted
        assert known == limit or ahead.look([END], 3) is None
    assert num_kept > 20


def _answer(matcher: Matcher, limit: int, rng: random.Random) -> tuple[list[int], list[bytes]]:
    """A random one, and the mask of each of its tokens."""
    answer: list[int] = []
    masks: list[bytes] = []
    while len(answer) < limit and not matcher.is_finished:
        masks.append(matcher.mask())
        answer.append(rng.choice(tokens_of(masks[-1])))
        matcher.advance(answer[-1])
    return answer, masks


def test_what_a_grammar_forces_is_drafted_without_a_proposer(compiler: GrammarCompiler) -> None:
    params = SamplingParams(regex=r"[ab] always the same!")
    ahead = Lookahead(compiler.compile(params))
    assert ahead.look([], 30) == Ahead([compiler.compile(params).mask()])
    ahead.advance(encode("a"))
    found = ahead.look([], 30)
    assert found is not None
    assert decode(found.draft) == " always the same"  # what is left, "!", ends the answer
    assert found.forced == [True] * len(found.draft)
    assert len(found.masks) == len(found.draft) + 1


def test_a_draft_goes_on_behind_what_is_forced_and_ends_where_it_is_forbidden(compiler: GrammarCompiler) -> None:
    ahead = Lookahead(compiler.compile(SamplingParams(regex="[ab]{2}-then-[ab]{2}-then-[ab]{2}")))
    found = ahead.look([*encode("ab-"), TOKENS.index(b"then"), *encode("-az")], 20)
    assert found is not None
    assert decode(found.draft) == "ab-then-a"
    assert found.forced == [False, False, *[True] * (len(found.draft) - 3), False]


def test_a_draft_that_is_not_what_is_forced_makes_room_for_that(compiler: GrammarCompiler) -> None:
    found = Lookahead(compiler.compile(SamplingParams(regex="[ab]{2}-then-[ab]{2}"))).look(encode("ab!a"), 20)
    assert found is not None
    assert decode(found.draft) == "ab-then-"


@pytest.mark.parametrize("draft", ["a", "ba", "b!"])
def test_what_ends_the_answer_is_not_drafted(compiler: GrammarCompiler, draft: str) -> None:
    found = Lookahead(compiler.compile(SamplingParams(choice=["a", "ba"]))).look([*encode(draft), END], 5)
    assert found is not None
    assert decode(found.draft) == draft.strip("a!")
