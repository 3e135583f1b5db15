"""How much of a chat workload's prompts comes from the prefix cache, and that the answers do not change by it.

    python benchmarks/chat_cache.py [--conversations 8] [--turns 6] [--model smollm2-135m] [--dtype float32]

The conversations share a system prompt and advance turn by turn, all at once. Everything runs twice, with the radix
cache and without; the answers must be equal (float32).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from mini_sglang import LLM, SamplingParams

SYSTEM = (
    "You are a careful assistant in a small town library. You answer in one or two short sentences, you never invent "
    "books, you name the shelf when you know it, and you ask back when a question can be understood in two ways."
)
TOPICS = ["rivers", "birds", "trains", "bread", "stars", "maps", "bees", "bridges"]
QUESTIONS = [
    "Where do I find something about {}?",
    "Which of these is good for a child of ten who likes {}?",
    "And is there one with many pictures of {} in it?",
    "How long may I keep a book about {}?",
    "My sister wants to learn more about {} too. What should she read first?",
    "Thank you. Please sum up what you told me about {}.",
]


def converse(llm: LLM, conversations: int, turns: int, max_tokens: int) -> tuple[list[list[str]], int, int]:
    """Answers per conversation, prompt tokens in all, and how many of them were cached."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    topics = [f"{TOPICS[index % len(TOPICS)]} {index // len(TOPICS) or ''}".strip() for index in range(conversations)]
    histories: list[list[dict[str, Any]]] = [[{"role": "system", "content": SYSTEM}] for _ in topics]
    prompt_tokens = cached_tokens = 0
    for turn in range(turns):
        for history, topic in zip(histories, topics, strict=True):
            history.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)].format(topic)})
        outputs = llm.chat(histories, params, progress=False)
        for history, output in zip(histories, outputs, strict=True):
            history.append({"role": "assistant", "content": output.text})
            prompt_tokens += output.usage.prompt_tokens
            cached_tokens += output.usage.cached_tokens
    answers = [[message["content"] for message in history if message["role"] == "assistant"] for history in histories]
    return answers, prompt_tokens, cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()
    answers = {}
    for cache in ("radix", "naive"):
        with LLM(args.model, dtype=args.dtype, cache=cache) as llm:
            start = time.perf_counter()
            answers[cache], prompt, cached = converse(llm, args.conversations, args.turns, args.max_tokens)
            seconds = time.perf_counter() - start
        print(f"{cache}: {cached} of {prompt} prompt tokens from the cache ({cached / prompt:.1%}), {seconds:.1f} s")
    print("answers equal" if answers["radix"] == answers["naive"] else "ANSWERS DIFFER")


if __name__ == "__main__":
    main()
