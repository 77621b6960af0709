"""Incremental tokenization: the tokens of a text that grows.

Only the end of the text is ever tokenized again.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from outrider.checkpoints.hub import Checkpoint
from outrider.drafting.vocab.spelling import pieces, tokenizer_of
from outrider.errors import ConfigError

# Put before a text from the middle of another: some tokenizers add a space to what they take for a beginning.
NEUTRAL = "\n"


class TextCodec:
    """Conversion of token ids to bytes and of text to token ids, by one tokenizer."""

    def __init__(self, checkpoint: Checkpoint, whose: str) -> None:
        tokenizer = tokenizer_of(checkpoint, whose)
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer of the {whose} {checkpoint.name!r} does not tell the characters of a token: "
                'it needs a tokenizer.json where "vocab_mismatch" is "retokenize".'
            )
        self.pieces = pieces(tokenizer, checkpoint.spec.vocabulary)
        self.ending, self.eos = checkpoint.ending, tokenizer.eos_token_id
        self.prefix = _prefix(tokenizer)
        self.core = tokenizer.backend_tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.core.post_processor = None  # it may trim the offsets
        self.core.no_truncation()

    @cached_property
    def adds_space(self) -> bool:
        """Whether the tokenizer puts a space before every text."""
        return self.bytes(self.core.encode("a").ids).startswith(b" ")

    def bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of tokens; none of special ones."""
        return b"".join(self.pieces[i] for i in ids)

    def text(self, ids: Iterable[int]) -> str:
        """The text up to the first byte that is no character."""
        return self.bytes(ids).decode("utf-8", "replace").partition("\ufffd")[0]

    def tokens(self, text: str, *contexts: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a text, and the offset in it at which each begins.

        The text is tokenized after the first context that shares no token with it, or after nothing.
        """
        for before in (*contexts, ""):
            found, at = self.core.encode(before + text, add_special_tokens=False), len(before)
            if not any(start < at < end for start, end in found.offsets):
                first = sum(start < at for start, _ in found.offsets)
                return found.ids[first:], [start - at for start, _ in found.offsets[first:]]
        raise AssertionError


def _prefix(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text (usually BOS)."""
    full, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return list(full[:at])


class IncrementalTokens:
    """The tokens of a text in the vocabulary of one codec, while bytes are appended to the text.

        ids     [ ...............fixed ][ tokens of `tail` ]

    ids[:fixed] cannot change any more.  The tokens of `tail` may, when more text follows ("spec" +
    "ulation").
    consumed: number of tokens of the source row whose bytes are in the text.
    """

    def __init__(self, codec: TextCodec, lookbehind: int) -> None:
        self.codec, self.lookbehind = codec, lookbehind
        self.ids: list[int] = list(codec.prefix)
        self.fixed, self.tail, self.consumed = len(self.ids), "", 0
        self.tail_is_start = True  # whether the tail is the beginning of the text
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def within_character(self) -> bool:
        """Whether the bytes end within a character, which is not in the text yet."""
        return bool(self.decoder.getstate()[0])

    @property
    def empty(self) -> bool:
        """Whether there is no text yet."""
        return self.tail_is_start and not self.tail

    def extend(self, data: bytes, count: int) -> int:
        """Append the bytes of `count` source tokens.  Returns how many leading ids did not change."""
        self.consumed += count
        fresh = self.decoder.decode(data)
        if not fresh:
            return len(self.ids)
        self.tail += fresh
        contexts = () if self.tail_is_start else (NEUTRAL,)
        tokens, starts = self.codec.tokens(self.tail, *contexts)
        before = self.ids[self.fixed :]
        shared = min(len(before), len(tokens))
        unchanged = self.fixed + next((i for i in range(shared) if before[i] != tokens[i]), shared)
        self.ids[self.fixed :] = tokens
        self._fix(starts)
        return unchanged

    def _fix(self, starts: Sequence[int]) -> None:
        """Fix all but the last `lookbehind` to 2 `lookbehind` tokens, so that the tail begins with a word.

        starts: the offset in the tail at which each of its tokens begins.
        """
        last_cut = len(starts) - self.lookbehind
        if last_cut <= self.lookbehind:
            return
        # Tokens that begin where the one before them begins are parts of one character.
        cuts = [i for i in range(last_cut, last_cut - self.lookbehind, -1) if starts[i] > starts[i - 1]]
        if not cuts:
            return
        cut = next((i for i in cuts if self.tail[starts[i]].isspace()), cuts[0])
        self.fixed, self.tail, self.tail_is_start = self.fixed + cut, self.tail[starts[cut] :], False
