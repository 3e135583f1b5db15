"""The site builds without warnings, its links hold, and it leads to everything that it is about."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import mini_sglang
from mini_sglang.learn.lesson import all_lessons


class _Page(HTMLParser):
    """What a page links to, loads, and can be linked to at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        self.targets += [found[name] for name in ("href", "src") if name in found]


def _pages(site: Path) -> dict[Path, _Page]:
    return {path: _Page(path) for path in site.rglob("*.html")}


def test_every_link_leads_to_a_page_and_an_anchor_that_exist(site: Path) -> None:
    pages = _pages(site)
    assert len(pages) > len(all_lessons())
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            base = site if path.name == "404.html" else path.parent  # that one is shown at any address
            wanted = (base / unquote(parts.path).lstrip("/" if path.name == "404.html" else "")).resolve()
            wanted = path if not parts.path else wanted / "index.html" if wanted.is_dir() else wanted
            if not wanted.is_file() or (
                parts.fragment and wanted in pages and unquote(parts.fragment) not in pages[wanted].anchors
            ):
                broken.append(f"{path.relative_to(site)} → {target}")
    assert not broken


def test_a_guide_read_in_the_repository_links_to_files_that_exist() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for path in docs.glob("*.md"):
        targets = [urlsplit(target) for target in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8"))]
        files = {target.path for target in targets if target.path and not target.scheme}
        made_by_the_build = {"python.md"}
        assert not [file for file in files - made_by_the_build if not (path.parent / file).is_file()]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = [path.read_text(encoding="utf-8").count('src="http') for path in site.rglob("*.html")]
    assert not any(loaded)


def test_the_landing_page_leads_to_course_guides_and_both_apis(site: Path) -> None:
    targets = _Page(site / "index.html").targets
    assert {"course/L0_tour/lesson/", "architecture/", "api/", "python/"} <= set(targets)
    assert {f"course/{lesson.folder.name}/lesson/" for lesson in all_lessons()} <= set(targets)


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = _Page(site / "python" / "index.html").anchors
    assert {name.lower() for name in mini_sglang.__all__ if name != "__version__"} <= anchors
    text = (site / "python" / "index.html").read_text(encoding="utf-8")
    assert "token budget of one step, decodes included" in text


def test_a_search_finds_a_pitfall_by_its_words(open_page: Callable[..., Any]) -> None:
    page = open_page("")
    page.get_by_role("textbox", name="Search").fill("evicted while a request reads it")
    page.locator(".md-search-result__link").filter(has_text="radix cache").first.wait_for()


def test_the_toggle_turns_the_light_off_and_reaches_the_figures(open_page: Callable[..., Any]) -> None:
    page = open_page("course/L5_scheduler/lesson/", color_scheme="light")
    button = page.locator("[data-act=next]")
    bright = button.evaluate("button => getComputedStyle(button).backgroundColor")
    page.locator("label[title=Dark]").click()
    assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
    assert button.evaluate("button => getComputedStyle(button).backgroundColor") != bright
