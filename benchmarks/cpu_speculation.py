"""What speculation gains on a CPU: the built-in model with each proposer against itself without, in turns.

    python -m benchmarks.cpu_speculation [--head PATH] [--rounds 5] [--json FILE]

Chats are questions with greedy answers, alone and 16 at once. Edits are texts of this repository's documents that the
model repeats: given one and how it begins again, it goes on with it. All answers are compared with those without
speculation; the exit status is 1 if any differs. Ratios are medians over the rounds after the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mini_sglang import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
QUESTIONS = [
    "What is the capital of Italy and why is it famous?",
    "Explain how a bicycle stays upright.",
    "Write a short story about a cat who learns to swim.",
    "Give me five tips for better sleep.",
    "What is photosynthesis?",
    "Write a Python function that reverses a string.",
    "How do I make a cup of tea?",
    "Why is the sky blue?",
    "Describe a city on the moon.",
    "What are the rules of chess?",
    "Who was Ada Lovelace?",
    "Write an email that asks for a day off.",
    "How does a refrigerator work?",
    "List ten animals that live in the sea.",
    "What is the difference between weather and climate?",
    "Tell me about the history of bread.",
]
ANSWER_TOKENS, EDIT_TOKENS = 160, 96
SETTINGS: dict[str, dict[str, Any]] = {"packed": {}, "float32": {"dtype": "float32", "weights": "dense"}}


class Mode:
    """One engine, and what its rounds took by workload: seconds and tokens."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name, self.llm = name, LLM(**settings)
        self.rates: dict[str, list[float]] = {}

    def run(self, workload: str, prompts: Sequence[list[int]], tokens: int, at_once: int) -> list[list[int]]:
        """Answer all prompts, `at_once` at a time, and note tokens per second."""
        self.llm.engine.flush_cache()
        params, answers = SamplingParams(temperature=0, max_tokens=tokens), []
        start = time.perf_counter()
        for first in range(0, len(prompts), at_once):
            outputs = self.llm.generate(list(prompts[first : first + at_once]), params, progress=False)
            answers += [list(output.token_ids) for output in outputs]
        taken = time.perf_counter() - start
        self.rates.setdefault(workload, []).append(sum(map(len, answers)) / taken)
        return answers


def workloads(llm: LLM) -> dict[str, tuple[list[list[int]], int, int]]:
    """By name: prompts, most tokens of an answer, and how many run at once."""
    tokenizer = llm.tokenizer
    chats = [
        tokenizer.encode(
            tokenizer.render_chat_template([{"role": "user", "content": question}]), add_special_tokens=False
        )
        for question in QUESTIONS
    ]
    edits = []
    for path in sorted((ROOT / "docs").glob("*.md"))[:6]:
        ids = tokenizer.encode(path.read_text(encoding="utf-8"))[20:260]
        edits.append([*ids, *tokenizer.encode("\n\nOnce more:\n\n"), *ids[:60]])
    return {
        "chat, one stream": (chats[:8], ANSWER_TOKENS, 1),
        "chat, 16 at once": (chats, ANSWER_TOKENS, 16),
        "edits, one stream": (edits, EDIT_TOKENS, 1),
    }


def compare(proposers: dict[str, dict[str, Any]], settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """By workload and proposer: the ratio to none, tokens a second, and what was drafted; exits if a text differs."""
    modes = [Mode(name, {**settings, **how}) for name, how in proposers.items()]
    figures: dict[str, Any] = {}
    for workload, (prompts, tokens, at_once) in workloads(modes[0].llm).items():
        before = {mode.name: mode.llm.engine.stats() for mode in modes}
        for _ in range(rounds):
            answers = {mode.name: mode.run(workload, prompts, tokens, at_once) for mode in modes}
            for name, texts in answers.items():
                if texts != answers["none"]:
                    raise SystemExit(f"{workload}: texts with {name} differ from those without")
        base = modes[0].rates[workload]
        for mode in modes:
            rates, stats = mode.rates[workload], mode.llm.engine.stats()
            pairs = zip(rates[1:], base[1:], strict=True)
            entry: dict[str, Any] = {
                "ratio": round(statistics.median(ours / theirs for ours, theirs in pairs), 3),
                "tokens_per_second": round(statistics.median(rates[1:]), 1),
                "steps": stats.num_steps - before[mode.name].num_steps,
            }
            if stats.drafts is not None and (old := before[mode.name].drafts) is not None:
                places = zip(stats.drafts.num_accepted_at, old.num_accepted_at, strict=True)
                entry["drafted"] = stats.drafts.num_draft_tokens - old.num_draft_tokens
                entry["accepted"] = [now - then for now, then in places]
            figures.setdefault(workload, {})[mode.name] = entry
            print(f"  {workload:18s} {mode.name:6s} {entry}", flush=True)
    for mode in modes:
        mode.llm.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", help="an EAGLE-3 head for the built-in model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SETTINGS, help="one of the settings")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    proposers: dict[str, dict[str, Any]] = {"none": {}, "ngram": {"speculative": "ngram"}}
    if args.head:
        proposers["head"] = {"speculative": args.head, "speculative_tokens": 4}
    figures = {}
    for name, settings in SETTINGS.items():
        if args.only in (None, name):
            print(name, flush=True)
            figures[name] = compare(proposers, settings, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
