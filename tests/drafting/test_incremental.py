"""Bytes of tokens, and a text that grows in the tokens of a draft."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vocabularies import byte_level, letters, sentencepiece, tiny_words

from outrider.drafting.vocab.incremental import NEUTRAL, IncrementalTokens, TextCodec
from outrider.drafting.vocab.spelling import pieces

KINDS = pytest.mark.parametrize("kind", [byte_level, sentencepiece], ids=["byte_level", "sentencepiece"])
TEXT = "It was the best of times, it was the worst of times;\n\nthe  end is near  and so on. " * 6


class Shipped:
    """As much of a checkpoint as a language asks for."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer, self.name, self.ending, self.spec = tokenizer, "shipped", frozenset({1}), self
        self.vocabulary = size


def language(kind: Any, words: Any = None) -> TextCodec:
    words, merges = words or tiny_words()
    return TextCodec(Shipped(kind(words, merges), len(words)), "draft")  # type: ignore[arg-type]


@KINDS
def test_pieces_are_the_bytes_of_tokens(kind: Any) -> None:
    words, merges = tiny_words()
    assert (
        pieces(kind(words, merges), 310)
        == [b"" if isinstance(output, str) else output for output in words] + [b""] * 10
    )


@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_incremental_tokens_equal_those_of_the_whole_text(kind: Any, seed: int) -> None:
    """In bits of every size: at each of them the ids are those of the whole text so far, and a step looks at
    the end of it only.
    """
    rng, spoken = random.Random(seed), language(kind)
    reading, at, looked = IncrementalTokens(spoken, 6), 0, []
    tokens = spoken.tokens
    spoken.tokens = lambda text, *contexts: looked.append(len(text)) or tokens(text, *contexts)
    while at < len(TEXT):
        size = rng.choice([1, 2, 3, 9, 30])
        before, fixed = list(reading.ids), reading.fixed
        kept = reading.extend(TEXT[at : at + size].encode(), 1)
        at += size
        assert reading.ids == spoken.prefix + tokens(TEXT[:at])[0]
        assert reading.ids[:kept] == before[:kept] and kept >= fixed
        assert spoken.bytes(reading.ids).decode().strip() == TEXT[:at].strip()
    assert max(looked) < 120, "the window should not grow with the text"
    assert reading.fixed > 100


def test_what_was_computed_is_kept_up_to_the_first_difference() -> None:
    spoken = language(byte_level)
    reading = IncrementalTokens(spoken, 6)
    assert reading.extend(b"xt", 1) == 0
    assert reading.extend(b"h", 1) == 1, '"t" became "th"'
    assert reading.extend(b"h", 1) == 2
    assert reading.consumed == 3


def test_half_a_character_is_held_back() -> None:
    reading = IncrementalTokens(language(byte_level), 6)
    assert reading.extend(b"a\xc3", 2) == 0
    assert reading.within_character and reading.tail == "a"
    reading.extend(b"\x81", 1)
    assert not reading.within_character and reading.tail == "a\u00c1"


@KINDS
def test_tokens_behind_a_context(kind: Any) -> None:
    """A text from the middle of another gets no space put before it, and shares no token with what precedes
    it.
    """
    spoken = language(kind)

    def encoded(text: str, *contexts: str) -> bytes:
        ids, starts = spoken.tokens(text, *contexts)
        assert len(ids) == len(starts) and starts == sorted(starts)
        return spoken.bytes(ids)

    assert encoded("he end", "It is xt", NEUTRAL) == b"he end", '"th" would be a token of both'
    assert encoded(" is", "It", NEUTRAL) == b" is"
    assert encoded("xyz", "It", NEUTRAL) == b"xyz"
    assert encoded("xyz", NEUTRAL) == b"xyz"


def test_a_token_begins_with_its_space() -> None:
    """Llama 3's tokenizer trims the offsets that it gives out."""
    from tokenizers import processors

    tokenizer = byte_level(*tiny_words())
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert TextCodec(Shipped(tokenizer, 300), "draft").tokens("b a")[1] == [0, 1]  # type: ignore[arg-type]


def test_prefix_is_what_the_tokenizer_puts_before_a_text() -> None:
    assert language(byte_level).prefix == []
    assert language(sentencepiece, letters()).prefix == [0]
