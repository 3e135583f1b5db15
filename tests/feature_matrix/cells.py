"""Pairs of features put together: what a cell asks of which engine, in which company, and which pairs make no sense."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from mini_sglang import SamplingParams
from tests.feature_matrix import tools
from tests.feature_matrix.company import Script
from tests.feature_matrix.feature import PAGE_SIZE, PROMPT_LENGTH, Feature, Fields, Other, Way, roomy
from tests.feature_matrix.features import BESIDE, FEATURES
from tests.feature_matrix.plain import PlainRuns, Settings, as_settings, drafter_of
from tests.feature_matrix.requests import Answer, Ask
from tests.tiny import VOCAB_SIZE

T = TypeVar("T")

REQUEST: Fields = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}  # unless a feature says otherwise
ENGINE: Mapping[str, object] = {
    "page_size": PAGE_SIZE,
    "max_running_requests": 16,
    "dtype": "float32",
    "num_threads": 1,
}


@dataclass(frozen=True, repr=False)
class Cell:
    """Two features that meet."""

    row: Feature
    column: Feature

    def __repr__(self) -> str:
        return f"{self.row.name} x {self.column.name}"

    @property
    def features(self) -> tuple[Feature, Feature]:
        return self.row, self.column

    @property
    def reason(self) -> str | None:
        """Why the pair makes no sense, if so."""
        return self.row.senseless.get(self.column.name) or self.column.senseless.get(self.row.name)

    @property
    def way(self) -> Way:
        """How the cell's requests come in."""
        otherwise: Way = "LLM" if any(feature.needs_text for feature in self.features) else "engine"
        return _one((feature.way for feature in self.features), None) or otherwise

    @property
    def model(self) -> Settings:
        """What is special about the checkpoint."""
        return as_settings(_merged(feature.model for feature in self.features))

    @property
    def numerics(self) -> Settings:
        """The engine's settings that the plain run has too."""
        return as_settings(_merged(feature.numerics for feature in self.features))

    @property
    def settings(self) -> Settings:
        """All of the engine's settings that are not at their defaults."""
        settings = {**ENGINE, **_merged(feature.settings for feature in self.features), **dict(self.numerics)}
        pool = _one((feature.pool for feature in self.features), roomy)
        return as_settings({**settings, "num_pages": pool(int(str(settings["page_size"])))})


CELLS = [Cell(row, column) for row, column in itertools.combinations(FEATURES, 2)]


