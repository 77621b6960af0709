"""A text in the tokens of one tokenizer, as it grows: only its end is ever tokenised again."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from outrider.checkpoints.hub import Checkpoint
from outrider.drafting.vocab.spelling import pieces, tokenizer_of
from outrider.errors import ConfigError

NEUTRAL = "\n"  # before a text from the middle of another: some tokenizers put a space before what they take for a beginning


class Language:
    """A tokenizer, from ids to bytes and from text to ids."""

    def __init__(self, checkpoint: Checkpoint, whose: str) -> None:
        tokenizer = tokenizer_of(checkpoint, whose)
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer of the {whose} {checkpoint.name!r} does not say which characters a token stands for: it needs a "
                'tokenizer.json where "vocab_mismatch" is "retokenize".'
            )
        self.pieces = pieces(tokenizer, checkpoint.spec.vocabulary)
        self.ending, self.eos = checkpoint.ending, tokenizer.eos_token_id
        self.begins = _begins(tokenizer)
        self.core = tokenizer.backend_tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.core.post_processor = None  # it may trim the offsets
        self.core.no_truncation()

    @cached_property
    def spaced(self) -> bool:
        """Whether a space that nobody wrote begins every text."""
        return self.bytes(self.core.encode("a").ids).startswith(b" ")

    def bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.pieces[i] for i in ids)

    def text(self, ids: Iterable[int]) -> str:
        """Up to the first byte that is no character."""
        return self.bytes(ids).decode("utf-8", "replace").partition("\ufffd")[0]

    def tokens(self, text: str, *contexts: str) -> tuple[list[int], list[int]]:
        """The tokens of a text, and where in it each begins: as they are behind the first of the contexts with which they share no
        token.  Behind nothing at all if there is none."""
        for before in (*contexts, ""):
            found, at = self.core.encode(before + text, add_special_tokens=False), len(before)
            if not any(start < at < end for start, end in found.offsets):
                first = sum(start < at for start, _ in found.offsets)
                return found.ids[first:], [start - at for start, _ in found.offsets[first:]]
        raise AssertionError


def _begins(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text (BOS, as a rule)."""
    whole, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return list(whole[:at])


class Reading:
    """What a row says, in the tokens of a draft.

    ids: the tokens.  The first `fixed` of them stay as they are; what comes after, of the text `tail`, may come out differently when
    more text follows ("spec" + "ulation").  read: tokens of the row that are in it.
    """

    def __init__(self, language: Language, lookbehind: int) -> None:
        self.language, self.lookbehind = language, lookbehind
        self.ids: list[int] = list(language.begins)
        self.fixed, self.tail, self.read = len(self.ids), "", 0
        self.middle = False  # the tail is not the beginning of the text
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        """Whether the row ends within a character, which is not in the text yet."""
        return bool(self.decoder.getstate()[0])

    @property
    def empty(self) -> bool:
        return not self.middle and not self.tail

    def extend(self, said: bytes, count: int) -> int:
        """Reads on: `count` tokens of the row, which say `said`.  Returns how many ids stayed as they were."""
        self.read += count
        fresh = self.decoder.decode(said)
        if not fresh:
            return len(self.ids)
        self.tail += fresh
        tokens, starts = self.language.tokens(self.tail, *([NEUTRAL] if self.middle else []))
        before = self.ids[self.fixed :]
        same = next(
            (i for i, (a, b) in enumerate(zip(before, tokens)) if a != b), min(len(before), len(tokens))
        )
        self.ids[self.fixed :] = tokens
        kept = self.fixed + same
        self._fix(starts)
        return kept

    def _fix(self, starts: Sequence[int]) -> None:
        """Fixes all but the last `lookbehind` tokens, or up to as many more, so that the rest begins with a word."""
        most = len(starts) - self.lookbehind
        if most <= self.lookbehind:
            return
        whole = [
            i for i in range(most, most - self.lookbehind, -1) if starts[i] > starts[i - 1]
        ]  # others begin within a character
        if not whole:
            return
        cut = next((i for i in whole if self.tail[starts[i]].isspace()), whole[0])
        self.fixed, self.tail, self.middle = self.fixed + cut, self.tail[starts[cut] :], True
