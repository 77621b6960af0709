"""Command lines of llama.cpp, in the words of our options."""

from __future__ import annotations

import pytest

from outrider.cli.llama_cpp import translated


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("generate -p -i -n 3", "generate -p -i -n 3"),
        ("generate --prompt -hf", "generate --prompt -hf"),
        ("chat --system-prompt -i -i", "chat --system-prompt -i"),
        ("generate --hf-repo=a/b -p x", "generate -m a/b:Q4_K_M -p x"),
        ("generate -hf a/b:Q8_0 -hfd c/d", "generate -m a/b:Q8_0 -md c/d:Q4_K_M"),
    ],
)
def test_texts_that_look_like_flags_are_left_alone(words: str, expected: str) -> None:
    assert translated(words.split()) == expected.split()
