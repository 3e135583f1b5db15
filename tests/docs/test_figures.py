"""The interactive figures, in a real browser: they decide what the engine decides, and can be reached by every reader.

Needs MkDocs Material, Playwright and a Chromium of the machine's own or Playwright's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.figures import recordings

REPLAY = (Path(__file__).parent / "replay.js").read_text(encoding="utf-8").replace("export function", "function")
TOUR, SCHEDULER, RADIX = "course/L0_tour/lesson/", "course/L5_scheduler/lesson/", "course/L8_radix_cache/lesson/"
PHONE = {"width": 360, "height": 740}

OpenPage = Callable[..., Any]


def replay(page: Any, function: str, scenarios: list[Any]) -> Any:
    """What the site's modules do with each scenario, as replay.js describes it."""
    script = f"""async (text) => {{
        const load = (name) => import(new URL(`/figures/${{name}}.js`, location).href);
        const modules = {{ ...(await load("kv_cache")), ...(await load("scheduler")) }};
        {REPLAY}
        return JSON.stringify(JSON.parse(text).map((scenario) => {function}(scenario, modules)));
    }}"""
    return json.loads(page.evaluate(script, json.dumps(scenarios)))


def assert_equal_steps(found: list[Any], expected: list[Any], scenario: Any) -> None:
    for step, (mine, engines) in enumerate(zip(found, expected, strict=True)):
        for name, value in engines.items():
            assert mine[name] == value, f"step {step}: {name}\n{json.dumps(scenario)}"


def test_the_figures_scheduler_decides_as_the_engines(open_page: OpenPage) -> None:
    scenarios = [recordings.random_schedule(seed) for seed in range(40)]
    recorded = [recordings.record_schedule(scenario) for scenario in scenarios]
    steps = [step for recording in recorded for step in recording]
    assert all(any(step[what] for step in steps) for what in ("preempted", "copies", "waiting", "cached"))
    for found, expected, scenario in zip(
        replay(open_page(SCHEDULER), "replaySchedule", scenarios), recorded, scenarios, strict=True
    ):
        assert_equal_steps(found, expected, scenario)


def test_the_figures_tree_grows_and_shrinks_as_the_engines(open_page: OpenPage) -> None:
    scenarios = [recordings.random_cache(seed) for seed in range(40)]
    recorded = [recordings.record_cache(scenario) for scenario in scenarios]
    assert not all(step["admitted"] for recording in recorded for step in recording)
    for found, expected, scenario in zip(
        replay(open_page(RADIX), "replayCache", scenarios), recorded, scenarios, strict=True
    ):
        assert_equal_steps(found, expected, scenario)


def computed_in(step: Any, name: str) -> str:
    """How many tokens of a request a recorded step computes; nothing if none."""
    counts = {name: count for name, _start, count, _samples in step["rows"]}
    return str(counts.get(name, ""))


@pytest.mark.parametrize("scene", range(4))
def test_every_scene_shows_the_real_schedule(open_page: OpenPage, scene: int) -> None:
    page = open_page(SCHEDULER)
    page.locator("[data-setting=scene]").select_option(str(scene))
    preset = page.evaluate(
        """async (scene) => {
            const { PRESETS, requestOf } = await import(new URL("/figures/batch.js", location).href);
            const preset = PRESETS[scene];
            const arrivals = Object.keys(preset.cards).map((name, step) => ({ ...requestOf(preset, name), step }));
            return { ...preset, arrivals };
        }""",
        scene,
    )
    recorded = recordings.record_schedule({**preset, "pageSize": 4, "slots": 8})
    for arrival in preset["arrivals"]:
        page.locator(f"button[data-request={arrival['name']}]").click()
        page.locator("[data-act=next]").click()
    while page.locator("[data-act=next]").is_enabled():
        page.locator("[data-act=next]").click()
    for arrival in preset["arrivals"]:
        name = arrival["name"]
        shown = page.locator(f".fig-lines tr[data-request={name}] td").all_inner_texts()
        assert [text.strip("·×■") for text in shown] == [computed_in(step, name) for step in recorded]


def test_a_request_is_dragged_into_the_batch(open_page: OpenPage) -> None:
    page = open_page(SCHEDULER)
    page.locator("button[data-request=B]").drag_to(page.locator(".fig-drop"))
    assert page.locator(".fig-drop").inner_text() == "B"
    assert page.locator("button[data-request=B]").is_disabled()