class Work:
    """What one cell does: its requests and their company, made for plain runs to answer too."""

    def __init__(self, cell: Cell, plain: PlainRuns) -> None:
        self._cell = cell
        self._plain = plain
        is_chat = any(feature.is_chat for feature in cell.features)
        self.prompt = tools.prompt(plain.tokenizer) if is_chat else _tokens("prompt", PROMPT_LENGTH)
        self._fields: dict[str, Fields] = {}
        for feature in cell.features:
            self._fields[feature.name] = feature.fields(self)
        self.params = self._params(_joined(self._fields.values()))
        self._salt = _one((feature.salt for feature in cell.features), "")

    def answer(self, fields: Fields | None = None) -> Answer:
        """The plain answer to the request as far as it is made, with some fields added."""
        return self.plain_answer(Ask(self.prompt, self._params(_joined([*self._fields.values(), fields or {}]))))

    def plain_answer(self, ask: Ask) -> Answer:
        return self._plain.answer(self._cell.model, self._cell.numerics, ask)

    def plain_without(self, name: str) -> Answer:
        """The plain answer to the first request without what one of the features asks for."""
        others = [feature for feature in self._cell.features if feature.name != name]
        params = self._params(_joined(self._fields[feature.name] for feature in others))
        model = as_settings(_merged(feature.model for feature in others))
        numerics = as_settings(_merged(feature.numerics for feature in others))
        return self._plain.answer(model, numerics, Ask(self.prompt, params))

    def plain_with(self, **fields: object) -> Answer:
        """The plain answer to the first request with other values of some fields."""
        return self.plain_answer(Ask(self.prompt, msgspec.structs.replace(self.params, **fields)))

    def guessed(self, asks: Mapping[str, Ask]) -> dict[str, list[bool]]:
        """Where the draft model says what a greedy one of `asks` has in its prompt, and gets but for the last token."""
        guessed = {}
        for name, ask in asks.items():
            if _is_best(ask.params):
                known = (*ask.prompt, *self.plain_answer(ask).token_ids[:-1])  # the last ends it, drafted or not
                params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
                answer = self._plain.answer(drafter_of(self._cell.model), self._cell.numerics, Ask(known, params))
                pairs = [entry.token_ids for entry in answer.prompt_logprobs or ()]
                guessed[name] = [False, *(token_id == best for token_id, best in pairs)]
        return guessed

    @functools.cached_property
    def asks(self) -> list[Ask]:
        """The cell's requests."""
        count = _one((feature.choices for feature in self._cell.features), 1)
        seeds = [None if self.params.seed is None else self.params.seed + index for index in range(count)]
        return [Ask(self.prompt, msgspec.structs.replace(self.params, seed=seed), self._salt) for seed in seeds]

    @functools.cached_property
    def script(self) -> Script:
        features = self._cell.features
        is_overtaken = any(feature.overtakers for feature in features)
        passing = _one((feature.passing for feature in features), None)
        return Script(
            before=self._by_name("before", lambda feature: feature.before),
            beside={f"beside {i}": self._other(one, -1 if is_overtaken else 0) for i, one in enumerate(BESIDE)},
            is_beside_first=not is_overtaken,
            later=self._by_name("later", lambda feature: feature.later),
            passing=None if passing is None else self._other(passing),
        )

    def _by_name(self, kind: str, others: Callable[[Feature], Iterable[Other]]) -> dict[str, Ask]:
        return {
            f"{kind} {feature.short} {index}": self._other(other)
            for feature in self._cell.features
            for index, other in enumerate(others(feature))
        }

    def _other(self, other: Other, priority: int = 0) -> Ask:
        prompt = (*self.prompt[: other.shared], *_tokens(f"{other.shared}, {other.own}", other.own))
        return Ask(prompt, other.params, self._salt if other.salt is None else other.salt, priority)

    def _params(self, fields: Fields) -> SamplingParams:
        return msgspec.convert({**REQUEST, **fields}, SamplingParams)


def _is_best(params: SamplingParams) -> bool:
    """Whether each token is the likeliest of all, whatever was said before."""
    is_changed = params.logit_bias or params.min_tokens or params.is_penalised or params.is_constrained
    return params.temperature == 0 and not is_changed


@functools.cache
def _tokens(name: str, count: int) -> tuple[int, ...]:
    """Random tokens, none of them special, equal for equal names."""
    rng = random.Random(name)
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(count))


def _one(values: Iterable[T], default: T) -> T:
    """The one value that is not the default, if there is one. Raises ValueError if there are two."""
    found = [value for value in values if value != default]
    if len(found) > 1:
        raise ValueError(f"two features say different things: {found[0]} and {found[1]}")
    return found[0] if found else default


def _merged(mappings: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """Raises ValueError where two say different things of one name."""
    merged: dict[str, object] = {}
    for name, value in _items(mappings):
        if merged.setdefault(name, value) != value:
            raise ValueError(f"two features disagree about {name}: {merged[name]} and {value}")
    return merged


def _joined(mappings: Iterable[Fields]) -> dict[str, object]:
    """As `_merged`, but lists and mappings are put together."""
    joined: dict[str, object] = {}
    for name, value in _items(mappings):
        before = joined.get(name)
        if isinstance(value, list) and isinstance(before, list):
            joined[name] = [*before, *value]
        elif isinstance(value, dict) and isinstance(before, dict):
            joined[name] = {**before, **value}
        else:
            joined |= _merged([joined, {name: value}])
    return joined


def _items(mappings: Iterable[Mapping[str, object]]) -> Iterator[tuple[str, object]]:
    return itertools.chain.from_iterable(mapping.items() for mapping in mappings)
