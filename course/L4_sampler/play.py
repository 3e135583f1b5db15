"""What each setting does to one distribution, in bars; and one request that draws the same text in any batch."""

from __future__ import annotations

import time
from collections import Counter

import torch
from rich.console import Console
from rich.table import Table

from mini_sglang.execution.sampler import SamplingBatch, sample
from mini_sglang.sampling_params import SamplingParams

WORDS = ["Paris", "Lyon", "the", "a", "Nice", "one", "located", "Rome", "very", "blue", "7", "fish"]
LOGITS = torch.tensor([[9.0, 7.6, 7.2, 6.9, 6.2, 5.7, 5.5, 4.6, 4.0, 2.5, 1.0, -2.0]])
SETTINGS = {
    "as it is": SamplingParams(),
    "temperature 0.5": SamplingParams(temperature=0.5),
    "temperature 2": SamplingParams(temperature=2),
    "top-k 3": SamplingParams(top_k=3),
    "top-p 0.8": SamplingParams(top_p=0.8),
    "temperature 2, top-p 0.8": SamplingParams(temperature=2, top_p=0.8),
    "min-p 0.1": SamplingParams(min_p=0.1),
    "repetition 1.3 (Paris, the)": SamplingParams(repetition_penalty=1.3),
    "bias fish +12": SamplingParams(logit_bias={11: 12.0}),
}
HISTORY = [0, 2]
DRAWS, PAUSE_S = 2000, 0.25


def main() -> None:
    console = Console()
    console.print(f"[bold]{DRAWS} draws each[/], from the same logits\n")
    table = Table(box=None, padding=(0, 1))
    table.add_column("")
    for word in WORDS:
        table.add_column(word, justify="right")
    for name, params in SETTINGS.items():
        counts = Counter(_draw(LOGITS.expand(DRAWS, -1), [params] * DRAWS, [1] * DRAWS, list(range(DRAWS))))
        table.add_row(name, *(_cell(counts[token_id]) for token_id in range(len(WORDS))))
    console.print(table)
    _rest(console)
    console.print("\n[bold]One seed, three batches[/]: 8 tokens of seed 42 at temperature 1.5")
    params = SamplingParams(temperature=1.5, top_p=0.95)
    for others in (0, 1, 63):
        console.print(f"  beside {others:2} others: {_text_beside(others, params)}")
        _rest(console)
    console.print("[dim]The noise of a token is a hash of (seed, position, token): no batch can change it.[/]")


def _draw(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]) -> list[int]:
    rows = len(params)
    history = torch.tensor(HISTORY, dtype=torch.int32)
    token_ids: list[int] = sample(
        logits, SamplingBatch(params, seeds, positions, [len(HISTORY)] * rows, lambda row: history)
    ).tolist()
    return token_ids


def _text_beside(others: int, params: SamplingParams) -> str:
    """The row of seed 42 stands last in its batch; the others have seeds and logits of their own."""
    words = []
    for position in range(8):
        logits = torch.cat((torch.randn(others, len(WORDS)) * 3, LOGITS))
        seeds = [*range(others), 42]
        words.append(WORDS[_draw(logits, [params] * len(seeds), seeds, [position] * len(seeds))[-1]])
    return " ".join(words)


def _cell(count: int) -> str:
    share = count / DRAWS
    if not count:
        return "[dim]·[/]"
    colour = "bold green" if share > 0.3 else "green" if share > 0.05 else "white"
    return f"[{colour}]{'▁▂▃▄▅▆▇█'[min(int(share * 10), 7)]} {share:.0%}[/]" if share >= 0.005 else "[white]<1%[/]"


def _rest(console: Console) -> None:
    if console.is_terminal:  # else nobody watches
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
