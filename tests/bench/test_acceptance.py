"""What became of drafts: read from pages of metrics, of one run and of several."""

from __future__ import annotations

import pytest

from mini_sglang.bench.acceptance import Acceptance
from mini_sglang.bench.draft_counters import read_drafts
from mini_sglang.scheduling.stats import DraftStats


def drafts(number: int, tokens: int, *accepted_at: int) -> DraftStats:
    return DraftStats(num_drafts=number, num_draft_tokens=tokens, num_accepted_at=list(accepted_at))


def page(stats: DraftStats, name: str, **labels: str) -> str:
    """As a server writes these counters, which vLLM labels by engine."""
    accepted = stats.num_accepted_at
    lines = []
    for counter, values in (
        ("num_drafts", [({}, stats.num_drafts)]),
        ("num_draft_tokens", [({}, stats.num_draft_tokens)]),
        ("num_accepted_tokens", [({}, stats.num_accepted_tokens)]),
        ("num_accepted_tokens_per_pos", [({"position": str(place)}, count) for place, count in enumerate(accepted)]),
    ):
        lines.append(f"# TYPE {name}:spec_decode_{counter}_total counter")
        for own, value in values:
            of = ",".join(f'{key}="{text}"' for key, text in {**labels, **own}.items())
            lines.append(f"{name}:spec_decode_{counter}_total{{{of}}} {float(value)}")
    return "\n".join([*lines, ""])


def test_a_page_of_metrics_is_read_back() -> None:
    stats = drafts(10, 40, 9, 6, 0)
    assert read_drafts(page(stats, "mini_sglang", model_name="a")) == stats
    assert read_drafts("# TYPE a counter\na_total 1\n") is None


def test_engines_of_one_server_count_together_and_a_second_name_does_not() -> None:
    engines = [page(drafts(2, 8, 2, 1), "vllm", engine=str(number)) for number in range(2)]
    assert read_drafts("".join(engines)) == drafts(4, 16, 4, 2)
    both = page(drafts(2, 8, 2, 1), "mini_sglang") + page(drafts(2, 8, 2, 1), "vllm")
    assert read_drafts(both) == drafts(2, 8, 2, 1)


def test_acceptance_is_that_of_the_drafts_since() -> None:
    found = Acceptance.between(drafts(10, 40, 9, 6), drafts(14, 56, 12, 7, 2))
    assert found == Acceptance(
        num_drafts=4, num_draft_tokens=16, num_accepted_at=[3, 1, 2],
        acceptance_rate=6 / 16, accepted_per_draft=6 / 4, acceptance_at=[3 / 4, 1 / 4, 2 / 4],
    )  # fmt: skip
    assert str(found) == "drafts: 4 of 16 tokens, 37.5% accepted, 1.50 a draft; by position 75% 25% 50%"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (drafts(4, 16, 3), drafts(4, 16, 3)),
        (drafts(4, 16, 3), drafts(1, 4, 1)),  # the server was restarted
        (None, drafts(4, 16, 3)),
        (drafts(4, 16, 3), None),
    ],
)
def test_without_drafts_there_is_no_acceptance(before: DraftStats | None, after: DraftStats | None) -> None:
    assert Acceptance.between(before, after) is None


def test_several_runs_count_by_their_drafts() -> None:
    nothing = drafts(0, 0)
    runs = [Acceptance.between(nothing, after) for after in (drafts(1, 2, 1, 1), drafts(3, 6, 0))]
    assert Acceptance.together([run for run in runs if run]) == Acceptance.between(nothing, drafts(4, 8, 1, 1))
