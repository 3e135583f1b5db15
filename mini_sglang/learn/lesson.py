"""What a lesson is: its folder, its lesson.toml, and where in the package its modules are.

It reads and checks lessons; it runs nothing and knows nothing of learners. Lessons are found beside the package (in a
checkout) or in it (in an installed wheel).
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

PACKAGE = Path(__file__).parent.parent
LEVELS = 3  # of a hint: a question, the idea, almost the code
MIN_PITFALLS = 6


class Exercise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Functions of one module that the learner writes, by their dotted names in it."""

    module: str
    functions: list[str]


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Help with one function; each level says more than the one before."""

    function: str
    levels: list[str]


class Pitfall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wrong implementation that people really write: our module with `before` replaced by `after`."""

    name: str
    title: str
    module: str
    before: str
    after: str

    def apply(self, source: str) -> str:
        """The module's source with the mistake in it. Raises ValueError unless `before` occurs exactly once."""
        count = source.count(self.before)
        if count != 1:
            raise ValueError(f"pitfall {self.name}: its `before` occurs {count} times in {self.module}, not once")
        return source.replace(self.before, self.after)


class Lesson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a lesson.toml, and its folder."""

    folder: Path
    id: str
    title: str
    question: str
    summary: str
    exercises: list[Exercise] = msgspec.field(name="exercise")
    hints: list[Hint] = msgspec.field(name="hint", default_factory=list)
    pitfalls: list[Pitfall] = msgspec.field(name="pitfall", default_factory=list)
    read: list[str] = []  # further pages of the documentation that help

    @property
    def functions(self) -> list[str]:
        return [function for exercise in self.exercises for function in exercise.functions]

    def pitfall(self, name: str) -> Pitfall | None:
        return next((pitfall for pitfall in self.pitfalls if pitfall.name == name), None)


def course_folder() -> Path:
    """The folder of the lessons. Raises FileNotFoundError if this installation has none."""
    for folder in (PACKAGE / "course", PACKAGE.parent / "course"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no course beside or in {PACKAGE}: install mini_sglang from a wheel or a checkout")


def all_lessons() -> list[Lesson]:
    """Every lesson, in the order of the course."""
    return [load_lesson(folder) for folder in _lesson_folders().values()]


def find_lesson(name: str) -> Lesson:
    """The lesson with this id, in any case, or this folder name. Raises ValueError that lists all lessons."""
    folders = _lesson_folders()
    for lesson_id, folder in folders.items():
        if name.lower() in (folder.name.lower(), lesson_id.lower()):
            return load_lesson(folder)
    raise ValueError(f"there is no lesson {name!r}; there are {', '.join(folders)}")


def _lesson_folders() -> dict[str, Path]:
    """By id, in the order of the course."""
    folders = {path.parent.name.split("_")[0]: path.parent for path in course_folder().glob("L*_*/lesson.toml")}
    return dict(sorted(folders.items(), key=lambda item: int(item[0][1:])))


def load_lesson(folder: Path) -> Lesson:
    """Read a lesson's lesson.toml. Raises ValueError, naming the file, if something in it is missing or wrong."""
    path = folder / "lesson.toml"
    try:
        table = {**tomllib.loads(path.read_text(encoding="utf-8")), "folder": str(folder)}
        lesson: Lesson = msgspec.convert(table, Lesson, dec_hook=lambda kind, value: kind(value))  # a Path
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if lesson.id != folder.name.split("_")[0]:
        raise ValueError(f"{path}: id is {lesson.id!r}, but the folder is {folder.name}")
    for hint in lesson.hints:
        if hint.function not in lesson.functions or len(hint.levels) != LEVELS:
            raise ValueError(
                f"{path}: the hint for {hint.function} must name a function to write and have {LEVELS} levels"
            )
    names = [pitfall.name for pitfall in lesson.pitfalls]
    if len(set(names)) != len(names):
        raise ValueError(f"{path}: two pitfalls have the same name")
    return lesson


def module_path(module: str) -> Path:
    """A module's path below the package: mini_sglang.scheduling.batch → scheduling/batch.py"""
    parts = module.split(".")
    if parts[0] != PACKAGE.name or len(parts) < 2:
        raise ValueError(f"{module} is not a module of {PACKAGE.name}")
    return Path(*parts[1:]).with_suffix(".py")


def module_source(module: str) -> str:
    """The engine's own source of a module. Raises ValueError if there is no such module."""
    path = PACKAGE / module_path(module)
    if not path.is_file():
        raise ValueError(f"there is no module {module}")
    return path.read_text(encoding="utf-8")
