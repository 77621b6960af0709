"""Prompt lookup: what followed the last time these tokens were seen in this very request (Saxena 2023; arXiv 2304.04487).

The longest match wins, and of equally long ones the most recent.  No match is no guess and costs nothing.  Evidence decides how
much is risked, since an answer of ten tokens never earns back a step that was long for nothing: a row that was not right yet
guesses as many tokens as its match is longer than one; one whose guesses keep failing looks at the longest n-gram only and
guesses one token, until one is right again; the others guess all that they may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.draft.base import Drafter
from outrider.errors import ConfigError
from outrider.types import NOTHING, Batch, Budget, Commit, Draft, Guesses, Row


@dataclass
class Seen:
    """Where each n-gram of a row last ended, for ends before position `upto`: a suffix never matches itself."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    upto: int = 0
    credit: int = 1  # accepted tokens earn it (up to 4), a guess of which nothing was accepted costs one; 1: nothing proven


class Ngram(Drafter):
    demo: ClassVar = {"n-gram look-up": {}}

    @dataclass(frozen=True)
    class Options:
        """prompt_lookup_max, prompt_lookup_min: the longest and shortest n-gram that is looked up (vLLM's names)."""

        prompt_lookup_max: int = 4
        prompt_lookup_min: int = 2

        def __post_init__(self) -> None:
            low, high = self.prompt_lookup_min, self.prompt_lookup_max
            for name, value in (("prompt_lookup_min", low), ("prompt_lookup_max", high)):
                if not isinstance(value, int) or isinstance(value, bool):
                    raise ConfigError(f"{name} must be a whole number, got {value!r}.")
            if not 1 <= low <= high:
                raise ConfigError(f"prompt_lookup_min must be in 1 … prompt_lookup_max ({high}), got {low}.")

    def __init__(self, options: Options, target: object = None) -> None:
        self.options = options
        self.lengths = range(options.prompt_lookup_max, options.prompt_lookup_min - 1, -1)
        self.seen: dict[Row, Seen] = {}

    def propose(self, batch: Batch, budgets: list[Budget]) -> Draft:
        return Draft([self.after(row, (), budget) if budget.nodes else NOTHING for row, budget in zip(batch.rows, budgets)])

    def after(self, row: Row, said: Sequence[int], budget: Budget) -> Guesses:
        tokens, seen = row.tokens, self.seen.setdefault(row, Seen())
        for end in range(seen.upto, len(tokens) - 1):
            for n in self.lengths:
                if n <= end + 1:
                    seen.ends[tuple(tokens[end + 1 - n : end + 1])] = end
        seen.upto, depth = len(tokens) - 1, budget.depth
        tokens = [*tokens, *said] if said else tokens
        for n in self.lengths if seen.credit else self.lengths[:1]:
            found = seen.ends.get(tuple(tokens[-n:]), -1) if n < len(tokens) else -1
            if found >= 0:
                risk = depth if seen.credit > 1 else min(depth, n - 1) if seen.credit else 1
                return _copy(tokens, found + 1, max(1, risk), 1 - 0.5**n)
        return NOTHING

    def observe(self, commit: Commit) -> None:
        for row, tree, nodes in zip(commit.batch.rows, commit.draft.trees, commit.verdict.nodes):
            if tree.tokens and row in self.seen:
                seen = self.seen[row]
                seen.credit = min(4, seen.credit + len(nodes)) if nodes else max(0, seen.credit - 1)

    def forget(self, row: Row, reason: str) -> None:
        self.seen.pop(row, None)


def _copy(tokens: list[int], start: int, depth: int, confidence: float) -> Guesses:
    """`depth` tokens from `start` on; a copy that reaches the end goes on with what it has copied, as a loop would."""
    period = len(tokens) - start
    copied = [tokens[start + i % period] for i in range(depth)]
    return Guesses.chain(copied, [confidence] * depth)
