"""The commands as a learner meets them: workspace, report in the lesson's terms, help, progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mini_sglang.cli import main
from mini_sglang.learn.contract import TOKEN_IDS
from mini_sglang.learn.lesson import Lesson, find_lesson, load_lesson, module_source
from mini_sglang.learn.running import run_checks

ALLOCATOR = "mini_sglang.scheduling.page_allocator"
Learn = Callable[..., str]


@pytest.fixture
def learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Learn:
    """`learn("start", "L2")` in an empty folder → what was printed, on wide paper."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*words: str, status: int = 0) -> str:
        assert main(["learn", *words]) == status
        captured = capsys.readouterr()
        return captured.out + captured.err

    return run


@pytest.fixture
def small_lesson(tmp_path: Path) -> Lesson:
    """A lesson on one function, with checks that can be made to do anything."""
    folder = tmp_path / "L90_small"
    folder.mkdir()
    (folder / "lesson.toml").write_text(
        f'id = "L90"\ntitle = "t"\nquestion = "q"\nsummary = "s"\n[[exercise]]\nmodule = "{ALLOCATOR}"\n'
        'functions = ["PageAllocator.count"]\n'
    )
    return load_lesson(folder)


def test_start_writes_the_modules_without_the_bodies_and_never_over_work(learn: Learn) -> None:
    said = learn("start", "l2")
    module = Path("mini-sglang-course/L2/scheduling/page_allocator.py")
    assert str(module) in said
    assert 'NotImplementedError("L2: write PageAllocator.release")' in module.read_text()
    assert "def check(self" in module.read_text()
    page = Path("mini-sglang-course/L2/lesson.md").read_text()
    assert "class NewPages" in page
    module.write_text("# mine\n")
    assert "already exists" in learn("start", "L2", status=2)
    assert module.read_text() == "# mine\n"


def test_check_tells_what_is_wrong_in_the_learners_terms(learn: Learn) -> None:
    assert "learn check L2 mine" in learn("start", "L2", "mine")
    for module in (ALLOCATOR, "mini_sglang.scheduling.kv_cache", "mini_sglang.execution.request_table"):
        path = Path("mine") / Path(*module.split(".")[1:]).with_suffix(".py")
        path.write_text(module_source(module))
    path = Path("mine/scheduling/page_allocator.py")
    right = "                counts[page] = holders - 1\n"
    wrong = right + "                print('freeing', page)\n                free.append(page)\n"
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    said = learn("check", "L2", "mine", status=1)
    for words in (
        "✗ a page is free only when its last holder has let go",
        "free pages after one of two holders let go",
        "expected  2",
        "got       3",
        "broken    free pages have no holder",
        "freeing 0",
        "A common cause: Freed while someone still holds it (L2, pitfall freed-while-held).",
        "mine/lesson.md",
    ):
        assert words in said, said
    assert "mini-sglang-lesson-" not in said, "a path of the copy"


def test_check_names_what_is_still_to_be_written(learn: Learn) -> None:
    learn("start", "L2")
    said = learn("check", "L2", status=1)
    assert "needs a function that is not written yet: PageAllocator.allocate" in said
    assert "Still to write: PageAllocator.allocate, PageAllocator.retain" in said
    assert "0 of 23 checks" in learn("list")


def test_a_file_that_is_no_python_or_is_missing_is_one_line(learn: Learn) -> None:
    learn("start", "L2")
    module = Path("mini-sglang-course/L2/scheduling/kv_cache.py")
    module.write_text("def f(:\n")
    assert "kv_cache.py, line 1: this is not Python yet" in learn("check", "L2", status=2)
    module.unlink()
    assert "kv_cache.py is missing" in learn("check", "L2", status=2)


def test_hints_say_more_each_time(learn: Learn) -> None:
    learn("start", "L2")
    levels = {hint.function: hint.levels for hint in find_lesson("L2").hints}
    shown = [learn("hint", "L2") for _ in range(4)]
    for number, said in zip((1, 2, 3, 3), shown, strict=True):
        assert f"PageAllocator.allocate  hint {number} of 3" in said
        assert levels["PageAllocator.allocate"][number - 1][:60] in said
    assert "KVCacheManager.admit  hint 3 of 3" in learn("hint", "L2", "admit", "--level", "3")
    assert "not one of the functions to write" in learn("hint", "L2", "nothing", status=2)


def test_the_solution_is_a_diff_that_patch_understands(learn: Learn) -> None:
    learn("start", "L2")
    said = learn("solution", "L2")
    assert "--- mini-sglang-course/L2/scheduling/page_allocator.py" in said
    assert '-        raise NotImplementedError("L2: write PageAllocator.allocate")' in said
    assert "+        del self._free[-count:]" in said


def test_a_lesson_that_does_not_exist_is_an_error_that_lists_those_that_do(learn: Learn) -> None:
    assert "there is no lesson 'L99'; there are L" in learn("start", "L99", status=2)


def test_an_exception_of_the_learners_code_is_reported_with_its_line(small_lesson: Lesson) -> None:
    (small_lesson.folder / "check.py").write_text(
        f"from {ALLOCATOR} import PageAllocator\n\ndef test_counts() -> None:\n    PageAllocator(1).count(0)\n"
    )
    source = module_source(ALLOCATOR).replace("return self._counts[page_id]", "return self._cuonts[page_id]")
    failed = run_checks(small_lesson, {ALLOCATOR: source}, contract=False).first_failure
    assert failed is not None
    assert failed.failure is not None
    assert failed.failure.kind == "AttributeError"
    frame = failed.failure.frames[-1]
    assert (frame.path, frame.function) == ("scheduling/page_allocator.py", "count")
    assert "_cuonts" in source.splitlines()[frame.line - 1]


def test_checks_that_hang_are_stopped_and_named(small_lesson: Lesson) -> None:
    (small_lesson.folder / "check.py").write_text(
        "import time\n\ndef test_one() -> None: ...\n\ndef test_that_hangs() -> None:\n    time.sleep(60)\n"
    )
    report = run_checks(small_lesson, {}, contract=False, limit_s=4)
    assert [result.name for result in report.results] == ["one"]
    assert (report.unfinished, report.passed) == ("that hangs", False)
    assert "not done after 4 s" in report.cut_short


def test_checks_that_die_are_named_and_those_that_cannot_be_loaded_say_why(small_lesson: Lesson) -> None:
    check = small_lesson.folder / "check.py"
    check.write_text("import os\n\ndef test_dies() -> None:\n    os.kill(os.getpid(), 9)\n")
    report = run_checks(small_lesson, {}, contract=False)
    assert (report.unfinished, report.cut_short) == ("dies", "the checks' process died of signal 9")
    check.write_text("import no_such_thing\n")
    failed = run_checks(small_lesson, {}, contract=False).first_failure
    assert failed is not None
    assert failed.failure is not None
    assert "no_such_thing" in failed.failure.message


def test_the_contract_is_what_was_recorded_of_transformers() -> None:
    recorded = json.loads((Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text())
    assert recorded["cases"][0]["output_ids_generate"] == TOKEN_IDS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('id = "L90"|id = "L91"', "id is 'L91', but the folder is L90_small"),
        ('title = "t"|titel = "t"', "titel"),
        ('functions = ["PageAllocator.count"]|functions = 3', "Expected `array`"),
        ('summary = "s"|summary =', "lesson.toml"),
    ],
)
def test_a_lesson_toml_with_a_mistake_names_it(small_lesson: Lesson, change: str, message: str) -> None:
    path = small_lesson.folder / "lesson.toml"
    old, new = change.split("|")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        load_lesson(small_lesson.folder)
