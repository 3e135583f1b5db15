"""Text that a model writes itself, to train a head on: `python -m examples.train_head.data --out data.npz`.

The model writes the user's turns too: a chat template, cut where the user's words would begin, is a prompt that a
chat model continues with a question (Magpie, arXiv 2406.08464). Openings and topics, listed here, give variety; nothing
else comes from outside. Then it answers. A part of the chats goes on for a second turn, a part of the answers is quoted
in a new chat that asks to edit them, and a part is plain text without a template. All of it is a function of the seed,
as far as the machine's arithmetic is.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mini_sglang import LLM, RequestOutput, SamplingParams
from mini_sglang.config import DEFAULT_MODEL

Message = dict[str, str]

SYSTEMS = [
    "You are a helpful assistant.",
    "You are a patient teacher. Explain things in simple words.",
    "You are an expert programmer. Answer with code and a short explanation.",
    "Answer briefly.",
    "You are a friendly travel guide.",
    "You are an editor. Improve the text that the user gives you.",
    "You are a writer of short stories.",
]
OPENINGS = [
    *("What is", "What are", "Why", "How do I", "How does", "Can you", "Could you help me", "I want to", "I need"),
    *("Explain", "Describe", "Tell me about", "Tell me a story about", "Compare", "Give me an example of", "Who"),
    *("Write a poem", "Write an email", "Write a short story", "Write a paragraph", "Write a letter", "Write an essay"),
    *("Write a Python function that", "Write a program in", "Fix this code:\n\n```python\n", "Write an SQL query"),
    *("Write a JavaScript function", "Write an HTML page", "What does this code do?\n\n```python\ndef"),
    *("List five", "List ten", "Make a list of", "Give me three", "Give me step by step instructions", "Plan a"),
    *("Summarize the following text:", "Correct the following sentence:", "Translate into French:", "Rewrite:"),
    *("Solve", "Calculate", "A train", "If I have", "Is it true that", "What happens if", "Hello", "Hi, I am"),
]
TOPICS = [
    *("cooking", "music", "history", "physics", "biology", "mathematics", "programming", "health", "sleep", "sports"),
    *("travel", "money", "work", "school", "books", "films", "gardening", "animals", "the sea", "space", "the weather"),
    *("computers", "the internet", "cars", "art", "language", "family", "friendship", "fear", "law", "old age", "war"),
    *("cities", "energy", "food", "tea", "dreams", "robots", "medicine", "the brain", "birds", "mountains", "clothes"),
]
ABOUT = ["I have a question about {}.", "Let us talk about {}.", "In {},", "Teach me something about {}:", "About {}:"]
PLAIN = [
    *(
        "{}:",
        "The history of {}",
        "Once upon a time, in a world of {},",
        "# {}\n\n",
        "An introduction to {}",
        "Q: What",
    ),
    *(
        "import",
        "def",
        "class",
        "The most important thing about {} is",
        "Dear Sir or Madam,\n\n",
        "In recent years, {}",
    ),
]
EDITS = [
    *("Rewrite this text:", "Correct the spelling and grammar of this text:", "Repeat this text word for word:"),
    *("Make this text shorter:", "Summarize this text:", "Make this text more formal:", "Quote the first sentence of:"),
]
FOLLOW_UPS = ["", "", "", "", "Can you", "Why", "What about", "Thanks", "Now", "Please", "Explain", "Rewrite", "How"]


@dataclass(frozen=True)
class Turn:
    """What the model is to write next: the rest of a user's turn, which has an `opening`, or an answer."""

    messages: list[Message] | None = None  # so far; None: plain text, without a template
    text: str = ""  # so far, if it is plain
    opening: str | None = None


@dataclass(frozen=True)
class Sample:
    prompt_ids: list[int]
    answer_ids: list[int]  # its end token too
    is_greedy: bool


