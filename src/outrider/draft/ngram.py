"""Prompt lookup: what followed the last time these tokens were seen in this very request (Saxena 2023; arXiv 2304.04487).

The longest match wins, and of equally long ones the most recent.  No match is no guess and costs nothing.  Evidence decides how
much is risked, since an answer of ten tokens never earns back a step that was long for nothing: a row that was not right yet
guesses behind matches of three tokens and more (or the longest) only, and as many tokens as its match is longer than one; one whose
guesses keep failing looks at the longest n-gram only and guesses one token, until one is right again; the others guess all they may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.core.row import Row
from outrider.core.step import Batch, Commit
from outrider.core.tree import EMPTY_TREE, Budget, Draft, DraftTree
from outrider.drafting.base import Drafter
from outrider.errors import ConfigError

UNPROVEN = 3  # tokens that a match must have in a row that was not right yet


@dataclass
class ForwardOutput:
    """Where each shortest n-gram of a row last ended, and before[i]: where the one before that ended that ends at place i, -1 none.
    Only ends before position `upto` are there: a suffix never matches itself."""

    before: list[int]
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    credit: int = 1  # accepted tokens earn it (up to 4), a guess of which nothing was accepted costs one; 1: nothing proven

    def extend(self, tokens: list[int], shortest: int) -> None:
        """Takes in what was said since the last look."""
        before, ends = self.before, self.ends
        for end in range(len(before), len(tokens) - 1):
            gram = tuple(tokens[end + 1 - shortest : end + 1])
            before.append(ends.get(gram, -1))
            ends[gram] = end

    def find(self, tokens: list[int], shortest: int, longest: int) -> tuple[int, int]:
        """(length, end) of the longest match of the last tokens, of equally long ones the most recent; (0, -1) if there is none."""
        best, place = 0, -1
        end = self.ends.get(tuple(tokens[-shortest:]), -1)
        while end >= 0 and best < longest:
            n = shortest
            while n < longest and n <= end and tokens[end - n] == tokens[-1 - n]:
                n += 1
            if n > best:
                best, place = n, end
            end = self.before[end]
        return best, place


class Ngram(Drafter):
    demo: ClassVar = {"n-gram look-up": {}}

    @dataclass(frozen=True)
    class Options:
        """prompt_lookup_max, prompt_lookup_min: the longest and shortest n-gram that is looked up (vLLM's names; None: 2, or the longest
        where that is shorter)."""

        prompt_lookup_max: int = 4
        prompt_lookup_min: int | None = None

        def __post_init__(self) -> None:
            high, low = self.prompt_lookup_max, self.shortest
            for name, value in (("prompt_lookup_max", high), ("prompt_lookup_min", low)):
                if not isinstance(value, int) or isinstance(value, bool):
                    raise ConfigError(f"{name} must be a whole number, got {value!r}.")
            if high < 1:
                raise ConfigError(f"prompt_lookup_max must be at least 1, got {high}.")
            if not 1 <= low <= high:
                raise ConfigError(f"prompt_lookup_min must be in 1 … prompt_lookup_max ({high}), got {low}.")

        @property
        def shortest(self) -> int:
            return (
                self.prompt_lookup_min
                if self.prompt_lookup_min is not None
                else 1
                if self.prompt_lookup_max == 1
                else 2
            )

    def __init__(self, options: Options, target: object = None) -> None:
        self.options = options
        self.shortest, self.longest = options.shortest, options.prompt_lookup_max
        self.seen: dict[Row, ForwardOutput] = {}

    def propose(self, batch: Batch) -> Draft:
        return Draft(
            [self.after(step.row, (), step.budget) if step.budget.nodes else EMPTY_TREE for step in batch]
        )

    def after(self, row: Row, said: Sequence[int], budget: Budget) -> DraftTree:
        tokens, seen = row.tokens, self.seen.get(row)
        if seen is None:
            seen = self.seen[row] = ForwardOutput([-1] * (self.shortest - 1))
        seen.extend(tokens, self.shortest)
        tokens = [*tokens, *said] if said else tokens
        n, found = seen.find(tokens, self.shortest, self.longest)
        if n < (
            self.shortest if seen.credit > 1 else min(UNPROVEN, self.longest) if seen.credit else self.longest
        ):
            return EMPTY_TREE
        risk = budget.depth if seen.credit > 1 else min(budget.depth, n - 1) if seen.credit else 1
        return _copy(tokens, found + 1, max(1, risk), 1 - 0.5**n)

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            if step.tree.tokens and step.row in self.seen:
                seen, right = self.seen[step.row], len(step.accepted)
                seen.credit = min(4, seen.credit + right) if right else max(0, seen.credit - 1)

    def forget(self, row: Row, reason: str) -> None:
        self.seen.pop(row, None)


def _copy(tokens: list[int], start: int, depth: int, confidence: float) -> DraftTree:
    """`depth` tokens from `start` on; a copy that reaches the end goes on with what it has copied, as a loop would."""
    copied = tokens[start : start + depth]
    while len(copied) < depth:
        copied += copied[: depth - len(copied)]
    return DraftTree.chain(copied, [confidence] * depth)
