"""Held-out wordings: no training wording of the same kind has nearly the same words."""

import random
import re
from collections.abc import Iterator
from difflib import SequenceMatcher

import pytest

from recipes.builtin import tasks
from recipes.builtin.tasks import draw

NEAR = 0.8
COUNT = 150  # tasks of a kind, so that every call of `say` is seen


def words(template: str) -> list[str]:
    """Words of a template in lower case, without its slots."""
    return re.findall(r"\w+", re.sub(r"\{\w*\}", " ", template).lower())


def similarity(one: str, other: str) -> float:
    """Share of common words, or of common words in the same order, whichever is larger."""
    a, b = words(one), words(other)
    common = len({*a} & {*b}) / max(1, len({*a} | {*b}))
    return max(common, SequenceMatcher(None, a, b, autojunk=False).ratio())


def templates(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], set[str]]:
    """Training templates and held-out templates of a kind."""
    groups: set[tuple[str, ...]] = set()
    say = draw.Draw.say

    def record(self: draw.Draw, *given: str, **values: object) -> str:
        groups.add(given)
        return say(self, *given, **values)

    monkeypatch.setattr(draw.Draw, "say", record)
    for seed in range(COUNT):
        tasks.make(kind, random.Random(seed), "wordings")
    divided = [draw.divided(*group) for group in groups]
    return {t for train, _ in divided for t in train}, {t for _, held in divided for t in held}


def near(train: set[str], held: set[str]) -> Iterator[tuple[float, str, str]]:
    for one in held:
        for other in train:
            if (value := similarity(one, other)) >= NEAR:
                yield value, one, other


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ("Express {n} {s} in {b}.", "Express in {b}: {n} {s}", 1.0),
        ("What country is {c} the capital of?", "{c} is the capital of what country?", 1.0),
        ("Change the format to {t}:\n{x}", "Change the format from {s} to {t}.\n{x}", 8 / 9),
        ("Odd one out? {s}", "Which word is wrong here? {s}", 0.0),
    ],
)
def test_similarity_ignores_slots_order_and_case(one, other, wanted):
    assert similarity(one, other) == pytest.approx(wanted)


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_no_training_wording_is_close_to_a_held_out_one(kind, monkeypatch):
    train, held = templates(kind, monkeypatch)
    assert held and len(train) > len(held)
    assert sorted(near(train, held)) == []
