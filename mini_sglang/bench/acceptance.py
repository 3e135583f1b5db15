"""What became of the drafts of a run, from the counters before and after it. The words are vLLM's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mini_sglang.scheduling.stats import DraftStats


@dataclass(frozen=True)
class Acceptance:
    """Counters of a run with drafts, and what follows from them."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_at: list[int]  # of drafts, those whose first, second, … token was accepted
    acceptance_rate: float  # accepted tokens by drafted ones
    accepted_per_draft: float  # tokens; a step makes one more of a request
    acceptance_at: list[float]  # shares of all drafts, also of those that had no token at this place

    @classmethod
    def between(cls, before: DraftStats | None, after: DraftStats | None) -> Acceptance | None:
        """Of the drafts that `after` has and `before` has not; None if nothing was drafted."""
        if before is None or after is None:
            return None
        places = itertools.zip_longest(after.num_accepted_at, before.num_accepted_at, fillvalue=0)
        return cls._of(
            after.num_drafts - before.num_drafts,
            after.num_draft_tokens - before.num_draft_tokens,
            [new - old for new, old in places],
        )

    @classmethod
    def together(cls, runs: Sequence[Acceptance]) -> Acceptance | None:
        """Of all drafts of several runs of one engine."""
        places = itertools.zip_longest(*(run.num_accepted_at for run in runs), fillvalue=0)
        return cls._of(
            sum(run.num_drafts for run in runs), sum(run.num_draft_tokens for run in runs), [sum(at) for at in places]
        )

    @classmethod
    def _of(cls, drafts: int, tokens: int, accepted_at: list[int]) -> Acceptance | None:
        if drafts <= 0 or tokens <= 0:  # below 0: counters of a server that was restarted
            return None
        accepted = sum(accepted_at)
        shares = [number / drafts for number in accepted_at]
        return cls(drafts, tokens, accepted_at, accepted / tokens, accepted / drafts, shares)

    def __str__(self) -> str:
        places = " ".join(f"{share:.0%}" for share in self.acceptance_at)
        return (
            f"drafts: {self.num_drafts:,} of {self.num_draft_tokens:,} tokens, {self.acceptance_rate:.1%} accepted, "
            f"{self.accepted_per_draft:.2f} a draft; by position {places}"
        )
