"""Where two features meet: each pair gives the answers that the plain run gives, token for token, and was at work.

`python -m tests.test_feature_matrix` writes the table of all pairs into docs/matrix.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests import tiny
from tests.feature_matrix import page, tools
from tests.feature_matrix.cells import CELLS, Cell, Work
from tests.feature_matrix.feature import PROMPT_LENGTH, Seen
from tests.feature_matrix.features import FEATURES
from tests.feature_matrix.plain import PlainRuns, reference_answer
from tests.feature_matrix.requests import differences
from tests.feature_matrix.stage import Stage

RUN = sorted((cell for cell in CELLS if cell.reason is None), key=lambda cell: (repr(cell.model), repr(cell.settings)))
MEETINGS = 5  # runs of a cell with a grammar until its features were seen at work together
REPRODUCIBLE = [cell for cell in RUN if all(one.is_reproducible or one.way == "engine" for one in cell.features)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainRuns]:
    runs = PlainRuns(tmp_path_factory.mktemp("models"), tiny.make_tokenizer(tools.CHAT_TEMPLATE))
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, plain: PlainRuns) -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        tiny.use_thread_workers(patch)
        stage = Stage(tmp_path_factory.mktemp("stage"), plain)
        yield stage
        stage.close()


@pytest.mark.parametrize("cell", RUN, ids=str)
def test_cell(cell: Cell, stage: Stage, plain: PlainRuns) -> None:
    """Answers are right in every run. Which requests meet may depend on the threads that compile grammars."""
    for _ in range(MEETINGS):
        seen = _run(cell, stage, plain)
        idle = [feature.name for feature in cell.features if not feature.evidence(seen)]
        if not idle or not seen.params.is_constrained:
            break
    assert not idle, "nothing shows that these were at work"


def _run(cell: Cell, stage: Stage, plain: PlainRuns) -> Seen:
    """What is seen of a run. Raises AssertionError if an answer differs from the plain run's."""
    work = Work(cell, plain)
    assert len(work.prompt) == PROMPT_LENGTH
    outcome = stage.run(cell, work)
    expected = [work.plain_answer(ask) for ask in work.asks]
    for index, (got, wanted) in enumerate(zip(outcome.answers, expected, strict=True)):
        assert not differences(got, wanted), f"choice {index}"
    for name, got in outcome.others.items():
        assert not differences(got, work.plain_answer(work.script.others[name])), name
    return Seen(
        answers=outcome.answers,
        params=work.params,
        plain=expected[0],
        plain_without=work.plain_without,
        plain_with=work.plain_with,
        guessed=lambda: work.guessed({**dict(zip(outcome.request_ids, work.asks, strict=True)), **work.script.others}),
        request_ids=outcome.request_ids,
        others=outcome.others,
        steps=outcome.steps,
        num_aborted=outcome.num_aborted,
    )


@pytest.mark.parametrize("cell", REPRODUCIBLE, ids=str)
def test_the_plain_run_is_what_transformers_and_numpy_give(cell: Cell, plain: PlainRuns) -> None:
    work = Work(cell, plain)
    [ask] = work.asks
    checkpoint = plain.checkpoint(cell.model)
    ends = frozenset(checkpoint.model.generation_config.eos_token_id)
    assert not differences(replace(work.plain_answer(ask), text=None), reference_answer(checkpoint.model, ask, ends))


def test_features_are_declared_once_and_name_each_other_rightly() -> None:
    names = [feature.name for feature in FEATURES]
    assert len(set(names)) == len({feature.short for feature in FEATURES}) == len(FEATURES)
    assert {name for feature in FEATURES for name in feature.senseless} <= set(names)


def test_two_features_cannot_say_different_things_of_one_setting() -> None:
    by_name = {feature.name: feature for feature in FEATURES}
    with pytest.raises(ValueError, match="two features disagree about page_size: 1 and 16"):
        Cell(by_name["pages of 1"], by_name["pages of 16"]).settings  # noqa: B018  # is computed when it is asked for


def test_the_page_is_that_of_the_declared_features() -> None:
    assert page.PATH.read_text(encoding="utf-8") == page.updated(page.PATH.read_text(encoding="utf-8"))


if __name__ == "__main__":
    page.PATH.write_text(page.updated(page.PATH.read_text(encoding="utf-8")), encoding="utf-8")
