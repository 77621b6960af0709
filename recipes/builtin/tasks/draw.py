"""Seeded draws for the task generators, with held-out values and held-out wordings."""

from __future__ import annotations

import builtins
import json
import keyword
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

SPLITS = ("train", "values", "wordings")
HELD_KEYS = 12  # one key in twelve is held out
OPENINGS = ("Hello! ", "Hi, can you help me? ", "One question: ", "Please help me. ", "Next one: ")
OPENING_SHARE = 0.1  # of all tasks
HELD_WORDS = 6  # every sixth word of an open class is held out
# Of the words of a training task, the share that is replaced by words of `words.json`; one is drawn a task.
# A model that sees few words learns them by heart, and does not learn to copy others.
REPLACED_SHARES = (0.0, 0.0, 0.3, 0.9)

T = TypeVar("T")


class OtherSplit(Exception):
    """Raised where the drawn values belong to another split; the caller draws again."""


@dataclass(frozen=True)
class Words:
    """An open word class, divided into training words and held-out words.

    replaceable: whether training also takes words of `words.json` in place of its own
    """

    train: tuple[str, ...]
    held: tuple[str, ...]
    replaceable: bool = True

    @property
    def all(self) -> tuple[str, ...]:
        return self.train + self.held


def listed(text: str) -> tuple[str, ...]:
    """Items of a list separated by commas or, where there are none, by blanks."""
    return tuple(w.strip() for w in text.split("," if "," in text else None) if w.strip())


def pairs(text: str) -> dict[str, str]:
    """A dictionary of items `key:value`."""
    return dict(item.split(":", 1) for item in listed(text))


_HELD: set[str] = set()  # held-out words of all classes, in lower case


def words(text: str, replaceable: bool = True) -> Words:
    """Divide the items of a list; every sixth one is held out."""
    items = listed(text)
    held = items[HELD_WORDS - 1 :: HELD_WORDS]
    _HELD.update(word.lower() for word in held)
    return Words(tuple(w for w in items if w not in held), held, replaceable)


@cache
def _replacements() -> tuple[list[str], list[str]]:
    """Capitalized words and others, without held-out ones and names that Python uses."""
    found = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf8"))
    left_out = _HELD | {*keyword.kwlist, *dir(builtins)}

    def free(word: str) -> bool:
        return not {word.lower(), f"{word}s".lower(), word.lower().removesuffix("s")} & left_out

    return [w for w in found["names"] if free(w)], [w for w in found["words"] if free(w)]


@cache
def _more_wordings() -> dict[str, list[str]]:
    """Additional training templates.  The key is one of the templates that `Draw.say` is called with."""
    folder, found = Path(__file__).with_name("wordings"), dict[str, list[str]]()
    for path in sorted(folder.glob("*.json")):
        found.update(json.loads(path.read_text(encoding="utf8")))
    return found


def divided(*templates: str) -> tuple[list[str], list[str]]:
    """Training templates and held-out ones.  Those in `wordings` are for training."""
    if len(templates) < 3:
        raise ValueError(f"a wording needs three templates or more, got {len(templates)}")
    cut, more = len(templates) - max(1, len(templates) // 5), _more_wordings()
    extra = (added for each in templates for added in more.get(each, ()))
    return [*templates[:cut], *extra], list(templates[cut:])


@dataclass(frozen=True)
class Turn:
    """One question, its reference answer, and a predicate that accepts right answers."""

    prompt: str
    answer: str
    check: Callable[[str], bool]


@dataclass(frozen=True)
class Task:
    """A conversation of one kind, with the keys and wordings that it was drawn from."""

    kind: str
    turns: tuple[Turn, ...]
    keys: tuple[str, ...]
    wordings: tuple[str, ...]


class Draw:
    """Random choices of one task.

    Split `train` uses training words, training keys and training wordings. Split `values` uses held-out
    words and keys with training wordings. Split `wordings` uses held-out wordings with training values.
    """

    def __init__(self, rng: random.Random, split: str) -> None:
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
        self.rng = rng
        self.split = split
        self.keys: list[str] = []
        self.wordings: list[str] = []
        self.class_of: dict[str, Words] = {}  # of the words that were drawn
        self.replaced_share = rng.choice(REPLACED_SHARES) if split == "train" else 0.0

    def int(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def pick(self, items: Sequence[T]) -> T:
        """Choose from a closed class: the same items in every split."""
        return self.rng.choice(items)

    def picks(self, items: Sequence[T], count: int) -> list[T]:
        return self.rng.sample(items, count)

    def word(self, group: Words) -> str:
        """Choose from an open class: held-out words only in split `values`."""
        return self.words(group, 1)[0]

    def words(self, group: Words, count: int) -> list[str]:
        """Choose distinct words; split `values` takes held-out ones first, then training words."""
        held = self.rng.sample(group.held, min(count, len(group.held))) if self.split == "values" else []
        chosen = held + self.rng.sample(group.train, count - len(held))
        if self.replaced_share and group.replaceable:
            chosen = self._replaced(group, chosen)
        self.rng.shuffle(chosen)
        self.class_of.update(dict.fromkeys(chosen, group))
        return chosen

    def _replaced(self, group: Words, chosen: list[str]) -> list[str]:
        """The words, some of them replaced.

        Words for names are capitalized, and words for a class of plurals end in s.
        """
        names, others = _replacements()
        source = names if group.train[0][0].isupper() else others
        end = "s" if all(word.endswith("s") for word in group.train) else ""
        found: list[str] = []
        for word in chosen:
            while word in found or (word in chosen and self.chance(self.replaced_share)):
                word = self.rng.choice(source).removesuffix(end) + end
            found.append(word)
        return found

    def hold(self, *key: object) -> None:
        """Assign the values in `key` to a split; raise OtherSplit if it is not this draw's."""
        text = repr(key)
        if (zlib.crc32(text.encode()) % HELD_KEYS == 0) != (self.split == "values"):
            raise OtherSplit
        self.keys.append(text)

    def say(self, *templates: str, **values: object) -> str:
        """Fill one of the templates; the last fifth of them (at least one) is held out.

        The files in `wordings` hold more templates for training.
        """
        train, held = divided(*templates)
        chosen = self.rng.choice(held if self.split == "wordings" else train)
        self.wordings.append(chosen)
        return chosen.format(**values)


Maker = Callable[[Draw], list[Turn]]


def draw_task(kind: str, maker: Maker, rng: random.Random, split: str) -> Task:
    """Draw until the values belong to the split."""
    for _ in range(10_000):
        draw = Draw(rng, split)
        try:
            turns = maker(draw)
        except OtherSplit:
            continue
        if draw.chance(OPENING_SHARE):
            turns[0] = replace(turns[0], prompt=draw.pick(OPENINGS) + turns[0].prompt)
        return Task(kind, tuple(turns), tuple(draw.keys), tuple(draw.wordings))
    raise ValueError(f"kind {kind!r} has no values in split {split!r}; give it a larger range")
