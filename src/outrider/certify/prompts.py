"""Prompts for a test of any length: given ones, then passages of the model's own texts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from outrider.bench.prompts import PROMPTS
from outrider.llm import LLM

MIN_PASSAGE, MAX_PASSAGE = 2, 48  # tokens


def random_prompts(llm: LLM, seed: int) -> list[list[int]]:
    """Token ids for a model without a tokenizer."""
    rng, vocabulary = random.Random(seed), llm.engine.checkpoint.spec.vocabulary
    return [[rng.randrange(vocabulary) for _ in range(rng.randint(3, 40))] for _ in PROMPTS]


class PromptSource:
    """Prompts, cut to their last max_tokens.  extend: then passages of the texts in `add_text`."""

    def __init__(self, prompts: Sequence[list[int]], max_tokens: int, extend: bool, seed: int) -> None:
        self.prompts = [ids[-max_tokens:] for ids in prompts]
        self.max_tokens, self.extend, self.rng = max_tokens, extend, random.Random(seed)
        self.texts: list[list[int]] = []
        self.next = 0

    def add_text(self, ids: list[int]) -> None:
        self.texts.append(ids)

    def take(self, count: int) -> list[list[int]]:
        """The next `count` prompts, or as many as are left."""
        while self.extend and self.texts and len(self.prompts) < self.next + count:
            self.prompts.append(self._passage())
        taken = self.prompts[self.next : self.next + count]
        self.next += len(taken)
        return taken

    def shortest(self, count: int) -> list[list[int]]:
        """The shortest distinct prompts, taken or not."""
        return sorted((list(ids) for ids in dict.fromkeys(map(tuple, self.prompts))), key=len)[:count]

    def _passage(self) -> list[int]:
        """A random part of a random text."""
        text = self.rng.choice(self.texts)
        size = self.rng.randint(min(MIN_PASSAGE, len(text)), min(MAX_PASSAGE, len(text), self.max_tokens))
        start = self.rng.randint(0, len(text) - size)
        return text[start : start + size]
