"""`mini-sglang bench explain`: figures of a log whose every microsecond is known, and its drawing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mini_sglang.bench.explain import figures
from mini_sglang.bench.step_history import History
from mini_sglang.bench.timeline import draw
from mini_sglang.cli import main
from mini_sglang.observability.step_log import Arrived, Chunk, Ended, Header, Line, Step, StepLog
from mini_sglang.outputs import FinishReason

CONFIG = {"model": "small", "device": "cpu", "num_pages": 10}
SVG = "{http://www.w3.org/2000/svg}"


def step(number: int, at_us: int, **fields: Any) -> Step:
    """One of 1,000 µs, 700 of them in launch."""
    host = {"schedule": 100, "launch": 700, "wait": 50, "update": 150}
    return Step(step=number, at_us=at_us, read_us=at_us + 1000, host_us=host, **fields)


LINES: list[Line] = [
    Header(began=0.0, config=CONFIG),
    Arrived(at_us=1000, request_id="a", prompt_tokens=6),
    Arrived(at_us=1500, request_id="b<&", prompt_tokens=3),
    step(1, 2000, chunks=[Chunk("a", 2, 4, True)], admitted=["a"], tokens=4, used_pages=2, running=1, waiting=1),
    step(2, 3100, decodes=1, decode_ids=("a",), chunks=[Chunk("b<&", 0, 3, True)], admitted=["b<&"], tokens=4),
    step(3, 4200, decodes=2, decode_ids=("a", "b<&"), tokens=2, used_pages=9),
    step(4, 5300, decodes=1, decode_ids=("a",), tokens=1, preempted=["b<&"]),
    Ended(at_us=6350, request_id="a", reason=FinishReason.LENGTH),
    step(5, 6400, decode_ids=(), chunks=[Chunk("b<&", 0, 5, True)], admitted=["b<&"], tokens=5),
    Ended(at_us=7500, request_id="b<&", reason=FinishReason.ABORT),
    Arrived(at_us=9500, request_id="a", prompt_tokens=1),
    step(6, 9600, chunks=[Chunk("a", 0, 1, True)], admitted=["a"], tokens=1),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    log = StepLog(str(path))
    for line in LINES:
        log.write(line)
    log.close()
    return path


def test_every_microsecond_has_its_place(path: Path) -> None:
    places = figures(History(path))["place_s"]
    in_phases = {"schedule": 0.0006, "launch": 0.0042, "wait": 0.0003, "update": 0.0009}
    assert places == pytest.approx({**in_phases, "between steps": 0.0016, "no request": 0.002})
    assert sum(places.values()) == pytest.approx(0.0096)


def test_requests_are_told_apart_by_their_lives_and_not_their_ids(path: Path) -> None:
    history = History(path)
    first, other, second = history.lives
    assert (first.request_id, second.request_id) == ("a", "a")
    assert (first.cached_tokens, first.tokens, first.reason) == (2, 4, "length")
    assert (first.started_us, first.first_token_us, first.last_token_us) == (2000, 3000, 6300)
    assert [(span.kind, span.tokens) for span in first.spans] == [("prompt", 4), ("decode", 3)]
    assert [span.kind for span in other.spans] == ["prompt", "decode", "again"]
    assert (other.preempted_us, other.tokens, other.reason) == ([5300], 3, "abort")
    assert (second.tokens, second.ended_us) == (1, None)
    got = figures(history)
    assert (got["tokens_generated"], got["cached_tokens"], got["preemptions"]) == (8, 2, 1)
    assert got["ended"] == {"length": 1, "abort": 1}
    assert got["requests_s"]["queue"]["most"] == pytest.approx(0.0016)
    assert got["requests_s"]["first token"]["p50"] == pytest.approx(0.002)
    assert got["requests_s"]["a token"]["mean"] == pytest.approx((3300 / 3 + 3300 / 2) / 2 / 1e6)
    assert {kind: of["steps"] for kind, of in got["kinds"].items()} == {
        "chunks only": 3, "decodes only": 2, "chunks and decodes": 1,
    }  # fmt: skip


def test_with_run_ahead_a_step_counts_from_when_the_one_before_was_read(path: Path) -> None:
    log = StepLog(str(path))
    log.write(LINES[0])
    log.write(Arrived(at_us=0, request_id="a", prompt_tokens=1))
    log.write(step(1, 100, chunks=[Chunk("a", 0, 1, True)]))
    log.write(step(2, 800, decodes=1, decode_ids=("a",)))
    log.close()
    assert [timed.duration_us for timed in History(path).steps] == [1000, 700]


@pytest.fixture
def drafted(path: Path) -> Path:
    """The same log with two steps that verify drafts of the last request, one that does not, and one that failed."""
    log = StepLog(str(path))
    for line in LINES:
        log.write(line)
    log.write(step(7, 10700, chunks=[Chunk("a", 1, 5, True, 4, 3)], tokens=5))
    log.write(step(8, 11800, chunks=[Chunk("a", 5, 3, True, 2, 0)], tokens=3))
    log.write(step(9, 12900, decodes=1, decode_ids=("a",), tokens=1))
    log.write(step(10, 14000, decode_ids=(), chunks=[Chunk("a", 7, 3, True, 2)], tokens=3, error="no"))
    log.write(Ended(at_us=15100, request_id="a", reason=FinishReason.ERROR))
    log.close()
    return path


def test_what_became_of_drafts_is_told_of_all_requests_and_of_each(drafted: Path) -> None:
    history = History(drafted)
    got = figures(history)
    assert got["drafts"] == {
        "drafted_tokens": 6, "accepted_tokens": 3, "acceptance_rate": 0.5, "requests": 1, "tokens_per_decode": 10 / 7,
    }  # fmt: skip
    last = history.lives[-1]
    assert (last.tokens, last.drafted, last.accepted, last.decode_steps) == (7, 6, 3, 3)
    assert [(span.kind, span.tokens) for span in last.spans] == [("prompt", 1), ("decode", 9)]
    assert got["kinds"]["decodes with drafts"]["steps"] == 3
    assert "a: error, 7 tokens, 3 of 6 drafted accepted" in draw(history)


def test_without_drafts_nothing_is_said_of_them(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures(History(path))["drafts"] is None
    assert main(["bench", "explain", str(path)]) == 0
    assert "draft" not in capsys.readouterr().out.lower()


def test_drafts_have_a_table_of_their_own(drafted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "explain", str(drafted)]) == 0
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if "50.0%" in line and "1.43" in line]
    assert row[1::2] == ["1", "6", "3", "50.0%", "1.43"]


def test_the_command_prints_tables_and_writes_figures_and_a_drawing(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, out = tmp_path / "line.svg", tmp_path / "figures.json"
    assert main(["bench", "explain", str(path), "--plot", str(plot), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    for text in ("Where 0.010 s went (6 steps)", "launch", "no request", "Requests (3)", "Slowest steps"):
        assert text in printed
    assert json.loads(out.read_text())["steps"] == 6
    texts = [element.text for element in ElementTree.parse(plot).iter(f"{SVG}text")]
    assert [text for text in texts if text in ("a", "b<&")] == ["a", "b<&", "a"]
    titles = [element.text or "" for element in ElementTree.parse(plot).iter(f"{SVG}title")]
    assert [title for title in titles if title.startswith("preempted")] == ["preempted for 1.1 ms"]
    assert "prompt chunk: 4 tokens, 1 ms" in titles
    assert "decode: 3 tokens, 3.2 ms" in titles


def test_the_drawing_shows_a_window_and_says_what_it_leaves_out(path: Path) -> None:
    history = History(path)
    part = draw(history, (0.006, None), max_lanes=1)
    assert "the first 1 of 2 requests" in part
    assert "decode: " not in part
    nan, inf = float("nan"), float("inf")
    for window in ((0.1, None), (0.002, 0.001), (-1.0, None), (inf, None), (nan, None), (0.0, nan), (0.0, -inf)):
        with pytest.raises(ValueError, match=r"window must lie between 0 and 0\.0096 s"):
            draw(history, window)
    assert draw(history, (0.0, inf)) == draw(history)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "No such file"),
        (b"", [], "it is empty"),
        (b'{"model": 1}\n', [], "is not a step log: line 1"),
        (b'{"kind":"header","began":0.0,"config":{}}\n', [], "holds no step"),
        (b"", ["--plot", "line.png"], "--plot must name an .svg file"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, arguments: list[str], message: str
) -> None:
    path = tmp_path / "log"
    if content is not None:
        path.write_bytes(content)
    assert main(["bench", "explain", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
