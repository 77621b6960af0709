"""The page at / in a real browser.  Skipped where there is none: it needs playwright and Chromium."""

from __future__ import annotations

import json
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
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True)
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


def sent_by(page: Any) -> list[Any]:
    """Bodies of the requests from now on."""
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    return bodies


def refuse(route: Any) -> None:
    error = {"message": "all places are taken", "type": "rate_limit_error", "param": None, "code": "429"}
    route.fulfill(status=429, json={"error": error})


def test_tokens_of_characters_with_two_code_units_keep_their_text(page: Any) -> None:
    tokens = [["ngram", 1, 1], [None, 0, 4], ["ngram", 1, 5]]
    told = {"tokens": tokens, "steps": 2, "drafted": 2, "tree": None}
    choice = {"index": 0, "text": "😀 hi🎉", "logprobs": None, "finish_reason": "stop", "outrider": told}
    events = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=events)
    )
    ask(page)
    assert page.locator(".token").all_text_contents() == ["😀", " hi", "🎉"]


def test_a_new_conversation_has_nothing_of_an_answer_that_streamed(page: Any) -> None:
    page.select_option("#mode", "chat")
    page.fill("#max_tokens", "400")
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Enter")
    page.locator(".token").first.wait_for()
    page.click("#clear")
    page.locator("#stop").wait_for(state="hidden")
    sent = sent_by(page)
    page.fill("#max_tokens", "5")
    ask(page, "Hello")
    assert [message["content"] for message in sent[0]["messages"]] == ["Hello"]


def test_a_refused_prompt_can_be_sent_again(page: Any) -> None:
    page.select_option("#mode", "chat")
    page.route("**/v1/chat/completions", refuse)
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    page.locator("#failure:not(:empty)").wait_for()
    assert page.input_value("#prompt") == "Hello" and page.locator(".mine, .run").count() == 0
    page.unroute("**/v1/chat/completions")
    sent = sent_by(page)
    ask(page, "Hello")
    assert [message["role"] for message in sent[0]["messages"]] == ["user"]


def test_a_race_ends_if_one_of_its_answers_is_refused(page: Any) -> None:
    def handle(route: Any) -> None:
        is_plain = not route.request.post_data_json["speculation"]["enabled"]
        (refuse if is_plain else type(route).continue_)(route)

    page.route("**/v1/completions", handle)
    page.check("#race")
    page.fill("#max_tokens", "400")
    page.fill("#prompt", PROMPT)
    with page.expect_event("requestfailed"):
        page.press("#prompt", "Enter")
    page.locator("#stop").wait_for(state="hidden")
    assert "places" in page.locator("#failure").text_content()


def test_a_tap_tells_of_a_token_until_the_next_one(page: Any) -> None:
    ask(page)
    page.locator(".token").nth(3).tap()
    assert page.locator("#details").is_visible()
    page.locator("#prompt").tap()
    assert page.locator("#details").is_hidden()


def test_the_end_of_an_answer_stays_in_sight_on_a_phone(page: Any) -> None:
    for _ in range(2):
        page.fill("#max_tokens", "200")
        ask(page)
        box = page.locator("#composer").bounding_box()
        assert box["y"] + box["height"] <= 801
    assert page.evaluate("scrollY") > 0, "the answers are too short for this test"


def test_the_page_fits_the_narrowest_screens(page: Any) -> None:
    """320 pixels wide, also with a long word, which WCAG asks for."""
    page.set_viewport_size({"width": 320, "height": 600})
    ask(page, "x" * 300)
    assert page.evaluate("document.documentElement.scrollWidth") == 320


CONTRAST = """async (page) => {
  const { markOf } = await import(new URL("static/colors.js", page));
  const canvas = document.createElement("canvas").getContext("2d");
  const painted = (...colors) => {
    for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const card = document.querySelector(".talk");
  const { backgroundColor, color } = getComputedStyle(card);
  const mark = card.appendChild(document.createElement("i"));
  const found = [];
  for (let i = 0; i < 6; i++) {
    mark.style.backgroundColor = markOf(`drafter ${i}`, 8);
    const pair = [painted(color), painted(backgroundColor, getComputedStyle(mark).backgroundColor)];
    found.push(Math.max(...pair) / Math.min(...pair));
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_the_color_of_every_drafter(scheme: str, page: Any, adaptive: Served) -> None:
    """With the contrast that WCAG asks for."""
    page.emulate_media(color_scheme=scheme)
    contrasts = page.evaluate(CONTRAST, f"{adaptive.url}/")
    assert len(contrasts) == 6 and min(contrasts) > 4.5, contrasts
