"""Endless short tasks with answers that can be checked.

Every kind maps a `Draw` to turns. `make(kind, rng, split)` draws one task; `document` writes several as one
conversation in the chat format, some with a system prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from . import (
    arithmetic,
    calendar,
    code,
    commands,
    editing,
    german,
    logic,
    order,
    problems,
    records,
    talk,
    texts,
)
from .draw import SPLITS, Draw, Task, Turn, draw_task

__all__ = ["KINDS", "SPLITS", "Draw", "Task", "Turn", "document", "make"]

# Kind: generator and its weight in the training mix.
KINDS: dict[str, tuple[Callable[[Draw], list[Turn]], float]] = {
    "addition": (arithmetic.addition, 3),
    "subtraction": (arithmetic.subtraction, 3),
    "multiplication": (arithmetic.multiplication, 3),
    "division": (arithmetic.division, 2),
    "compare": (arithmetic.compare, 1),
    "series": (arithmetic.series, 2),
    "number_words": (arithmetic.number_words, 1.5),
    "average": (arithmetic.average, 1),
    "problem": (problems.problem, 6),
    "sort_numbers": (order.sort_numbers, 3),
    "sort_words": (order.sort_words, 3),
    "count_items": (order.count_items, 1.5),
    "extremes": (order.extremes, 1.5),
    "weekday": (calendar.weekday, 1.5),
    "month": (calendar.month, 1.5),
    "date_after": (calendar.date_after, 1.5),
    "days_in_month": (calendar.days_in_month, 0.5),
    "date_format": (calendar.date_format, 1),
    "clock": (calendar.clock, 1.5),
    "half_day": (calendar.half_day, 1),
    "units": (calendar.units, 2),
    "translation": (german.translation, 4),
    "vocabulary": (german.vocabulary, 1),
    "function": (code.function, 3),
    "rename": (code.rename, 1.5),
    "document": (code.document, 1),
    "explain": (code.explain, 1),
    "call": (code.call, 1),
    "extraction": (records.extraction, 1.5),
    "tables": (records.tables, 2),
    "table_lookup": (records.table_lookup, 1.5),
    "lists": (records.lists, 1),
    "sql": (commands.sql, 2),
    "shell": (commands.shell, 1.5),
    "markup": (records.markup, 0.5),
    "context": (texts.context, 2),
    "retrieval": (texts.retrieval, 1.5),
    "summary": (texts.summary, 1.5),
    "headline": (texts.headline, 0.5),
    "email": (texts.email, 1.5),
    "memory": (talk.memory, 1.5),
    "story": (talk.story, 2),
    "third_person": (talk.third_person, 1),
    "replace": (editing.replace, 1.5),
    "correct": (editing.correct, 1.5),
    "sentence_lines": (editing.sentence_lines, 1),
    "word_forms": (editing.word_forms, 1),
    "spelling": (editing.spelling, 2),
    "ordering": (logic.ordering, 1.5),
    "assignment": (logic.assignment, 1),
    "tracking": (logic.tracking, 1),
    "syllogism": (logic.syllogism, 0.5),
    "odd_one_out": (logic.odd_one_out, 1),
    "categorize": (logic.categorize, 1),
    "sentiment": (logic.sentiment, 0.5),
    "capitals": (logic.capitals, 1),
    "smalltalk": (talk.smalltalk, 0.7),
}

SYSTEM = "<|system|>{}<|end|>"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are an assistant who answers questions.",
    "Be helpful and exact.",
)
SYSTEM_SHARE = 0.1  # of all documents
CHAT = "<|user|>{}<|end|><|assistant|>{}<|end|>"


def make(kind: str, rng: random.Random, split: str = "train") -> Task:
    """Draw one task of the kind from a split: train, values or wordings."""
    return draw_task(kind, KINDS[kind][0], rng, split)


def document(rng: random.Random) -> str:
    """One to three training tasks of any kinds as one conversation."""
    kinds = rng.choices(list(KINDS), [weight for _, weight in KINDS.values()], k=rng.choice((1, 1, 2, 3)))
    turns = [turn for kind in kinds for turn in make(kind, rng).turns]
    system = SYSTEM.format(rng.choice(SYSTEM_PROMPTS)) if rng.random() < SYSTEM_SHARE else ""
    return "<|bos|>" + system + "".join(CHAT.format(t.prompt, t.answer) for t in turns)