class Writer:
    """Writes samples with an engine. A wave is one batch, the next turn of every chat that has begun."""

    def __init__(
        self, llm: LLM, *, seed: int = 0, max_tokens: int = 384, max_question_tokens: int = 96, sampled: float = 0.25
    ) -> None:
        """`sampled`: the share of answers at temperature 0.7; the others are greedy."""
        self._llm, self._rng = llm, random.Random(seed)
        self._max_tokens, self._max_question_tokens, self._sampled = max_tokens, max_question_tokens, sampled
        self._templates: dict[tuple[str, ...], list[str]] = {}

    def waves(self, num_samples: int, width: int, seconds: float) -> Iterator[list[Sample]]:
        """The samples of one wave after the other, `width` new chats in each, until there are enough or time is up."""
        deadline, turns = time.monotonic() + seconds, [self._beginning() for _ in range(width)]
        while num_samples > 0 and time.monotonic() < deadline:
            prompts, params = [self._prompt_ids(turn) for turn in turns], [self._params(turn) for turn in turns]
            outputs = self._llm.generate(prompts, params, progress=False)
            samples = [
                Sample(prompt_ids, without_loop(output.token_ids), param.temperature == 0)
                for turn, prompt_ids, param, output in zip(turns, prompts, params, outputs, strict=True)
                if turn.opening is None
            ][:num_samples]
            yield samples
            num_samples -= len(samples)
            turns = [after for turn, output in zip(turns, outputs, strict=True) for after in self._after(turn, output)]
            turns += [self._beginning() for _ in range(width)]

    def _beginning(self) -> Turn:
        topic = self._rng.choice(TOPICS)
        if self._rng.random() < 0.1:
            return Turn(opening=self._rng.choice(PLAIN).format(topic))
        system = [{"role": "system", "content": self._rng.choice(SYSTEMS)}] if self._rng.random() < 0.25 else []
        openings = ["", self._rng.choice(OPENINGS), self._rng.choice(ABOUT).format(topic)]
        return Turn(system, opening=self._rng.choices(openings, weights=[2, 5, 3])[0])

    def _after(self, turn: Turn, output: RequestOutput) -> list[Turn]:
        """What is to be written after a turn: the answer, a user's second turn, an edit of the answer, or nothing."""
        text = (turn.opening or "") + output.text
        if not text.strip():
            return []
        if turn.messages is None:
            return [Turn(text=text)] if turn.opening is not None else []
        if turn.opening is not None:
            return [Turn([*turn.messages, {"role": "user", "content": text}])]
        chance, is_second = self._rng.random(), len(turn.messages) > 2
        if is_second or chance > 0.4:
            return []
        if chance < 0.15:
            return [Turn([{"role": "user", "content": f"{self._rng.choice(EDITS)}\n\n{text.strip()[:800]}"}])]
        answered = [*turn.messages, {"role": "assistant", "content": text}]
        return [Turn(answered, opening=self._rng.choice(FOLLOW_UPS))]

    def _prompt_ids(self, turn: Turn) -> list[int]:
        tokenizer = self._llm.tokenizer
        if turn.messages is None:
            return tokenizer.encode(turn.text if turn.opening is None else turn.opening)
        messages = (
            turn.messages if turn.opening is None else [*turn.messages, {"role": "user", "content": turn.opening}]
        )
        *parts, last = self._template_parts(tuple(message["role"] for message in messages))
        text = "".join(part + message["content"] for part, message in zip(parts, messages, strict=True))
        return tokenizer.encode(text + last if turn.opening is None else text, add_special_tokens=False)

    def _template_parts(self, roles: tuple[str, ...]) -> list[str]:
        """What the chat template writes around messages of these roles; rendering each chat would take too long.

        Raises ValueError if the template does not write each content once, in order.
        """
        if roles not in self._templates:
            contents = [f"<content {index}>" for index in range(len(roles))]
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
            text = self._llm.tokenizer.render_chat_template(messages)
            if re.findall(r"<content \d+>", text) != contents:
                raise ValueError(f"the chat template does not write messages of {roles} one after the other: {text!r}")
            self._templates[roles] = re.split(r"<content \d+>", text)
        return self._templates[roles]

    def _params(self, turn: Turn) -> SamplingParams:
        seed = self._rng.getrandbits(31)
        if turn.opening is not None:
            most = self._max_question_tokens // (4 if turn.messages is None else 1)
            return SamplingParams(temperature=1, min_p=0.05, max_tokens=most, seed=seed)
        temperature = 0.7 if self._rng.random() < self._sampled else 0.0
        return SamplingParams(temperature=temperature, max_tokens=self._max_tokens, seed=seed)


def without_loop(ids: Sequence[int], window: int = 32) -> list[int]:
    """`ids` up to where a second copy of any `window` of them ends: what follows in a loop is no news to a head."""
    seen, raw = set[bytes](), np.asarray(ids, np.int32).tobytes()  # four bytes a token: quicker than tuples
    for end in range(window, len(ids) + 1):
        piece = raw[4 * (end - window) : 4 * end]
        if piece in seen:
            return list(ids[:end])
        seen.add(piece)
    return list(ids)


def save(path: Path, samples: Sequence[Sample]) -> None:
    """`tokens` [T] int32 of all samples, `is_answer` [T] bool, `ends` [samples] int64, `is_greedy` [samples] bool."""
    ids = [[*sample.prompt_ids, *sample.answer_ids] for sample in samples]
    answers = [[False] * len(sample.prompt_ids) + [True] * len(sample.answer_ids) for sample in samples]
    np.savez(
        path,
        tokens=np.concatenate(ids).astype(np.int32),
        is_answer=np.concatenate(answers),
        ends=np.cumsum([len(sample_ids) for sample_ids in ids]),
        is_greedy=np.array([sample.is_greedy for sample in samples]),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("head-data.npz"))
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name, folder or .gguf file")
    parser.add_argument("--samples", type=int, default=40_000, help="answers to write, each with its prompt")
    parser.add_argument("--width", type=int, default=2048, help="chats that begin in each wave")
    parser.add_argument("--minutes", type=float, default=60.0, help="no wave begins after them; what is there is saved")
    parser.add_argument("--max-tokens", type=int, default=384, help="most tokens of an answer")
    parser.add_argument("--sampled", type=float, default=0.25, help="share of answers at temperature 0.7, not greedy")
    parser.add_argument("--rows", type=int, help="most requests in one step; none: the engine's default")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    samples: list[Sample] = []
    with LLM(args.model, max_running_requests=args.rows) as llm:
        writer = Writer(llm, seed=args.seed, max_tokens=args.max_tokens, sampled=args.sampled)
        started = time.monotonic()
        for wave in writer.waves(args.samples, args.width, args.minutes * 60):
            samples += wave
            seconds, tokens = time.monotonic() - started, sum(len(sample.answer_ids) for sample in samples)
            print(
                f"{seconds:.0f} s: {len(samples)} answers, {tokens} tokens, {tokens / seconds:.0f} a second", flush=True
            )
    if not samples:
        raise SystemExit(f"no answer was written in {args.minutes} minutes")
    save(args.out, samples)
    print(f"{args.out}: {len(samples)} samples, {sum(sample.is_greedy for sample in samples)} of them greedy")


if __name__ == "__main__":
    main()
