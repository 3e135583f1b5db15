"""Runs cells, those with equal settings in one engine, and looks at what they leave behind."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from mini_sglang import LLM
from tests import tiny
from tests.feature_matrix.cells import Cell, Work
from tests.feature_matrix.company import joined
from tests.feature_matrix.drafts import KnowsAnswers
from tests.feature_matrix.feature import DRAFT_MODEL
from tests.feature_matrix.plain import PlainRuns, Settings, drafter_of
from tests.feature_matrix.requests import Answer
from tests.feature_matrix.step_log import Steps, read_steps
from tests.feature_matrix.ways import ask_engine, ask_llm, ask_server

PATIENCE_S = 30.0  # for a server to end what runs


@dataclass(frozen=True)
class Outcome:
    """What came of a cell."""

    answers: list[Answer]
    request_ids: list[str]
    others: dict[str, Answer]
    steps: Steps
    num_aborted: int


class Stage:
    """Holds the engine of the latest cell, for the next one with the same settings."""

    def __init__(self, folder: Path, plain: PlainRuns) -> None:
        self._log = folder / "steps.jsonl"
        self._plain = plain
        self._key: tuple[Settings, Settings] | None = None
        self._llm: LLM | None = None
        self._proposer = KnowsAnswers()

    def run(self, cell: Cell, work: Work) -> Outcome:
        """Raises AssertionError if a page is lost afterwards, and whatever a broken engine raises."""
        try:
            return self._run(self._engine_of(cell), cell, work)
        except BaseException:
            self.close()  # what is left in it belongs to this cell
            raise

    def _run(self, llm: LLM, cell: Cell, work: Work) -> Outcome:
        before = llm.engine.stats()
        script = work.script
        asks = [*work.asks, *script.before.values(), *script.beside.values(), *script.later.values()]
        self._proposer.learn((ask, work.plain_answer(ask)) for ask in asks)
        with joined(llm.engine, work.script) as company:
            if cell.way == "server":
                with tiny.serve(llm.engine, llm.tokenizer) as url:
                    answers = ask_server(url, work.asks, llm.tokenizer)
                    company.leave()
                    _wait_until_idle(llm)
            else:
                answers = ask_llm(llm, work.asks) if cell.way == "LLM" else ask_engine(llm.engine, work.asks)
                company.leave()
                while llm.engine.has_work:
                    llm.engine.step()
        after = llm.engine.stats()
        llm.engine.check()
        llm.engine.flush_cache()
        assert llm.engine.stats().num_free_pages == after.num_pages, "a page was lost"
        steps = read_steps(self._log, after=before.num_steps)
        return Outcome(answers, company.cell_ids, company.answers, steps, after.num_aborted - before.num_aborted)

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
        self._llm = self._key = None

    def _engine_of(self, cell: Cell) -> LLM:
        key = cell.model, cell.settings
        if self._llm is None or key != self._key:
            self.close()
            settings = {**dict(cell.settings), "step_log": str(self._log)}
            model, self._proposer = str(self._plain.checkpoint(cell.model).path), KnowsAnswers()
            proposer = None
            if settings.get("speculative") == DRAFT_MODEL:
                settings["speculative"] = str(self._plain.checkpoint(drafter_of(cell.model)).path)
            elif "speculative" in settings:
                proposer = self._proposer
            self._llm, self._key = LLM(model, proposer=proposer, **settings), key
        return self._llm


def _wait_until_idle(llm: LLM) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while llm.engine.has_work:
        assert time.monotonic() < deadline, "the engine has not come to its end"
        time.sleep(0.001)
