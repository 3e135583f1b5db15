"""With packed weights the built-in model says the same alone, in any batch, and however its prompts are cut."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from mini_sglang import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Hello",
    "def fibonacci(n):",
    "Once upon a time there was a little engine that",
    "1, 2, 3, 4,",
    "A list of fruits:\n- apples\n-",
    "Water boils at",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "To make bread you need flour, water,",
    "Q: What is the largest planet?\nA:",
    "Dear Sir or Madam,",
    "import torch\n\nclass Linear",
    "Roses are red,",
    "In 1969 the first",
    "An integer is even if",
    "She opened the door and",
    "The opposite of hot is",
    "Il était une fois",
    "Numbers: " + " ".join(map(str, range(120))),
    "JSON: {",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2-135m", weights="packed", num_pages=512, max_prefill_tokens=100) as llm:
        yield llm


def params(index: int) -> SamplingParams:
    """Greedy or, for every other prompt, seeded."""
    return SamplingParams(temperature=0.8 if index % 2 else 0, seed=index, max_tokens=12)


def test_prompts_say_the_same_alone_and_in_batches(llm: LLM) -> None:
    alone = [llm.generate([prompt], [params(i)])[0].token_ids for i, prompt in enumerate(PROMPTS)]
    for size in (2, 5, 16):
        order = random.Random(size).sample(range(len(PROMPTS)), len(PROMPTS))
        for batch in (order[at : at + size] for at in range(0, len(order), size)):
            together = llm.generate([PROMPTS[i] for i in batch], [params(i) for i in batch])
            assert [output.token_ids for output in together] == [alone[i] for i in batch]


def test_a_choice_is_what_its_seed_gives_alone(llm: LLM) -> None:
    """A server's choices of a request have the seeds that follow each other, and run in one batch."""
    many = [SamplingParams(temperature=1.0, seed=100 + choice, max_tokens=12) for choice in range(4)]
    together = llm.generate([PROMPTS[3]] * 4, many)
    alone = [llm.generate([PROMPTS[3]], [how])[0] for how in many]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert len({output.text for output in together}) > 1
