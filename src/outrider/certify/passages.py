"""Prompts for a test that takes as many as there is time for: some to begin with, then passages of what the model said to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from outrider.bench.prompts import PROMPTS, rendered
from outrider.llm import LLM

SHORTEST, LONGEST = 2, 48  # tokens of a passage


def beginnings(llm: LLM, seed: int, raw: bool = False) -> list[list[int]]:
    """Our own prompts through the chat template, as they stand where there is none, and random ids where there is no tokenizer."""
    tokenizer: Any = llm.tokenizer
    if tokenizer is None:
        random_streams = random.Random(seed)
        return [
            [
                random_streams.randrange(llm.engine.checkpoint.spec.vocabulary)
                for _ in range(random_streams.randint(3, 40))
            ]
            for _ in range(len(PROMPTS))
        ]
    return [rendered(prompt, tokenizer, raw)["prompt_token_ids"] for prompt in PROMPTS]


class Passages:
    """room: tokens that a prompt may have; longer ones lose their beginning.  own: go on with passages of what was `heard`."""

    def __init__(self, prompts: Sequence[list[int]], room: int, own: bool, seed: int) -> None:
        self.prompts = [ids[-room:] for ids in prompts]
        self.room, self.own, self.random_streams = room, own, random.Random(seed)
        self.texts: list[list[int]] = []
        self.next = 0

    def heard(self, ids: list[int]) -> None:
        self.texts.append(ids)

    def take(self, count: int) -> list[list[int]]:
        """The next prompts; fewer, or none, where there are no more."""
        while self.own and self.texts and len(self.prompts) < self.next + count:
            self.prompts.append(self._passage())
        taken = self.prompts[self.next : self.next + count]
        self.next += len(taken)
        return taken

    def short(self, count: int) -> list[list[int]]:
        """The shortest that differ, taken or not."""
        return sorted((list(ids) for ids in dict.fromkeys(map(tuple, self.prompts))), key=len)[:count]

    def _passage(self) -> list[int]:
        text = self.random_streams.choice(self.texts)
        size = self.random_streams.randint(min(SHORTEST, len(text)), min(LONGEST, len(text), self.room))
        start = self.random_streams.randint(0, len(text) - size)
        return text[start : start + size]
