"""Published names of the tensors of heads: tables that loading, export and `outrider models` read.

A pattern is a tensor's name with fields in braces:

    {i}, {j} …   a decimal number
    {i+1}        that number plus one
    {i+first}    that number plus one that the caller gives (first=36)
    {kind}       weight or bias
    {rest}       one or more characters

    published                           ours                           example
    medusa_head.{i}.{j}.linear.{kind}   {i}.{j}.linear.{kind}          medusa_head.3.0.linear.bias
                                                                       ⇄ 3.0.linear.bias
    additional_layers.{i}.{rest}        layers.{i+1}.{rest}            additional_layers.0.norm.weight
                                                                       ⇄ layers.1.norm.weight
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from outrider.checkpoints.heads import Head

FIELD = re.compile(r"\{(\w+)(?:\+(\w+))?\}")
FIELD_TEXT = {"kind": "weight|bias", "rest": ".+"}  # every other field is a number
Rows = tuple[tuple[str, str | None], ...]


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    expression, end = "", 0
    for field in FIELD.finditer(pattern):
        text = FIELD_TEXT.get(field[1], r"\d+")
        expression += f"{re.escape(pattern[end : field.start()])}(?P<{field[1]}>{text})"
        end = field.end()
    return re.compile(expression + re.escape(pattern[end:]))


def parse(pattern: str, name: str, **numbers: int) -> dict[str, str] | None:
    """Values of the fields of a name, and `numbers`.

    Returns None if the name does not match or a number is negative.
    """
    match = _compile(pattern).fullmatch(name)
    if match is None:
        return None
    values = {key: str(number) for key, number in numbers.items()} | match.groupdict()
    for field, offset in FIELD.findall(pattern):
        if offset:
            value = int(values[field]) - int(values.get(offset, offset))
            if value < 0:
                return None
            values[field] = str(value)
    return values


def fill(pattern: str, values: Mapping[str, str]) -> str:
    """The name with these fields.  Raises KeyError for a field without a value."""

    def text(field: re.Match[str]) -> str:
        value, offset = values[field[1]], field[2]
        return str(int(value) + int(values.get(offset, offset))) if offset else value

    return FIELD.sub(text, pattern)


def matching(head: Head, *patterns: str) -> Iterator[str]:
    """The names of a head that match one of the patterns."""
    return (name for name in head if any(_compile(pattern).fullmatch(name) for pattern in patterns))


def _always(_: Head) -> bool:
    return True


def _no_numbers(_: Head) -> dict[str, int]:
    return {}


@dataclass(frozen=True)
class Layout:
    """One published set of names.

    publisher:     the format's name in `outrider models`
    sign:          patterns of published names; a file has this layout if one of its tensors matches
    rows:          (published pattern, our pattern); the first match counts, None drops the tensor
    prefixes:      optional prefixes of published names, removed repeatedly before the rows apply
    applies:       a further condition, where names alone are ambiguous
    numbers:       values of fields that depend on all names of a head, such as `first`
    beside_target: such files also hold a whole target
    """

    publisher: str
    sign: tuple[str, ...]
    rows: Rows
    prefixes: tuple[str, ...] = ()
    applies: Callable[[Head], bool] = _always
    numbers: Callable[[Head], dict[str, int]] = _no_numbers
    beside_target: bool = False

    def found_in(self, head: Head) -> bool:
        signs = [_compile(pattern) for pattern in self.sign]
        return self.applies(head) and any(
            sign.fullmatch(form) for name in head for form in (name, self._bare(name)) for sign in signs
        )

    def ours(self, name: str, **numbers: int) -> str | None:
        """Our name for a published one; None for a tensor that is not read."""
        bare = self._bare(name)
        for published, ours in self.rows:
            if (values := parse(published, bare, **numbers)) is not None:
                return None if ours is None else fill(ours, values)
        return None

    def published(self, name: str, **numbers: int) -> str:
        """The published name for one of ours, without an optional prefix."""
        for published, ours in self.rows:
            if ours is not None and (values := parse(ours, name, **numbers)) is not None:
                return fill(published, values)
        raise AssertionError(f"the layout {self.publisher!r} has no name for {name!r}")

    def translate(self, head: Head) -> Head:
        """The head under our names."""
        numbers = self.numbers(head)
        return head.renamed(lambda name: self.ours(name, **numbers))

    def _bare(self, name: str) -> str:
        while prefix := next((one for one in self.prefixes if name.startswith(one)), ""):
            name = name.removeprefix(prefix)
        return name


@dataclass(frozen=True)
class HeadFormat:
    """All layouts of a method, and the properties that our names encode.

    hidden:     (pattern, axis) of tensors with one axis of the width of the target's states
    taps:       number of states concatenated along this axis
    vocabulary: patterns of tensors with one row per known token
    numbered:   patterns whose field {i} numbers the draft positions; a head without any is recurrent
    depth:      number of draft positions, where the config states it
    """

    layouts: tuple[Layout, ...]
    hidden: tuple[tuple[str, int], ...] = ()
    vocabulary: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()
    taps: Callable[[Head], int] = lambda _: 1
    depth: Callable[[Head], int | None] = lambda _: None

    def layout_of(self, head: Head) -> Layout | None:
        """The first layout that matches a head under its published names; None without a match."""
        return next((layout for layout in self.layouts if layout.found_in(head)), None)

    def translate(self, head: Head) -> Head:
        """The head under our names.  A head without a match is read in the last layout."""
        return (self.layout_of(head) or self.layouts[-1]).translate(head)
