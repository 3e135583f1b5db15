"""A learner's folder: README.md, the lesson's page, and the modules of the exercise at their paths below the package.

It also keeps what is remembered between commands, in `progress.json` beside the workspaces. It never overwrites work.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from mini_sglang.learn import quotes
from mini_sglang.learn.blanking import blank, blanks_in
from mini_sglang.learn.lesson import Lesson, module_path, module_source

COURSE = Path("mini-sglang-course")


class Progress(msgspec.Struct):
    """How far a learner is in one lesson."""

    started: bool = False
    checks_passed: int = 0  # in the last run
    checks: int = 0
    passed: bool = False  # ever
    hints: dict[str, int] = {}  # the highest level shown, by function


def default_folder(lesson: Lesson) -> Path:
    return COURSE / lesson.id


def lesson_arguments(lesson: Lesson, folder: Path, option: str = "") -> str:
    """The arguments of `learn check` or another command for this workspace: its folder too, unless it is the default.

    `option` is what the command wants in front of a folder.
    """
    return lesson.id if folder == default_folder(lesson) else f"{lesson.id} {option}{folder}"


def blanked_sources(lesson: Lesson) -> dict[str, str]:
    """The modules that a learner begins with, by name."""
    return {
        exercise.module: blank(module_source(exercise.module), exercise.functions, lesson.id)
        for exercise in lesson.exercises
    }


def start(lesson: Lesson, folder: Path) -> list[Path]:
    """Write a workspace and return its files. Raises FileExistsError if one of them exists."""
    page = quotes.expand((lesson.folder / "lesson.md").read_text(encoding="utf-8"))
    figure = (lesson.folder / "figure.svg").read_text(encoding="utf-8")
    texts = {folder / "README.md": readme(lesson, folder), folder / "lesson.md": page, folder / "figure.svg": figure}
    texts |= {folder / module_path(module): source for module, source in blanked_sources(lesson).items()}
    for path in texts:
        if path.exists():
            raise FileExistsError(f"{path} already exists: go on with it, remove it, or name another folder")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(texts)


def read_sources(lesson: Lesson, folder: Path) -> dict[str, str]:
    """The learner's modules, by name.

    Raises FileNotFoundError if one is missing, and ValueError if one is not valid Python.
    """
    sources = {}
    for exercise in lesson.exercises:
        path = folder / module_path(exercise.module)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: `mini-sglang learn start {lesson_arguments(lesson, folder)}` writes it; "
                "or name the folder that you have begun in"
            )
        sources[exercise.module] = path.read_text(encoding="utf-8")
        try:
            compile(sources[exercise.module], str(path), "exec")
        except SyntaxError as error:
            raise ValueError(f"{path}, line {error.lineno}: this is not Python yet: {error.msg}") from error
    return sources


def still_blank(lesson: Lesson, sources: dict[str, str]) -> list[str]:
    """The functions that the learner has not begun to write."""
    return [
        name
        for exercise in lesson.exercises
        for name in blanks_in(sources[exercise.module], exercise.functions, lesson.id)
    ]


def readme(lesson: Lesson, folder: Path) -> str:
    """The README of a workspace: the summary, what to write where, and how to go on."""
    what = "\n".join(
        f"- in `{module_path(exercise.module)}`: {', '.join(f'`{name}`' for name in exercise.functions)}"
        for exercise in lesson.exercises
    )
    read = f" See also {', '.join(lesson.read)}." if lesson.read else ""
    return f"""# {lesson.id} · {lesson.title}

**{lesson.question}**

{lesson.summary.strip()}

[lesson.md](lesson.md) is the lesson: idea, figure, design, pitfalls, questions.{read}

## Write

{what}

Each now raises NotImplementedError; its docstring says what it must do. All else in these files is the engine's own
code, and the checks run the real engine with your files in place of its own.

## Go on

    mini-sglang learn check {lesson_arguments(lesson, folder)}
    mini-sglang learn hint {lesson_arguments(lesson, folder, "--folder ")}        (help, a little more each time)
    mini-sglang learn solution {lesson_arguments(lesson, folder)}    (the way to the engine's own code, as a diff)
    mini-sglang learn play {lesson.id}        (watch it move)
"""


# -- progress -------------------------------------------------------------------------------------------------------


def load_progress(course: Path) -> dict[str, Progress]:
    """The progress by lesson id; empty if nothing was begun. Raises ValueError if the file cannot be read."""
    path = course / "progress.json"
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Progress])
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): remove it to begin anew, your work stays") from error


def save_progress(course: Path, lesson: Lesson, progress: Progress) -> None:
    known = {**load_progress(course), lesson.id: progress}
    course.mkdir(parents=True, exist_ok=True)
    (course / "progress.json").write_bytes(msgspec.json.format(msgspec.json.encode(known)) + b"\n")
