"""Words of the vocabulary in other forms: quoted, in brackets, joined by underscores, one a line.

A word with a blank before it and the same word behind a bracket or a quotation mark are different tokens,
often of different number: " Frank", and "F", "rank".  A model can copy a word from one form into another only
if it has seen both, and few words of short tasks occur in both.  These documents show all words that the
tokenizer knows, and random ones made of its pieces.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from . import prose

MOST_WORDS = 6  # of a document
MADE_SHARE = 0.3  # of the words that are made of random pieces
NAME_SHARE = 0.4  # of the words that are capitalized
BLANK = "Ġ"  # what byte-level BPE writes for a blank

FORMS: dict[str, Callable[[Sequence[str]], str]] = {
    "words": " ".join,
    "commas": ", ".join,
    "csv": ",".join,
    "lines": "\n".join,
    "bullets": lambda words: "\n".join(f"- {word}" for word in words),
    "numbers": lambda words: "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1)),
    "json": lambda words: json.dumps(list(words)),
    "quotes": lambda words: ", ".join(f"'{word}'" for word in words),
    "call": lambda words: f"{words[0]}({', '.join(words[1:])})",
    "brackets": lambda words: " ".join(f"({word})" for word in words),
    "snake": "_".join,
    "dots": ".".join,
    "slashes": "/".join,
    "tags": lambda words: "".join(f"<{word}>" for word in words),
    "cells": lambda words: f"| {' | '.join(words)} |",
    "colons": ": ".join,
    "letters": lambda words: ", ".join("-".join(word) for word in words),
}
WANTED = FORMS | {  # also those that do not tell the words that they are made of
    "lower": lambda words: " ".join(words).lower(),
    "title": lambda words: " ".join(words).title(),
}


class Vocabulary:
    """The words that a byte-level tokenizer has tokens for, and the pieces of which it makes others."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = tokenizer.get_vocab(with_added_tokens=False)
        words = {token.lstrip(BLANK) for token in tokens}
        self.words = sorted(word for word in words if re.fullmatch("[A-Za-z]{2,}", word))
        self.pieces = sorted({word.lower() for word in self.words if len(word) < 5})

    def draw(self, rng: random.Random) -> str:
        if rng.random() < MADE_SHARE:
            word = "".join(rng.choices(self.pieces, k=rng.choice((2, 2, 3))))
        else:
            word = rng.choice(self.words)
        return word.capitalize() if rng.random() < NAME_SHARE else word


def document(rng: random.Random, vocabulary: Vocabulary) -> str:
    """Words in one form as the prompt, with the name of another form, and that form as the answer."""
    words = [vocabulary.draw(rng) for _ in range(rng.randint(1, MOST_WORDS))]
    given, wanted = rng.choice(list(FORMS)), rng.choice(list(WANTED))
    return prose.chat(f"{FORMS[given](words)}\n=> {wanted}", WANTED[wanted](words))
