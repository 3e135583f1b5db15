"""Brings the course into the site: its pages lie beside docs/, quote the engine by symbol, and link as on GitHub."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the pages quote this checkout, not an installed package

from mini_sglang.learn import quotes  # noqa: E402
from mini_sglang.learn.lesson import Lesson, all_lessons  # noqa: E402

_LINK_TO_DOCS = re.compile(r"\]\(\.\./\.\./docs/")
_LINK_TO_COURSE = re.compile(r"\]\(\.\./course/")
_LINK_TO_SOURCE = re.compile(r"\[([^\]]*)\]\(\.\./mini_sglang/[^)]*\)")
_LINK_OUT = re.compile(r"\[([^\]]*)\]\(\.\./\.\./(?!docs/)[^)]*\)")


def on_config(config: Any) -> Any:
    """One entry of the navigation per lesson."""
    lessons = [{f"{lesson.id} · {lesson.title}": _page(lesson)} for lesson in all_lessons()]
    config.nav.append({"Course": lessons})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Every lesson's page and figures become files of the site."""
    from mkdocs.structure.files import File

    for lesson in all_lessons():
        for path in sorted([*lesson.folder.glob("*.md"), *lesson.folder.glob("*.svg")]):
            files.append(File.generated(config, f"course/{lesson.folder.name}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Quotes become source. Links between docs/ and course/ stay in the site; what it lacks is named only."""
    if not page.file.src_uri.startswith("course/"):
        return _LINK_TO_SOURCE.sub(r"`\1`", _LINK_TO_COURSE.sub("](course/", markdown))
    text = quotes.expand(markdown)
    return _LINK_OUT.sub(r"\1", _LINK_TO_DOCS.sub("](../../", text))


def _page(lesson: Lesson) -> str:
    return f"course/{lesson.folder.name}/lesson.md"