def test_the_batch_is_made_with_the_keyboard_alone(open_page: OpenPage) -> None:
    page = open_page(SCHEDULER)
    page.locator("button[data-request=A]").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")  # the focus is on the next request
    assert page.locator(".fig-drop").inner_text().split() == ["A", "B"]
    page.keyboard.press("ArrowRight")
    assert "A computes tokens 0 to 4" in page.locator(".fig-story").inner_text()
    page.keyboard.press("Home")
    assert page.locator(".fig-lines").count() == 0


def test_what_can_never_fit_is_refused_with_the_limit(open_page: OpenPage) -> None:
    page = open_page(SCHEDULER)
    page.locator("[data-setting=scene]").select_option(label="A long prompt")
    page.locator("[data-setting=numPages]").select_option("6")
    page.locator("button[data-request=B]").click()
    assert "B has 60 prompt tokens, the pool holds 24" in page.locator(".fig-story").inner_text()


def test_the_tree_is_seen_to_match_split_lock_and_evict(open_page: OpenPage) -> None:
    page = open_page(RADIX, reduced_motion="reduce")
    act, story = page.locator(".fig-act"), page.locator(".fig-story")
    step, back = page.locator("[data-act=next]"), page.locator("[data-act=back]")
    for name in "ABC":
        page.locator(f"button[data-request={name}]").click()
    assert act.inner_text() == "C · compute"
    back.click()
    assert act.inner_text() == "C · lock and split"
    back.click()
    assert act.inner_text() == "C · match"
    assert "9 are found: 2 whole pages (0 and 1), and 1 word of page 2, to copy." in story.inner_text()
    assert page.locator(".fig-run.is-matched").count() == 2
    step.click()
    step.click()
    page.locator("[data-leave=A]").click()
    assert page.locator(".fig-node", has_text="evictable").count()
    page.locator("button[data-request=E]").click()
    back.click()
    assert act.inner_text() == "E · evict"
    assert page.locator(".fig-page.is-evicted").count()


def test_a_prompt_of_ones_own_joins_the_tree(open_page: OpenPage) -> None:
    page = open_page(RADIX, reduced_motion="reduce")
    page.get_by_label("A prompt of your own").fill("one two three four five")
    page.keyboard.press("Enter")
    assert "one two three four" in page.locator(".fig-tree").inner_text()
    assert page.locator("[data-leave=F]").is_visible()


def test_the_tour_plays_pauses_and_steps_from_the_keyboard(open_page: OpenPage) -> None:
    page = open_page(TOUR)
    page.locator("[data-act=next]").focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    assert page.locator(".fig-act").inner_text().startswith("7 tell")
    assert page.locator(".fig-answer").inner_text() == "The capital of France is Paris"
    page.keyboard.press("ArrowLeft")
    assert page.locator("[aria-current=step]").inner_text().split() == ["6", "sample"]
    page.keyboard.press("k")
    assert page.locator("[data-act=play]").inner_text() == "Pause"
    page.keyboard.press("k")
    assert page.locator("[data-act=play]").inner_text() == "Play"


def test_nothing_moves_by_itself_for_who_prefers_stillness(open_page: OpenPage) -> None:
    page = open_page(TOUR, reduced_motion="reduce")
    packet = page.locator(".fig-packet")
    packet.wait_for(state="attached")
    assert packet.evaluate("packet => getComputedStyle(packet).transitionDuration") == "0s"
    page.goto(page.url.replace(TOUR, RADIX))
    page.locator("button[data-request=A]").click()
    assert page.locator("[data-act=play]").inner_text() == "Play"


@pytest.mark.parametrize("path", ["", TOUR, SCHEDULER, RADIX, "python/"])
def test_no_page_is_wider_than_a_phone(open_page: OpenPage, path: str) -> None:
    page = open_page(path, viewport=PHONE)
    if path in (TOUR, SCHEDULER, RADIX):
        page.locator(".is-live").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize("path", [TOUR, SCHEDULER, RADIX])
def test_every_control_of_a_figure_has_a_name(open_page: OpenPage, path: str) -> None:
    page = open_page(path)
    page.locator(".is-live").wait_for()
    unnamed = page.locator(".is-live :is(button, input, select)").evaluate_all(
        "controls => controls.filter((it) => !(it.innerText || it.ariaLabel || it.labels?.length)).length"
    )
    assert unnamed == 0
