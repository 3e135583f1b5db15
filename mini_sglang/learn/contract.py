"""The contract that ends every lesson, as a check: the built-in model's greedy tokens equal those of transformers.

The ids were recorded from transformers in float32; `mini-sglang verify` asks transformers itself.
"""

from __future__ import annotations

from mini_sglang.learn.checking import LessonError, expect
from mini_sglang.llm import LLM
from mini_sglang.sampling_params import SamplingParams

PROMPT = "The capital of France is"
TOKEN_IDS = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216]


def test_greedy_tokens_equal_those_of_transformers() -> None:
    params = SamplingParams(temperature=0, max_tokens=len(TOKEN_IDS))
    with LLM("smollm2-135m", dtype="float32", num_pages=512, num_threads=1) as llm:
        for prompts, how in (([PROMPT], "alone"), ([PROMPT, PROMPT + " Paris", PROMPT], "in a batch, from the cache")):
            outputs = llm.generate(prompts, params, progress=False)
            for output in (outputs[0], outputs[-1]):
                if output.error is not None:
                    raise LessonError(output.error, "no error", f"generating after {PROMPT!r}, {how}")
                expect(output.token_ids, TOKEN_IDS, f"greedy tokens after {PROMPT!r}, {how}", invariant="the contract")
        llm.engine.check()
