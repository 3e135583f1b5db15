"""The playground in a real browser, against the scripted engine: what a person does with it, and what they see.

Needs Playwright and a Chromium of the machine's own or Playwright's.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from mini_sglang.text.tokenizer import Tokenizer
from tests.server.conftest import ScriptedEngine

playwright = pytest.importorskip("playwright.sync_api", reason="drives a browser with Playwright")
expect = playwright.expect

ANSWER = "Hello there, dear friend."
END = "<|endoftext|>"  # the end token, shown small
PHONE = {"width": 360, "height": 740}


@pytest.fixture
def serve_app() -> Iterator[Callable[[FastAPI], str]]:
    """`serve_app(app)` → the URL at which it is served, in a thread."""
    running = []

    def serve(app: FastAPI) -> str:
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.005)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"

    yield serve
    for server, thread in running:
        server.should_exit = server.force_exit = True
        thread.join(10)


@pytest.fixture
def open_page(browser: Any, serve_app: Callable[[FastAPI], str]) -> Iterator[Callable[..., Any]]:
    """`open_page(app, **options of the browser's context)`; whatever goes wrong in the page fails the test."""
    contexts, faults = [], []

    def open_page(app: FastAPI, path: str = "", **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        url = serve_app(app)
        page.on("request", lambda request: faults.append(request.url) if not request.url.startswith(url) else None)
        page.goto(url + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def ask(page: Any, text: str = "Hi there") -> None:
    page.get_by_role("textbox", name="Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Any) -> Any:
    return page.locator(".answer > .text")


def figure(page: Any, name: str) -> str:
    return str(page.locator(f".stats div:has(dt:text-is('{name}')) dd").last.inner_text())


def test_a_chat_streams_and_shows_its_figures(
    open_page: Callable[..., Any], make_app: Callable[..., FastAPI], engine: ScriptedEngine
) -> None:
    page = open_page(make_app())
    expect(page.get_by_role("heading", name="Talk to scripted")).to_be_visible()
    ask(page)
    expect(page.locator(".question .text")).to_have_text("Hi there")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    expect(answers(page)).to_have_text(f"{ANSWER}{END}")
    assert re.fullmatch(r"\d+ ms", figure(page, "TTFT"))
    assert float(figure(page, "tokens/s")) > 0
    assert figure(page, "tokens") == str(len(engine.tokens))
    assert figure(page, "prompt") == str(len(engine.calls[0].prompt_ids))
    assert figure(page, "cached") == "0"
    assert figure(page, "ended by") == "stop"
    expect(page.get_by_role("status")).to_have_text(f"Answer ended (stop), {len(engine.tokens)} tokens.")
    ask(page, "And now?")
    expect(answers(page)).to_have_count(2)
    expect(page.get_by_role("button", name="Retry")).to_have_count(1)
    assert ANSWER in engine.tokenizer.decode(engine.calls[1].prompt_ids)
    page.get_by_role("button", name="New chat").click()
    expect(answers(page)).to_have_count(0)


def test_settings_are_what_the_engine_is_asked_for(
    open_page: Callable[..., Any], make_app: Callable[..., FastAPI], engine: ScriptedEngine
) -> None:
    page = open_page(make_app(served_model_name=("one", "two")))
    page.get_by_label("Model").select_option("two")
    page.get_by_label("System message").fill("Be brief.")
    for label, value in (("Temperature", "0.3"), ("Top-p", "0.9"), ("Most tokens", "3"), ("Seed", "7")):
        page.get_by_label(label).fill(value)
    page.get_by_label("Log-probabilities").uncheck()
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page)
    body = json.loads(request.value.post_data)
    assert body["model"] == "two"
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    params = engine.calls[0].params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.3, 0.9, 3, 7)
    assert params.logprobs is None
    assert figure(page, "ended by") == "length"
    assert page.locator(".token").count() == 0


def test_each_token_tells_its_probability_to_pointer_and_keys(
    open_page: Callable[..., Any], make_app: Callable[..., FastAPI]
) -> None:
    page = open_page(make_app())
    ask(page)
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    card = page.get_by_role("tooltip")
    expect(card).to_be_hidden()
    tokens = page.locator(".token")
    tokens.nth(1).hover()
    expect(card).to_contain_text("␣there 60.7 %")
    expect(card).to_contain_text("log-probability -0.500")
    expect(card.get_by_role("listitem")).to_have_count(5)
    page.mouse.move(5, 5)
    expect(card).to_be_hidden()

    page.locator("#conversation").focus()
    page.keyboard.press("Tab")
    expect(tokens.nth(0)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tokens.nth(1)).to_have_accessible_description(re.compile("60.7 %"))
    page.keyboard.press("End")
    expect(card).to_contain_text(END)
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Retry")).to_be_focused()


@pytest.mark.parametrize("way", ["button", "key"])
def test_an_answer_can_be_stopped_and_tried_again(
    open_page: Callable[..., Any], make_app: Callable[..., FastAPI], engine: ScriptedEngine, way: str
) -> None:
    engine.pause_after = 3
    page = open_page(make_app())
    ask(page)
    expect(answers(page)).to_have_text("Hello there,")
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert figure(page, "ended by") == "stopped"
    expect(page.get_by_role("alert")).to_have_count(0)
    engine.pause_after = None
    page.get_by_role("button", name="Retry").click()
    expect(answers(page)).to_have_text(f"{ANSWER}{END}")
    expect(answers(page)).to_have_count(1)
    assert len(engine.left_early) == 1
    assert engine.calls[0].prompt_ids == engine.calls[1].prompt_ids


def test_errors_are_shown_and_can_be_tried_again(
    open_page: Callable[..., Any], make_app: Callable[..., FastAPI], engine: ScriptedEngine
) -> None:
    page = open_page(make_app())
    engine.fail_after = 2
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("The step failed.")
    expect(answers(page)).to_have_text("Hello there")
    engine.fail_after = None
    page.get_by_label("Temperature").fill("-1")
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("alert")).to_contain_text(re.compile("^Temperature must"))
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Retry").click()
    expect(answers(page)).to_have_text(f"{ANSWER}{END}")
    expect(page.get_by_role("alert")).to_have_count(0)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")


def test_a_key_is_asked_for(open_page: Callable[..., Any], make_app: Callable[..., FastAPI]) -> None:
    page = open_page(make_app(api_key=("key",)), viewport=PHONE)
    key = page.get_by_label("API key")
    expect(key).to_be_visible()  # the settings have been unfolded
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text("API key")
    key.fill("key")
    page.get_by_role("button", name="Retry").click()
    expect(answers(page)).to_have_text(f"{ANSWER}{END}")


def test_characters_of_several_tokens_and_markup_are_text(
    open_page: Callable[..., Any],
    make_app: Callable[..., FastAPI],
    engine: ScriptedEngine,
    builtin_tokenizer: Tokenizer,
) -> None:
    text = '🦩 <img src=x onerror="alert(1)"> ✓'
    engine.tokens = [*builtin_tokenizer.encode(text), engine.eos]
    page = open_page(make_app())
    ask(page, text)
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    expect(page.locator(".question .text")).to_have_text(text)
    expect(answers(page)).to_have_text(f"{text}{END}")
    assert page.locator(".text img").count() == 0
    page.locator(".token").first.hover()
    assert page.get_by_role("tooltip").locator("p.quiet").count() > 1  # one for each token of the character


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_either_scheme(
    open_page: Callable[..., Any], make_app: Callable[..., FastAPI], engine: ScriptedEngine, scheme: str
) -> None:
    engine.tokens = [*engine.tokenizer.encode("A-very-long-word" * 12), engine.eos]
    page = open_page(make_app(), viewport=PHONE, color_scheme=scheme, has_touch=True)
    ask(page, "w" * 200)
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    page.locator(".token").nth(20).tap()
    card = page.get_by_role("tooltip").bounding_box()
    assert card["x"] >= 0
    assert card["x"] + card["width"] <= PHONE["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.get_by_role("button", name="Send").bounding_box()["height"] >= 40
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 250, 248)"
    assert light == (scheme == "light")


def test_everything_that_can_be_used_has_a_name(
    open_page: Callable[..., Any], make_app: Callable[..., FastAPI]
) -> None:
    page = open_page(make_app())
    ask(page)
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    for control in page.locator("button:visible, input, select, textarea, a, summary").all():
        expect(control).to_have_accessible_name(re.compile(r"\w"))


@pytest.mark.parametrize("key", [(), ("key",)])
def test_the_description_can_be_read(
    open_page: Callable[..., Any], make_app: Callable[..., FastAPI], key: tuple[str, ...]
) -> None:
    page = open_page(make_app(api_key=key), "docs")
    if key:
        page.get_by_label("This server needs an API key").fill(*key)
        page.keyboard.press("Enter")
    page.get_by_text("/v1/chat/completions", exact=True).click()
    route = page.locator("details[open]")
    expect(route.get_by_role("row", name=re.compile("^messages"))).to_contain_text("required")
    expect(route.locator("pre").first).to_contain_text("Name three colours.")
