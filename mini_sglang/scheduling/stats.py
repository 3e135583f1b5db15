"""What can be counted of a scheduler: figures of this moment, and sums since the start. Knows no request."""

from __future__ import annotations

import msgspec

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # in tokens, to count steps by


class DraftStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of speculation since the start."""

    num_drafts: int  # rows that verified drafted tokens
    num_draft_tokens: int
    num_accepted_at: list[int]  # of drafts, those whose first, second, … token was accepted

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that the model has drawn too."""
        return sum(self.num_accepted_at)


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of this moment (the first seven) and counters since the start."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # of those that wait; some may be cached
    num_pages: int
    num_free_pages: int
    num_cached_pages: int  # in the prefix cache, held by no request
    num_used_pages: int  # held by requests
    num_prompt_tokens: int  # of admitted requests
    num_cached_tokens: int  # those of them that the prefix cache had
    num_generated_tokens: int
    num_preemptions: int
    num_finished: int
    num_aborted: int
    num_steps: int
    num_step_tokens: int  # that the steps computed, once more after a preemption
    step_sizes: list[int]  # steps of at most each of STEP_SIZES, but more than the one before; then of more than all
    drafts: DraftStats | None = None  # None: nothing is drafted
