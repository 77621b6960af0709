"""Conversion of Python's literals, and of Gemma's, into JSON, as far as a text goes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from outrider.core.reasoning import without_beginning

WORD = re.compile(r"[^\s,()\[\]{}:='\"<>]+")
SPACE = re.compile(r"\s*")
PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}  # text of a string without an escape
# what may follow a quote that ends a string, and what does not tell yet whether it does
ENDS_STRING, UNDECIDED = re.compile(r"\s*(?:[,\]}:]|\)+[ \t]*[,\]}<\n])"), re.compile(r"\s*\)*[ \t]*\Z")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
CODES = {"x": 2, "u": 4, "U": 8}  # digits of an escaped character
CLOSING = {"(": ")", "[": "]", "{": "}"}
DEEPEST = 100
LONGEST = 10  # characters of an escape; a quote has fewer


class Ended(Exception):
    """The text ends within a value, or is none from here on."""


class Literals:
    """A reader at a place in a text, and the JSON of what it has read.

    quotes: what begins a string.  raw: strings have no escapes, and keys no quotes, as in Gemma's texts.
    made: parts of the JSON.  What was written stays: it is the beginning of the JSON of a longer text.
    """

    def __init__(
        self, text: str, at: int = 0, quotes: tuple[str, ...] = ("'", '"'), raw: bool = False
    ) -> None:
        self.text, self.at, self.quotes, self.raw = text, at, quotes, raw
        self.made = list[str]()

    def skip(self, pattern: re.Pattern[str] = SPACE) -> re.Match[str] | None:
        """Go behind a pattern that is here."""
        if (found := pattern.match(self.text, self.at)) is not None:
            self.at = found.end()
        return found

    def next(self) -> str:
        """The next character that is no space.  Raises Ended."""
        self.skip()
        if self.at >= len(self.text):
            raise Ended
        return self.text[self.at]

    def take(self, expected: str) -> bool:
        """Go behind the next character if it is this one.  Raises Ended at the end of the text."""
        found = self.next() == expected
        self.at += found
        return found

    def value(self, kinds: set[str] | None = None, depth: int = 0) -> None:
        """Read a value.  kinds: types that its schema allows, where strings may be other values."""
        opening = self.next()
        if depth > DEEPEST:
            raise Ended
        if (quote := self._quote()) is not None:
            self._string(quote, kinds)
        elif opening == "[" or (opening == "(" and not self.raw):
            self._sequence(CLOSING[opening], depth)
        elif opening == "{":
            self._braces(depth)
        else:
            self._word()

    def _quote(self) -> str | None:
        rest = self.text[self.at : self.at + LONGEST]
        for quote in self.quotes:
            if self.text.startswith(quote, self.at):
                triple = 3 * quote
                return triple if len(quote) == 1 and self.text.startswith(triple, self.at) else quote
            if quote.startswith(rest):
                raise Ended
        return None

    def _string(self, quote: str, kinds: set[str] | None) -> None:
        if len(quote) == 1 and (3 * quote).startswith(self.text[self.at : self.at + LONGEST]):
            raise Ended  # it may become a triple quote
        self.at += len(quote)
        if not self.raw:
            self._escaped(quote)
            return
        end = self.text.find(quote, self.at)
        given = self.text[self.at : end] if end >= 0 else without_beginning(self.text[self.at :], quote)
        if kinds and "string" not in kinds:
            if end < 0:
                raise Ended
            self.made.append(plain(given) or json.dumps(given, ensure_ascii=False))
        else:
            self.made += ['"', json.dumps(given, ensure_ascii=False)[1:-1]]
            if end < 0:
                raise Ended
            self.made.append('"')
        self.at = end + len(quote)

    def _escaped(self, quote: str) -> None:
        """The rest of a string of Python's.

        A quote that no end of a value follows is part of the text: models forget to escape it.
        """
        letters = list[str]()
        try:
            self._letters(quote, letters)
        finally:
            # once for the whole text: it may have an escape in every line
            self.made += ['"', json.dumps("".join(letters), ensure_ascii=False)[1:-1]]
        self.made.append('"')

    def _letters(self, quote: str, letters: list[str]) -> None:
        """Collect the text of a string up to its quote.  Raises Ended."""
        while True:
            if (found := self.skip(PLAIN[quote[0]])) is not None:
                letters.append(found[0])
            rest = self.text[self.at : self.at + LONGEST]
            if quote.startswith(rest):
                raise Ended  # also at a quote: what follows tells whether it is the end
            if rest.startswith(quote) and UNDECIDED.match(self.text, self.at + len(quote)):
                raise Ended
            if rest.startswith(quote) and ENDS_STRING.match(self.text, self.at + len(quote)):
                self.at += len(quote)
                return
            letters.append(self._letter(rest))

    def _letter(self, rest: str) -> str:
        """The letter of an escape, or a quote within the text."""
        if rest[0] != "\\":
            self.at += 1
            return rest[0]
        if len(rest) < 2:
            raise Ended
        code = CODES.get(rest[1], 0)
        digits = rest[2 : 2 + code]
        if code and re.fullmatch("[0-9a-fA-F]*", digits):
            if len(digits) < code:
                raise Ended
            self.at += 2 + code
            number = int(digits, 16)
            return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else "\ufffd"
        self.at += 2
        return ESCAPES.get(rest[1], rest[1] if rest[1] in "\\'\"" else rest[:2])

    def _sequence(self, closing: str, depth: int) -> None:
        self.at += 1
        self.made.append("[")
        self._items(closing, lambda: self.value(depth=depth + 1), first=True)
        self.made.append("]")

    def _braces(self, depth: int) -> None:
        """A dict, or a set, which becomes a list."""
        self.at += 1
        if self.raw or self.next() == "}":
            self.made.append("{")
            self._items("}", lambda: self.pair(depth), first=True)
            self.made.append("}")
            return
        before, self.made = self.made, []
        try:
            self.value(depth=depth + 1)
            is_dict = self.next() == ":"
        except Ended:
            self.made = before  # not known yet
            raise
        first = "".join(self.made)
        self.made = before
        if is_dict:
            self.made += ["{", _key(first), ": "]
            self.at += 1
            self.value(depth=depth + 1)
            self._items("}", lambda: self.pair(depth), first=False)
            self.made.append("}")
        else:
            self.made += ["[", first]
            self._items("}", lambda: self.value(depth=depth + 1), first=False)
            self.made.append("]")

    def pair(self, depth: int = 0, properties: Mapping[str, set[str]] | None = None) -> None:
        """A key and its value.  properties: types of the values that are known."""
        before, self.made = self.made, []
        try:
            self.value(depth=depth + 1)
            if not self.take(":"):
                raise Ended
        except Ended:
            self.made = before
            raise
        key = _key("".join(self.made))
        self.made = [*before, key, ": "]
        start = len(self.made)
        try:
            self.value((properties or {}).get(json.loads(key)), depth + 1)
        except Ended:
            if len(self.made) == start:
                self.made = before
            raise

    def _items(self, closing: str, item: Callable[[], None], first: bool) -> None:
        """Items up to a closing character, with commas between."""
        while not self.take(closing):
            if not first and not self.take(",") and not self.raw:
                raise Ended
            if not first and self.take(closing):
                return
            before = len(self.made)
            if not first:
                self.made.append(", ")
            try:
                item()
            except Ended:
                if len(self.made) == before + (not first):
                    del self.made[before:]
                raise
            first = False

    def items(self, closing: str, item: Callable[[], None]) -> None:
        """The items of a call."""
        self._items(closing, item, True)

    def _word(self) -> None:
        """A number, or a name of a value; any other word is a text."""
        found = WORD.match(self.text, self.at)
        if found is None or found.end() == len(self.text):
            raise Ended  # it may go on
        self.at = found.end()
        self.made.append(plain(found[0]) or json.dumps(found[0], ensure_ascii=False))


def _key(written: str) -> str:
    """JSON of a key: always a text."""
    return written if written.startswith('"') else json.dumps(written, ensure_ascii=False)


def plain(word: str) -> str:
    """JSON of a number or of the name of a value; "" if it is none."""
    if word in WORDS:
        return WORDS[word]
    try:
        value: Any = ast.literal_eval(word.lstrip("0") or "0" if word.isdigit() else word)
        written = json.dumps(value, allow_nan=False) if isinstance(value, (int, float)) else ""
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    return written
