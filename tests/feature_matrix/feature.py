"""What a feature is to the matrix: the few things that one declaration says, from which its row and column come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mini_sglang import SamplingParams
from tests.feature_matrix.requests import Answer
from tests.feature_matrix.step_log import Steps

PAGE_SIZE = 4  # of cells, unless a feature says otherwise
PROMPT_LENGTH = 46  # of a cell's requests; ends inside a page of 4 and of 16
POOL_TOKENS = 1024  # that the KV pool holds, unless a feature says otherwise
DRAFT_MODEL = "the draft model of the cell's checkpoint"  # a value of `speculative`, in place of a path

Fields = Mapping[str, object]  # of SamplingParams
Way = Literal["engine", "LLM", "server"]


class Draft(Protocol):
    """A cell's request as far as earlier features have made it."""

    def answer(self, fields: Fields | None = None) -> Answer:
        """Its plain answer, with some fields added."""


GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@dataclass(frozen=True)
class Other:
    """Another request. Its prompt begins as the cell's requests do, for `shared` tokens, and has `own` more."""

    shared: int = 0
    own: int = 0
    params: SamplingParams = GREEDY
    salt: str | None = None  # None: the same as that of the cell's requests


@dataclass(frozen=True)
class Seen:
    """What there is to see after a cell, for a feature to find the proof in that it was at work."""

    answers: Sequence[Answer]  # to the cell's requests, which have one prompt
    params: SamplingParams  # of the first of them
    plain: Answer  # to the first of them, which is the same but has a text
    plain_without: Callable[[str], Answer]  # the plain answer to the first of them without what a feature asks for
    plain_with: Callable[..., Answer]  # the same with other values of some fields
    request_ids: Sequence[str]  # of the cell's requests, as the engine knew them, in the order of their arrival
    guessed: Callable[[], Mapping[str, Sequence[bool]]]  # for each greedy request: which tokens of its prompt, and
    # of its answer but for the last, the cell's draft model would have said too, asked anew and alone
    others: Mapping[str, Answer]  # to the requests that features declare, by "before", "beside" or "later", the
    # feature's short name, and their number
    steps: Steps
    num_aborted: int

    @property
    def page_size(self) -> int:
        return int(str(self.steps.config["page_size"]))

    def is_inside_page(self, answer: Answer) -> bool:
        """Whether what an answer found in the cache ended inside a page."""
        return answer.num_cached % self.page_size > 0


def nothing(draft: Draft) -> Fields:
    return {}


def roomy(page_size: int) -> int:
    """Pages of a pool in which nobody is in another's way."""
    return POOL_TOKENS // page_size


@dataclass(frozen=True, eq=False)
class Feature:
    """One row and one column. What two features say is put together; what both say must be the same.

    `evidence` holds only where the feature was at work: a cell that cannot show it fails.
    """

    name: str
    short: str  # at the head of its column
    meaning: str  # one sentence
    evidence: Callable[[Seen], bool]
    # of the engine: what may change no answer
    settings: Mapping[str, object] = field(default_factory=dict)
    pool: Callable[[int], int] = roomy  # pages, by page size
    # of the engine and the checkpoint: what may, so that the plain run has it too
    numerics: Mapping[str, object] = field(default_factory=dict)
    model: Mapping[str, object] = field(default_factory=dict)
    # of the cell's requests
    fields: Callable[[Draft], Fields] = nothing  # asked in the order in which features are declared
    choices: int = 1  # requests with one prompt; each has a seed one higher than that of the one before
    salt: str = ""
    is_chat: bool = False  # the prompt is that of a chat with a tool
    way: Way | None = None
    needs_text: bool = False  # which an engine knows nothing of
    is_reproducible: bool = False  # transformers and a few lines of numpy say what the plain answer is
    # of others
    before: Sequence[Other] = ()
    later: Sequence[Other] = ()
    passing: Other | None = None
    overtakers: bool = False  # the requests beside the cell's come after these, with a higher priority
    # with which other features it makes no sense, and why
    senseless: Mapping[str, str] = field(default_factory=dict)
