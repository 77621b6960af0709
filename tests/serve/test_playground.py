"""The page at / in a real browser.  Skipped where there is none: it needs playwright and Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from served import Served

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
PROMPT = "one two three one two three one two"
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as library:
        running = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Any, adaptive: Served) -> Iterator[Any]:
    """The page with its key.  Fails for errors in its console."""
    context = browser.new_context(viewport={"width": 390, "height": 800})
    context.add_init_script("sessionStorage.setItem('key', 'secret')")
    made = context.new_page()
    errors: list[str] = []
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("request", lambda r: errors.append(r.url) if not r.url.startswith(adaptive.url) else None)
    made.goto(adaptive.url)
    made.locator("#model option").first.wait_for(state="attached")
    made.select_option("#mode", "text")
    made.fill("#max_tokens", "40")
    made.fill("#seed", "3")
    yield made
    assert not errors
    context.close()


def ask(page: Any, prompt: str = PROMPT) -> None:
    """Type a prompt and wait until its answer has ended."""
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    page.locator(".facts").last.wait_for()
    page.locator("#stop").wait_for(state="hidden")


def test_tokens_have_the_color_of_their_origin_and_tell_alternatives(page: Any, adaptive: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "temperature": 0.7}
    expected = adaptive.post("/v1/completions", body, headers=KEY).json()["choices"][0]["text"]
    page.fill("#prediction", expected)
    ask(page)
    assert page.locator(".text").text_content() == expected
    assert {"model itself", "prediction"} <= set(page.locator("#legend span").all_text_contents())
    drafted = page.locator(".token[style]").first
    drafted.hover()
    details = page.locator("#details").text_content()
    assert re.match(r"Drafted by \w+, token \d+ of its draft", details) and details.count("%") >= 5
    at = int(drafted.get_attribute("data-at"))
    page.locator(".text").focus()
    page.keyboard.press("ArrowRight")
    assert int(page.locator(".token.selected").get_attribute("data-at")) > at
    assert page.locator("#charts svg").count() == 3
    assert "L" in page.locator("#charts path.first").first.get_attribute("d")
    assert page.locator("#tree g.accepted").count() >= 2
    assert "accepted" in page.locator("#tree svg").get_attribute("aria-label")


def test_a_race_gives_the_same_text_twice(page: Any) -> None:
    page.check("#race")
    ask(page)
    fast, plain = page.locator(".text").all_text_contents()
    assert fast == plain and fast
    assert "The same text" in page.locator("#conversation > .facts").text_content()
    assert "1.00 tokens per step" in page.locator(".run .facts").nth(1).text_content()


def test_a_conversation_is_kept_and_constrained(page: Any) -> None:
    page.select_option("#mode", "chat")
    page.fill("#schema", '{"enum": ["yes", "no"]}')
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
    ask(page, "Is it?")
    ask(page, "Sure?")
    assert set(page.locator(".text").all_text_contents()) <= {'"yes"', '"no"'}
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
    page.fill("#schema", "{no json")
    page.fill("#prompt", "Really?")
    page.press("#prompt", "Enter")
    assert "no JSON" in page.locator("#failure").text_content()
    assert page.locator("#schema").get_attribute("aria-invalid") == "true"


def test_escape_stops_an_answer(page: Any) -> None:
    page.fill("#max_tokens", "400")
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Enter")
    page.locator(".token").first.wait_for()
    page.keyboard.press("Escape")
    page.locator("#stop").wait_for(state="hidden")
    assert page.locator("#failure").text_content() == ""


def test_the_page_asks_for_the_key_itself(browser: Any, adaptive: Served) -> None:
    """A wrong one is named, the right one is kept while the tab is open, and sent to the server only."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(adaptive.url)
    for key in ("wrong", "secret"):
        page.locator("#door[open]").wait_for()
        page.fill("#key", key)
        page.press("#key", "Enter")
        if key == "wrong":
            page.locator("#wrong-key:not(:empty)").wait_for()
    page.locator("#model option").first.wait_for(state="attached")
    page.locator("#door").wait_for(state="hidden")
    page.reload()
    page.locator("#model option").first.wait_for(state="attached")
    assert page.locator("#door[open]").count() == 0
    assert page.evaluate("localStorage.length") == 0 and not context.cookies()
    context.close()


def test_the_page_fits_a_phone(page: Any) -> None:
    assert page.input_value("#prompt") == ""
    ask(page)
    boxes = [box.bounding_box() for box in page.locator(".card, .talk, header").all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)
    unnamed = "input:not([aria-label]), select, textarea"
    assert all(field.evaluate("field => field.labels.length > 0") for field in page.locator(unnamed).all())
