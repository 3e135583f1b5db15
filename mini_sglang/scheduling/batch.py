"""The order for one step: what the scheduler decides and the executor obeys. Integers only.

A batch carries deltas. A request's tokens and sampling parameters are sent once, when it takes a slot; afterwards a row
is (slot, start, count), and the sampled tokens never leave the device's RequestTable on their way to the next step.
Requests that decode are one object, the same from step to step as long as they are the same requests.
"""

from __future__ import annotations

import msgspec

from mini_sglang.request import SamplingParams, TokenLogprobs


class NewRow(msgspec.Struct, frozen=True):
    """A request that takes `slot` with this step, new or resumed. It replaces whatever the slot held."""

    slot: int
    token_ids: list[int]  # every known token: the prompt, and after a preemption the output so far
    num_prompt_tokens: int  # token_ids[num_prompt_tokens:] are output tokens, which the penalties count
    params: SamplingParams
    seed: int
    end_token_ids: list[int] = []  # if `min_tokens` are asked for: what may not be drawn before


class NewPages(msgspec.Struct, frozen=True):
    """Page ids that a slot's page table gains, at table index `first_index` and after."""

    slot: int
    first_index: int
    page_ids: list[int]


class NextPages(msgspec.Struct, frozen=True):
    """One page more for each of these slots, at `indices` of their page tables: what requests that decode gain."""

    slots: list[int]
    indices: list[int]
    page_ids: list[int]

    def without(self, slot: int) -> NextPages:
        """All but those of one slot."""
        kept = [row for row in zip(self.slots, self.indices, self.page_ids, strict=True) if row[0] != slot]
        return NextPages(*map(list, zip(*kept, strict=True))) if kept else NextPages([], [], [])


class Row(msgspec.Struct, frozen=True):
    """Compute tokens `start` to `start + count - 1` of the request in `slot`; sample the next one if `samples`."""

    slot: int
    start: int
    count: int
    samples: bool


class DecodeRows(msgspec.Struct, frozen=True):
    """Requests that compute one token and sample the next in every step: in step n, token `offsets[i] + n` of the one
    in `slots[i]`. A step whose predecessor had the same requests carries the very same object."""

    slots: tuple[int, ...]
    offsets: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.slots)

    def rows(self, step: int) -> list[Row]:
        """Written out for one step."""
        return [Row(slot, offset + step, 1, True) for slot, offset in zip(self.slots, self.offsets, strict=True)]


NO_DECODES = DecodeRows((), ())


class ScheduledBatch(msgspec.Struct, frozen=True):
    """One step. Applied in this order: new rows, new and next pages, page copies, forward over `rows`, sampling.

    `chunks` are the rows of requests that do not decode yet: parts of prompts, and of answers computed again after a
    preemption; and those of requests with a grammar, which are not in every step. `page_copies` are (source,
    destination) page ids; all sources are read before any destination is written.
    """

    step: int
    decodes: DecodeRows
    chunks: list[Row]
    new_rows: list[NewRow]
    new_pages: list[NewPages]
    page_copies: list[tuple[int, int]]
    masks: dict[int, bytes] = {}  # by slot, of every row that samples under a grammar: one bit per token, 1 is allowed
    next_pages: NextPages = msgspec.field(default_factory=lambda: NextPages([], [], []))

    @property
    def rows(self) -> list[Row]:
        """All rows, decodes first (a new list: O(rows))."""
        return self.decodes.rows(self.step) + self.chunks

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(row.count for row in self.chunks)


class StepResult(msgspec.Struct, frozen=True):
    """What a step sampled, one entry per row with `samples`, in row order; and what it found out about prompts."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # of the rows that ask, by slot: of their tokens' successors
