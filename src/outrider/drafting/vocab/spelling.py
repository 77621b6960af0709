"""The bytes of a tokenizer's tokens: " the" is one text, whether it is spelled "Ġthe" or "▁the"."""

from __future__ import annotations

import re
from typing import Any

from outrider.checkpoints.hub import Checkpoint
from outrider.errors import ConfigError

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's spelling of a byte that is no piece of its own


def tokenizer_of(checkpoint: Checkpoint, whose: str) -> Any:
    """The tokenizer of a checkpoint.  Raises ConfigError if it ships none."""
    if checkpoint.tokenizer is None:
        raise ConfigError(
            f"the {whose} {checkpoint.name!r} ships no tokenizer, so its tokens cannot be translated: add "
            'one, or set "vocab_mismatch": "allow" if both models mean the same by an id.'
        )
    return checkpoint.tokenizer


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the special tokens, which have no text."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(tokenizer.all_special_ids) | added


def pieces(tokenizer: Any, size: int) -> list[bytes]:
    """Token id -> the bytes that it adds to a text; b"" for special tokens and for ids without a token."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    words, special, added = tokenizer.get_vocab(), special_ids(tokenizer), tokenizer.added_tokens_decoder
    # letter -> byte of a byte-level tokenizer; None for SentencePiece
    letters: dict[str, int] | None = None
    if sum(word.startswith("Ġ") for word in words) > sum(word.startswith("▁") for word in words):
        in_order = bytes_to_unicode()  # type: ignore[no-untyped-call]
        letters = {letter: byte for byte, letter in in_order.items()}
    found = [b""] * size
    for word, i in words.items():
        if i < size and i not in special:
            found[i] = added[i].content.encode() if i in added else _bytes_of(word, letters)
    return found


def _bytes_of(word: str, letters: dict[str, int] | None) -> bytes:
    """The bytes of a token's spelling.  letters: byte of each letter of a byte-level tokenizer."""
    if letters is not None and all(letter in letters for letter in word):
        return bytes(letters[letter] for letter in word)
    if letters is None and (byte := BYTE.fullmatch(word)):
        return bytes([int(byte[1], 16)])
    return word.replace("▁", " ").encode()
