"""Incremental detokenization: from token ids to text, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from outrider.checkpoints.plain_tokenizer import PlainTokenizer


class Detokenizer:
    """Incremental detokenizer: extends `text` by each token, withholding incomplete UTF-8 characters.

    Each step decodes a short window, so its cost does not depend on the length of the output.  The window
    starts one piece early, to keep the space that tokenizers put between pieces.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self._decode = decoder_of(tokenizer, skip_special_tokens)
        self.text = ""
        self.count = 0  # tokens that were fed
        self.start = self.done = 0  # the window starts at `start`; ids before `done` are in `text`
        self.ids: list[int] = []
        self.ends: list[int] = []  # length of the text behind each token
        self.special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)

    def feed(self, token: int) -> str:
        """Append a token.  Returns the new text, "" while a character is incomplete."""
        self.count += 1
        new = ""
        # a skipped token has no text, and hides the space before the next piece
        if not (self.skip and token in self.special):
            self.ids.append(token)
            new = self._pending()
            new = "" if new.endswith("\ufffd") else self._accept(new)
        self.ends.append(len(self.text))
        return new

    def feed_all(self, tokens: Sequence[int]) -> None:
        """Append several tokens, which are decoded at once.  Does not keep `ends`."""
        kept = [token for token in tokens if token not in self.special] if self.skip else tokens
        if kept:
            before = len(self.ids)
            self.ids += kept
            new = self._pending()
            if new.endswith("\ufffd"):  # a part of them may have text
                del self.ids[before:]
                for token in tokens:
                    self.feed(token)
                return
            self._accept(new)
        self.count += len(tokens)

    def flush(self) -> str:
        """Append and return the withheld text, after the last token."""
        return self._accept(self._pending())

    def again(self, ids: Sequence[int]) -> Detokenizer:
        """Create a detokenizer with the same settings and feed it `ids`."""
        made = Detokenizer(self.tokenizer, self.skip)
        for token in ids:
            made.feed(token)
        return made

    def _pending(self) -> str:
        return self._decode(self.ids[self.start :])[len(self._decode(self.ids[self.start : self.done])) :]

    def _accept(self, new: str) -> str:
        self.start, self.done = self.done, len(self.ids)
        self.text += new
        return new


def decoder_of(tokenizer: Any, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    """The function from token ids to text: that of the Rust tokenizer, where transformers adds nothing."""
    kind = type(tokenizer)
    modules = [getattr(getattr(kind, name, None), "__module__", "") for name in ("decode", "_decode")]
    base = ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]
    bare = isinstance(tokenizer, PlainTokenizer) or (
        modules == base and not tokenizer.clean_up_tokenization_spaces
    )
    decode = tokenizer.backend_tokenizer.decode if bare else tokenizer.decode
    return partial(decode, skip_special_tokens=skip_special_tokens)


def visible_text(text: str, stops: Sequence[str]) -> str:
    """`text` without its longest suffix that is a prefix of a stop string."""
    for held in range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1):
        if any(stop.startswith(text[-held:]) for stop in stops):
            return text[:-held]
    return text


def find_stop(text: str, fresh: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """(index, stop string) of the earliest match in `text`, or None.

    Only the last `fresh` characters are new.
    """
    found = [
        (at, stop)
        for stop in stops
        if (at := text.find(stop, max(0, len(text) - fresh - len(stop) + 1))) >= 0
    ]
    return min(found, default=None)
