"""The requests around those of a cell: what runs before them, beside them, comes later, or is aborted in every step.

They join an engine when the cell's first request does, whichever way that one came, and do their part in its steps.
Knows the engine by its public methods alone, and no feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from mini_sglang import Engine, SamplingParams
from tests import tiny
from tests.feature_matrix.requests import Answer, Ask, answer_of

TOKENS_BEFORE_LATER = 2  # of the cell's requests, before those that come later do


@dataclass(frozen=True)
class Script:
    """Who else is there, by request id."""

    before: Mapping[str, Ask]  # run one after the other, to their ends
    beside: Mapping[str, Ask]
    is_beside_first: bool  # these arrive before the cell's requests, else just after
    later: Mapping[str, Ask]  # arrive when the cell's requests have had their first tokens
    passing: Ask | None  # comes before every step, and is aborted before the next

    @property
    def others(self) -> dict[str, Ask]:
        """All but those that pass by."""
        return {**self.before, **self.beside, **self.later}


class Company:
    """Runs a script in one engine, around requests of other ids than its own: those are the cell's."""

    def __init__(self, engine: Engine, script: Script) -> None:
        self._script = script
        self.cell_ids: list[str] = []  # in the order of their arrival
        self._engine = engine
        self._add, self._step = engine.add_request, engine.step
        self._gained: dict[str, list[tiny.TokenOutput]] = {}
        self._num_cell_tokens = 0
        self._ended: set[str] = set()
        self._began = self._is_beside = self._is_later = self._is_over = False
        self._num_passed = 0

    @property
    def answers(self) -> dict[str, Answer]:
        """To all but those that passed by, by request id."""
        return {name: answer_of(outputs) for name, outputs in self._gained.items()}

    def leave(self) -> None:
        """Nobody passes by any more: the cell's requests have ended."""
        self._is_over = True

    def add_request(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        client: str = "",
    ) -> None:
        """In place of the engine's."""
        if not self._began:
            self._began = True
            for name, ask in self._script.before.items():
                self._join(name, ask)
                while self._engine.has_work:
                    self._take(self._step())
            if self._script.is_beside_first:
                self._join_beside()
        self._add(request_id, prompt_ids, params, cache_salt=cache_salt, priority=priority, client=client)
        self.cell_ids.append(request_id)

    def step(self) -> tiny.StepOutputs:
        """In place of the engine's."""
        self._join_beside()
        if self._num_cell_tokens >= TOKENS_BEFORE_LATER and not self._is_later:
            self._is_later = True
            for name, ask in self._script.later.items():
                self._join(name, ask)
        self._pass_by()
        return self._take(self._step())

    def _join_beside(self) -> None:
        if not self._is_beside:
            self._is_beside = True
            for name, ask in self._script.beside.items():
                self._join(name, ask)

    def _pass_by(self) -> None:
        if self._script.passing is None:
            return
        self._engine.abort(f"passing {self._num_passed}")
        if not self._is_over:
            self._num_passed += 1
            self._send(f"passing {self._num_passed}", self._script.passing)

    def _join(self, request_id: str, ask: Ask) -> None:
        self._gained[request_id] = []
        self._send(request_id, ask)

    def _send(self, request_id: str, ask: Ask) -> None:
        self._add(request_id, list(ask.prompt), ask.params, cache_salt=ask.salt, priority=ask.priority)

    def _take(self, outputs: tiny.StepOutputs) -> tiny.StepOutputs:
        """Keep what came of the company, and see to it that nothing comes after an end."""
        for output in outputs:
            assert output.error is None, output.error
            assert output.request_id not in self._ended, f"{output.request_id} goes on after its end"
            if output.finish_reason is not None:
                self._ended.add(output.request_id)
            if (gained := self._gained.get(output.request_id)) is not None:
                gained.append(output)
            elif output.request_id in self.cell_ids:
                self._num_cell_tokens += len(output.token_ids)
        return outputs


@contextmanager
def joined(engine: Engine, script: Script) -> Iterator[Company]:
    """A company that waits in `engine` for the cell's first request; it is to be run to its end in the block."""
    company = Company(engine, script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "add_request", company.add_request)
        patch.setattr(engine, "step", company.step)
        yield company
