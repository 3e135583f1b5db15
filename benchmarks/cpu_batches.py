"""Whether the built-in model says the same alone and in any batch, with the settings that a server has by default.

    python benchmarks/cpu_batches.py [--prompts 200] [--tokens 32]

Prompts are pieces of this repository's documents of 1 to 200 tokens; every other one is sampled with a seed of its own.
Each is answered alone, then in batches of 2 to 16. The exit status is 1 if any text differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from mini_sglang import LLM, SamplingParams

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    with LLM("smollm2-135m") as llm:
        differing = differences(llm, args.prompts, args.tokens)
    print(f"{args.prompts} prompts, alone and in batches of 2 to 16: {len(differing)} differ {differing}")
    sys.exit(bool(differing))


def differences(llm: LLM, number: int, tokens: int) -> list[int]:
    """The prompts that do not say the same in a batch as alone."""
    draw = random.Random(0)
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = llm.tokenizer.encode(text)
    starts = [draw.randrange(len(ids) - 200) for _ in range(number)]
    prompts = [ids[start : start + draw.randint(1, 200)] for start in starts]
    params = [
        SamplingParams(temperature=0 if index % 2 else 0.8, seed=index, max_tokens=tokens) for index in range(number)
    ]
    alone = [llm.generate([prompt], [how], progress=False)[0] for prompt, how in zip(prompts, params, strict=True)]
    order = draw.sample(range(number), number)
    differing = []
    while order:
        batch = [order.pop() for _ in range(min(len(order), draw.randint(2, 16)))]
        together = llm.generate([prompts[i] for i in batch], [params[i] for i in batch], progress=False)
        differing += [i for i, output in zip(batch, together, strict=True) if output.token_ids != alone[i].token_ids]
    return sorted(differing)


if __name__ == "__main__":
    main()
