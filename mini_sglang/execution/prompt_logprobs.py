"""Log-probabilities of prompt tokens, looked up in pieces of bounded memory.

The logits at a position are about the token after it; the sampler uses those of a prompt's last position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import look_up
from mini_sglang.outputs import TokenLogprobs
from mini_sglang.scheduling.batch import Row

_PIECE = 128  # positions whose logits are in memory at a time


@dataclass(frozen=True, slots=True)
class Asked:
    """The part of a prompt that one row of a step computes, and whose log-probabilities its request asks for."""

    slot: int
    first: int  # index of its first token among the step's tokens
    start: int  # and the position of that token in the prompt
    count: int  # positions; the tokens looked up are those at start + 1 to start + count
    alternatives: int

    @property
    def indices(self) -> range:
        """Indices of its tokens among the step's."""
        return range(self.first, self.first + self.count)


def asked_of(rows: list[Row], table: RequestTable) -> list[Asked]:
    """Return the parts of prompts that these rows compute and that have to be looked up."""
    asked, first = [], 0
    for row in rows:
        request = table.request(row.slot)
        alternatives = request.params.prompt_logprobs
        count = min(row.count, request.num_prompt_tokens - 1 - row.start)
        if alternatives is not None and count > 0:
            asked.append(Asked(row.slot, first, row.start, count, alternatives))
        first += row.count
    return asked


def look_up_prompts(
    asked: list[Asked], hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor], table: RequestTable
) -> dict[int, list[TokenLogprobs]]:
    """The entries of each part, by slot. hidden [sum of counts, hidden_size], in their order; `logits` makes theirs"""
    results, done = {}, 0
    for part in asked:
        tokens = table.tokens[part.slot, part.start + 1 : part.start + part.count + 1].long()
        entries: list[TokenLogprobs] = []
        for begin in range(0, part.count, _PIECE):
            end = min(begin + _PIECE, part.count)
            piece = logits(hidden[done + begin : done + end])
            entries += look_up(piece, tokens[begin:end], [part.alternatives] * (end - begin))
        results[part.slot] = entries
        done += part.count
    return results
