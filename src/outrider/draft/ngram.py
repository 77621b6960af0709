"""Prompt lookup: propose what followed the last time these tokens occurred in this request (Saxena 2023;
arXiv 2304.04487).

The longest match wins, and of equally long ones the most recent.  Without a match nothing is proposed, at no
cost.

An n-gram row starts unproven, because a short answer never earns back a long step that was rejected:

    credit        matches that are used              draft tokens
    > 1 proven    any                                the whole budget
    1   unproven  UNPROVEN tokens, or the longest    one less than the match has
    0   failing   the longest only                   1

Accepted tokens raise the credit up to 4.  A step in which nothing was accepted lowers it by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.core.row import Row
from outrider.core.step import Commit
from outrider.core.tree import EMPTY_TREE, Budget, DraftTree
from outrider.core.validate import Checked, Count
from outrider.drafting.base import DEPTHS, TextDrafter
from outrider.errors import ConfigError

UNPROVEN = 3  # minimum length of a match in an unproven row
MAX_CREDIT = 4


@dataclass
class NgramIndex:
    """Positions of a row's shortest n-grams.

    ends: n-gram -> the last position where it ended.  before[i]: where the n-gram that ends at i ended the
    time before, -1 for never.  The last token is not indexed, so that a suffix never matches itself.
    """

    before: list[int]
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    credit: int = 1

    def extend(self, tokens: list[int], shortest: int) -> None:
        """Index the tokens that were added since the last call."""
        before, ends = self.before, self.ends
        for end in range(len(before), len(tokens) - 1):
            gram = tuple(tokens[end + 1 - shortest : end + 1])
            before.append(ends.get(gram, -1))
            ends[gram] = end

    def find(self, tokens: list[int], shortest: int, longest: int) -> tuple[int, int]:
        """Return (length, end) of the longest match of the last tokens; (0, -1) if there is none."""
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


class Ngram(TextDrafter):
    demo: ClassVar = {"n-gram look-up": {}}
    tunable: ClassVar = {**DEPTHS, "prompt_lookup_max": (2, 3, 6)}

    @dataclass(frozen=True)
    class Options(Checked):
        """prompt_lookup_max, prompt_lookup_min: length of the longest and the shortest n-gram (vLLM's names).

        A minimum of None means 2, or the maximum if that is shorter.
        """

        prompt_lookup_max: Count = 4
        prompt_lookup_min: Count | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.shortest > self.prompt_lookup_max:
                raise ConfigError(
                    f"prompt_lookup_min must be in 1 … prompt_lookup_max ({self.prompt_lookup_max}), "
                    f"got {self.shortest}."
                )

        @property
        def shortest(self) -> int:
            if self.prompt_lookup_min is not None:
                return self.prompt_lookup_min
            return 1 if self.prompt_lookup_max == 1 else 2

    def __init__(self, options: Options, target: object = None) -> None:
        self.options = options
        self.shortest, self.longest = options.shortest, options.prompt_lookup_max
        self.indexes: dict[Row, NgramIndex] = {}

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        index = self.indexes.get(row)
        if index is None:
            index = self.indexes[row] = NgramIndex([-1] * (self.shortest - 1))
        index.extend(row.tokens, self.shortest)
        tokens = [*row.tokens, *ahead] if ahead else row.tokens
        length, end = index.find(tokens, self.shortest, self.longest)
        if index.credit > 1:
            required, depth = self.shortest, budget.depth
        elif index.credit:
            required, depth = min(UNPROVEN, self.longest), min(budget.depth, max(1, length - 1))
        else:
            required, depth = self.longest, 1
        if length < required:
            return EMPTY_TREE
        return DraftTree.chain(_copy(tokens, end + 1, depth), [1 - 0.5**length] * depth)

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            if step.tree.tokens and step.row in self.indexes:
                index, accepted = self.indexes[step.row], len(step.accepted)
                raised = min(MAX_CREDIT, index.credit + accepted)
                index.credit = raised if accepted else max(0, index.credit - 1)

    def forget(self, row: Row, reason: str) -> None:
        self.indexes.pop(row, None)


def _copy(tokens: list[int], start: int, depth: int) -> list[int]:
    """The `depth` tokens from `start` on; at the end of the text the copied tokens repeat."""
    copied = tokens[start : start + depth]
    while len(copied) < depth:
        copied += copied[: depth - len(copied)]
    return copied
