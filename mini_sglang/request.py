"""One sequence that is being generated: its tokens, its pages and how far it is computed.

The scheduler keeps it; no tensor, no text.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from mini_sglang.outputs import FinishReason, TokenLogprobs
from mini_sglang.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands. A preempted request is `WAITING` again, with its output kept."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. The scheduler alone changes it after `Scheduler.add`.

    `num_computed_tokens` catches up with `num_tokens`: a prompt chunk, a prefix hit, a decode and a resumed request are
    all "compute k more tokens".
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""  # requests share cached prefixes only with equal salts
    priority: int = 0  # smaller runs first under `--schedule priority`
    client: str = ""  # those of several clients take turns
    seed: int = 0  # params.seed, or one drawn at random for this request
    arrival: int = 0  # order of Scheduler.add
    turn: int = 0  # before those of larger turns; set by the policy
    max_num_tokens: int = 0  # prompt and output together never exceed it; set by Scheduler.add

    output_ids: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_drafted: int = 0  # of the computed tokens, the last ones, which a launched step verifies
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache when first admitted
    was_admitted: bool = False  # has run before; WAITING then means preempted
    last_step: int = 0  # number of the last launched step that contains this request
    slot: int | None = None  # row of the RequestTable while running
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of prompt_ids[1:], as far as steps were read
    is_constrained: bool = field(init=False)  # each token is drawn under a mask that depends on the tokens before it
    masks: list[bytes] = field(default_factory=list)  # for the next token, and along `draft`: one bit for each token
    mask_position: int = 0  # of the token that the first mask is for
    draft: list[int] = field(default_factory=list)  # what may come next under a grammar; nothing else is drafted
    forced: list[bool] = field(default_factory=list)  # for each token of `draft`: the grammar allows no other

    def __post_init__(self) -> None:
        self.is_constrained = self.params.is_constrained

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens whose values were read."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """The known tokens; or one more than are computed, once all known ones are: a launched step samples it."""
        return max(self.num_known_tokens, self.num_computed_tokens + 1)

    @property
    def may_sample(self) -> bool:
        """Whether all is known that the next token depends on: a constrained one has to wait for its mask."""
        if self.num_drafted:  # how many of them stay decides where it goes on
            return False
        return not self.is_constrained or self.mask_position == self.num_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are asked for and were not given out with the first token."""
        return self.params.prompt_logprobs is not None and not self.output_ids

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end the answer."""
        ends = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return ends.union(self.params.stop_token_ids) if self.params.stop_token_ids else ends

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose values are known, prompt first (a new list)."""
        return self.prompt_ids + self.output_ids
