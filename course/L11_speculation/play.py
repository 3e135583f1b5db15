"""An edit step by step, four ways to accept a draft over 4,000 seeds, and how long a draft pays."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from mini_sglang.execution.sampler import SamplingBatch, sample
from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.speculation import Gate, NgramProposer, _Record, verify
from mini_sglang.scheduling.step_cost import StepCost

TEXT = "the keeper climbed the stairs , lit the lamp , wiped the glass and wrote the weather into his book ."
PROMPT = f"say captain instead of keeper : {TEXT} And : "
ANSWER = TEXT.replace("keeper", "captain")
MOST = 8
PROBABILITIES = {"the": 0.45, "a": 0.3, "his": 0.15, "one": 0.1}
DRAFT, SEEDS = 0, 4000  # the draft is always "the"
COST = StepCost(step=4000, decode=35, context=1e-3, token=25, pair=1e-3)  # microseconds, about what an 8B model takes
PAUSE_S = 0.5


def main() -> None:
    console = Console(highlight=False)
    for show in (show_edit, show_draws, show_gate):
        show(console)
        console.print()


def rest(console: Console) -> None:
    if console.is_terminal:  # else nobody watches
        time.sleep(PAUSE_S)


def show_edit(console: Console) -> None:
    """The steps of a request whose answer is known; what a step draws is the answer where its draft is right."""
    words = list(dict.fromkeys(f"{PROMPT} {ANSWER}".split()))
    answer = [words.index(word) for word in ANSWER.split()]
    request = Request("edit", [words.index(word) for word in PROMPT.split()], SamplingParams())
    proposer, num_steps = NgramProposer(), 0
    console.print("[bold]1. An edit[/]: [green]accepted[/], [red]rejected[/], [bold]drawn behind them[/]")
    console.print(Padding(f"[dim]{PROMPT}[/]", (0, 0, 0, 3)))
    while len(request.output_ids) < len(answer):
        num_steps, known = num_steps + 1, len(request.output_ids)
        draft = proposer.propose(request, min(MOST, len(answer) - known - 1))
        drawn = answer[known : known + len(draft) + 1]  # behind a wrong token it would be something else
        gained = verify(request, request.num_known_tokens - 1, draft, drawn, None)
        request.output_ids += gained
        accepted, rejected = draft[: len(gained) - 1], draft[len(gained) - 1 :]
        parts = [
            f"[green]{spelt(words, accepted)}[/]",
            f"[bold]{spelt(words, gained[-1:])}[/]",
            f"[red]{spelt(words, rejected)}[/]",
        ]
        console.print(f"   {num_steps:2}  " + "  ".join(part for part in parts if "][/" not in part))
        rest(console)
    console.print(f"   {len(answer)} tokens in {num_steps} steps")


def spelt(words: list[str], token_ids: Sequence[int]) -> str:
    return " ".join(words[token_id] for token_id in token_ids)


def show_draws(console: Console) -> None:
    """How often each rule gives which token, and the same one as without a draft."""
    logits = torch.tensor(list(PROBABILITIES.values())).log()
    plain, others = drawn(logits, position=7), drawn(logits.where(torch.arange(4) != DRAFT, -torch.inf), position=8)
    rng = random.Random(0)
    rules = {
        "no draft": plain,
        "if drawn": plain,  # the draft if it is what is drawn, else what is drawn
        "by ratio": [DRAFT if rng.random() < PROBABILITIES["the"] else other for other in others],
        "if p > 0.3": [DRAFT] * SEEDS,
    }
    table = Table("", *rules, box=None, padding=(0, 2, 0, 0))
    for index, (word, probability) in enumerate(PROBABILITIES.items()):
        table.add_row(f"{word}, p = {probability}", *(f"{Counter(rule)[index] / SEEDS:.1%}" for rule in rules.values()))
    same = (sum(a == b for a, b in zip(plain, rule, strict=True)) / SEEDS for rule in rules.values())
    table.add_row("the token of no draft", *(f"[bold]{share:.0%}[/]" for share in same))
    console.print(f"[bold]2. The draft is always 'the'[/]; what {SEEDS:,} seeds get, by when it is accepted")
    console.print(table)
    rest(console)


def drawn(logits: torch.Tensor, position: int) -> list[int]:
    """One token for each seed."""
    batch = SamplingBatch(
        params=[SamplingParams()] * SEEDS,
        seeds=list(range(SEEDS)),
        positions=[position] * SEEDS,
        prompt_lengths=[1] * SEEDS,
        history=lambda row: torch.tensor([0], dtype=torch.int32),
    )
    token_ids: list[int] = sample(logits.expand(SEEDS, -1), batch).tolist()
    return token_ids


def show_gate(console: Console) -> None:
    gate, request = Gate(NgramProposer(), 16, COST), Request("a", [1] * 100, SamplingParams())
    acceptances = (0.3, 0.5, 0.7, 0.9)
    table = Table("requests", *(f"{acceptance:g}" for acceptance in acceptances), box=None, padding=(0, 4, 0, 0))
    for count in (1, 8, 32, 64, 128, 256):
        us, cells = COST.us_of[0] + count * COST.us_of[1], []
        for acceptance in acceptances:
            length, expected, longer_us = gate._worth(_Record(acceptance), request, 16, count / us)  # what all ask
            cells.append(f"{length:2}, {(1 + expected) * us / (us + count * longer_us):.1f} ×" if length else " –")
        table.add_row(str(count), *cells)
    console.print("[bold]3. Drafted tokens that pay[/], and tokens a second against none, by acceptance")
    console.print(table)
    console.print(
        f"   [dim]a step takes {COST.us_of[0]:,} µs, {COST.us_of[1]} a decode, {COST.us_of[3]} any other token[/]"
    )


if __name__ == "__main__":
    main()
