"""What verifying costs: drafts that are a model's own recorded answers, right with a given chance, on random weights.

Rounding depends on the sizes of a step, and answers of random weights follow it: so answers are recorded in every run,
and of those that begin like a request's the latest is drafted, until nearly all that should be accepted is. With the
gate, which changes the sizes of steps, the engine is in deterministic mode with drafts and without. Each figure stands
beside the arithmetic of what is possible: the tokens that a step gives on average, which would be the speed-up
if a step took no longer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mini_sglang.engine import Engine
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 416
RECORDINGS = 4
CASES = ((1, 12), (8, 12), (32, 16))  # rows, and tokens of a draft
ACCEPTANCES = (1.0, 0.7)  # of each token, if those before it were accepted


class Replay:
    """Proposes what each request got in an earlier run: `length` tokens, each right with a chance of `acceptance`."""

    def __init__(self) -> None:
        self.length = 0  # none: nothing is drafted
        self.acceptance = 1.0
        self._answers: dict[tuple[int, ...], list[list[int]]] = {}  # by prompt
        self._random = random.Random(0)

    def record(self, prompt: Sequence[int], answer: list[int]) -> None:
        """Keep an answer, the latest one first."""
        self._answers.setdefault(tuple(prompt), []).insert(0, answer)

    def propose(self, request: Request, most: int) -> list[int]:
        known, answers = len(request.output_ids), self._answers.get(tuple(request.prompt_ids), [])
        if not self.length or not answers:
            return []
        answer = next((one for one in answers if one[:known] == request.output_ids), answers[0])
        draft = answer[known : known + min(self.length, most)]
        return [token if self._random.random() < self.acceptance else token ^ 1 for token in draft]

    def forget(self, request: Request) -> None:
        pass


@dataclass(frozen=True)
class Run:
    """One run of streams that begin together, from their second token on."""

    tokens_per_second: float
    accepted: float  # of drafted tokens
    tokens_per_draft: float  # accepted ones, and the one behind them
    step_ms: float


def measure(engine: Engine, replay: Replay) -> dict[str, Any]:
    """For each case plain speed, and with drafts: by acceptance, the run and how many times faster it was."""
    figures: dict[str, Any] = {}
    for rows, length in CASES:
        replay.length = 0
        plain = max((run(engine, rows, replay) for _ in range(2)), key=lambda one: one.tokens_per_second)
        case: dict[str, Any] = {"plain_tok_s": plain.tokens_per_second, "plain_step_ms": plain.step_ms}
        for acceptance in ACCEPTANCES:
            replay.length, replay.acceptance = length, acceptance
            runs = [run(engine, rows, replay) for _ in range(RECORDINGS)]
            best = max(runs, key=lambda one: one.tokens_per_second)
            case[str(acceptance)] = {
                **asdict(best),
                "times": best.tokens_per_second / plain.tokens_per_second,
                "possible": sum(acceptance**place for place in range(length + 1)),
            }
        figures[f"{rows} x {length}"] = case
    return figures


def run(engine: Engine, rows: int, replay: Replay) -> Run:
    """Run the streams to their end, and record what they got."""
    rng = random.Random(0)
    answers: dict[str, list[int]] = {str(row): [] for row in range(rows)}
    prompts = {name: [rng.randrange(1000) for _ in range(PROMPT_TOKENS)] for name in answers}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True))
    while any(not tokens for tokens in answers.values()):
        collect(engine, answers)
    before, began, first = engine.stats(), time.perf_counter(), sum(map(len, answers.values()))
    while engine.has_work:
        collect(engine, answers)
    seconds, after = time.perf_counter() - began, engine.stats()
    engine.flush_cache()
    for name, answer in answers.items():
        replay.record(prompts[name], answer)
    old, new = before.drafts, after.drafts
    assert old is not None
    assert new is not None
    drafts, drafted = new.num_drafts - old.num_drafts, new.num_draft_tokens - old.num_draft_tokens
    accepted = new.num_accepted_tokens - old.num_accepted_tokens
    return Run(
        tokens_per_second=(sum(map(len, answers.values())) - first) / seconds,
        accepted=accepted / max(drafted, 1),
        tokens_per_draft=1 + accepted / max(drafts, 1),
        step_ms=1000 * seconds / max(after.num_steps - before.num_steps, 1),
    )


def collect(engine: Engine, answers: dict[str, list[int]]) -> None:
    """Take one step and keep its tokens. Raises RuntimeError if a request fails."""
    for output in engine.step():
        if output.error is not None:
            raise RuntimeError(output.error)
        answers[output.request_id] += output.token_ids
