"""What the scheduler tells the executor about one step, and what the step returns. Integers only.

A batch carries deltas. A request's tokens and sampling parameters are sent once, when it takes a slot; afterwards a row
is (slot, start, count), and the sampled tokens never leave the device's RequestTable on their way to the next step.
"""

from __future__ import annotations

import msgspec

from mini_sglang.outputs import TokenLogprobs
from mini_sglang.sampling_params import SamplingParams

UNKNOWN = -1  # a drafted token that a model beside the target is yet to draw, on the device
MOST_VERIFIED = 768  # tokens that a step samples if any of them are drafted: CUDA graphs have room for as many


class NewRequest(msgspec.Struct, frozen=True):
    """A request that takes `slot` with this step, new or resumed. It replaces the slot's former request."""

    slot: int
    token_ids: list[int]  # every known token: the prompt, and after a preemption the output so far
    num_prompt_tokens: int  # token_ids[num_prompt_tokens:] are output tokens, which the penalties count
    params: SamplingParams
    seed: int
    end_token_ids: list[int] = []  # with `min_tokens`: the tokens that may not be drawn before


class NewPages(msgspec.Struct, frozen=True):
    """Page ids for a slot's page table, from table index `first_index` on."""

    slot: int
    first_index: int
    page_ids: list[int]


class Row(msgspec.Struct, frozen=True):
    """Compute tokens `start` to `start + count - 1` of the request in `slot`; sample a successor of the last `samples`.

    That is 0 within a prompt, 1 for the next token, and k more where the last k tokens of the row are drafted.
    """

    slot: int
    start: int
    count: int
    samples: int


class ScheduledBatch(msgspec.Struct, frozen=True):
    """One step. Applied in this order: new requests, page copies, new pages, forward over `rows`, sampling.

    `page_copies` are (source, destination) page ids; all sources are read before any destination is written.
    """

    step: int
    rows: list[Row]
    new_requests: list[NewRequest]
    new_pages: list[NewPages]
    page_copies: list[tuple[int, int]]
    masks: dict[int, list[bytes]] = {}  # by slot, under a grammar, for each sample: one bit per token, 1 is allowed
    drafts: dict[int, list[int]] = {}  # by slot, of every row that verifies: its last tokens; may be all UNKNOWN

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def num_model_drafts(self) -> int:
        """How often a model drafts a token, of any number of requests, before the step."""
        return max((len(draft) for draft in self.drafts.values() if is_unknown(draft)), default=0)

    @property
    def is_decode(self) -> bool:
        """Whether every row computes one token, whose predecessors earlier steps computed, and samples the next."""
        return not self.new_requests and all(row.count == 1 and row.samples for row in self.rows)


class StepResult(msgspec.Struct, frozen=True):
    """What a step sampled: `samples` entries for each row, in row order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # by slot, of rows that ask: one for each token's successor
    drafts: dict[int, list[int]] = {}  # by slot: those that were UNKNOWN


def is_unknown(draft: list[int] | None) -> bool:
    """Whether a model drafts these tokens with the step."""
    return draft is not None and draft[0] == UNKNOWN
