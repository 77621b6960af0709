"""Streamed text equals the text decoded at once, and a character never comes in halves."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.checkpoints.hub import Checkpoint
from outrider.engine.detokenizer import Detokenizer, find_stop

TEXTS = [
    "Once upon a time, there was a little girl.",
    "Grüße aus Köln: äöüÄÖÜß, œuvre, ñandú, Ελληνικά, русский",
    "emoji 😀😃 👩‍👩‍👧‍👦 flags 🇩🇪🇫🇷 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "日本語のテキスト、中文文本，한국어",
    "    indented\n\n\tcode = {1: 'x'}  # twice  spaced ",
    " ",
    "😀",
]


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    return Checkpoint.open("builtin").tokenizer


def stream(ids: list[int]) -> tuple[Detokenizer, list[str]]:
    made = Detokenizer(tokenizer())
    pieces = [made.feed(token) for token in ids]
    pieces.append(made.flush())
    return made, pieces


def assert_streams(text: str) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False)
    made, pieces = stream(ids)
    whole = tokenizer().decode(ids, skip_special_tokens=True)
    assert whole == text, "the built-in tokenizer loses nothing"
    assert "".join(pieces) == made.text == whole
    assert not any("\ufffd" in piece for piece in pieces), "half a character came out"


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text(text: str) -> None:
    assert_streams(text)


@settings(max_examples=60, deadline=None)
@given(
    st.text(
        st.characters(exclude_categories=("Cs", "Cn", "Co"), exclude_characters="\ufffd"),
        min_size=1,
        max_size=30,
    )
)
def test_streamed_text_equals_the_final_text(text: str) -> None:
    if (
        tokenizer().decode(tokenizer().encode(text, add_special_tokens=False)) == text
    ):  # no special token spelt out
        assert_streams(text)


def test_a_character_of_several_tokens_is_held_back_until_it_is_whole() -> None:
    ids = tokenizer().encode("😀", add_special_tokens=False)
    assert len(ids) >= 3
    made = Detokenizer(tokenizer())
    pieces = [made.feed(token) for token in ids]
    assert "".join(pieces[:-1]).strip() == ""
    assert pieces[-1].endswith("😀")


def test_flush_shows_what_never_became_a_character() -> None:
    ids = tokenizer().encode("a😀", add_special_tokens=False)[:-1]
    made, pieces = stream(ids)
    assert made.text.startswith("a") and "\ufffd" in pieces[-1]
    assert made.flush() == ""


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 5), max_size=30), st.booleans())
def test_tokens_that_are_decoded_at_once_give_the_same_text(text: str, sizes: list[int], cut: bool) -> None:
    """Behind every group, what a token at a time gives: no text is held back longer."""
    ids = [0, *tokenizer().encode(text, add_special_tokens=False), 1, *tokenizer().encode("é!")]
    ids = ids[: len(ids) - cut]
    single, grouped, at = Detokenizer(tokenizer()), Detokenizer(tokenizer()), 0
    for size in [*sizes, len(ids)]:
        for token in ids[at : at + size]:
            single.feed(token)
        grouped.feed_all(ids[at : at + size])
        at += size
        assert (grouped.text, grouped.count) == (single.text, single.count)
    assert grouped.flush() == single.flush() and grouped.text == single.text


def test_special_tokens_are_no_text() -> None:
    ids = tokenizer().encode("hi", add_special_tokens=False)
    made, _ = stream([0, *ids, 1])
    assert made.text == "hi"


@given(
    st.text("ab", max_size=12),
    st.text("ab", min_size=1, max_size=6),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_find_stop_finds_the_first_that_the_new_characters_complete(
    old: str, new: str, stops: list[str]
) -> None:
    text = old + new
    found = find_stop(text, len(new), stops)
    ends = [
        (at, stop)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > len(old)
    ]
    assert found == min(ends, default=None)


def test_find_stop_looks_back_over_the_border() -> None:
    assert find_stop("one STOP", 2, ["STOP", "x"]) == (4, "STOP")
    assert find_stop("one STO", 2, ["STOP"]) is None
    assert find_stop("STOP and on", 2, ["STOP"]) is None, "an old stop string was judged when it was new"
