"""Predicted output: propose what follows in a text that the output repeats in large parts (OpenAI's field
`prediction`).

The text comes with the request.  Its next token is `next`: behind those that the output has repeated so far.
After a token that differs, the place where the output continues is searched for:

    prediction   a b c d e f g h i
    output       a b c X            as if X replaced d:                            draft e f g h
    output       a b c X Y e f      where most of the last tokens occur, nearby:   draft g h i

Drafts grow while they are accepted.  After n drafts that failed, a match has at least n tokens.  So a wrong
prediction costs next to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from outrider.core.row import Row
from outrider.core.step import Commit
from outrider.core.tree import EMPTY_TREE, Budget, DraftTree
from outrider.core.validate import NoOptions
from outrider.drafting.base import TextDrafter

CONFIDENCE = 0.8  # of every draft token
FIRST, RETRY, GROWTH, LONGEST = 12, 4, 3, 16  # tokens: at first, after failure, more after success, at most
MATCH = 4  # tokens of the longest match
NEAR = 8  # tokens that a match of one token may lie off the expected place
PLACES = 16  # of a token, before and behind the expected place


@dataclass
class Follower:
    """Place of one row's output in its prediction.

    next: index of the token that may follow the first `count` tokens of the output.
    following: the last one of these is a repeated one.  reach: draft tokens at most.
    misses: drafts in a row of which nothing was accepted.  behind: token -> the indexes behind it.
    """

    tokens: Sequence[int]
    next: int = 0
    count: int = 0
    following: bool = True
    reach: int = FIRST
    misses: int = 0
    behind: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i, token in enumerate(self.tokens, start=1):
            self.behind.setdefault(token, []).append(i)

    def follow(self, tokens: Sequence[int]) -> None:
        """Advance by further tokens of the output.  One that differs counts as a replaced one."""
        for token in tokens:
            self.following = self.next < len(self.tokens) and self.tokens[self.next] == token
            self.next += 1
        self.count += len(tokens)

    def draft(self, last: Sequence[int], depth: int) -> list[int]:
        """Tokens that may follow an output with these last MATCH tokens or fewer; may be empty."""
        if not self.following:
            place, length = self._find(last)
            if length and length >= self.misses:
                self.next = place
            elif self.misses:
                return []
        return list(self.tokens[self.next : self.next + min(depth, self.reach)])

    def _find(self, last: Sequence[int]) -> tuple[int, int]:
        """(index behind the longest, then nearest match of the last tokens, its length); (0, 0) if none."""
        places = self.behind.get(last[-1], ())
        middle = bisect_left(places, self.next)
        best = best_length = best_off = 0
        for place in places[max(0, middle - PLACES) : middle + PLACES]:
            length, off = 1, abs(place - self.next)
            while length < min(place, len(last)) and self.tokens[place - 1 - length] == last[-1 - length]:
                length += 1
            # of equally near places the later one
            longer = length > best_length or (length == best_length and off <= best_off)
            if longer and (length > 1 or off <= NEAR):
                best, best_length, best_off = place, length, off
        return best, best_length

    def learn(self, drafted: int, accepted: int) -> None:
        """Update reach and misses after a draft was verified."""
        if accepted == drafted:
            self.reach = min(LONGEST, self.reach + GROWTH)
        else:
            self.reach = max(RETRY, min(self.reach // 2, accepted))
        self.misses = 0 if accepted else min(MATCH, self.misses + 1)


class Prediction(TextDrafter):
    automatic = True
    depth = LONGEST
    Options = NoOptions

    def __init__(self, options: NoOptions, target: object = None) -> None:
        self.options = options
        self.followers: dict[Row, Follower] = {}

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        if not row.prediction:
            return EMPTY_TREE
        follower = self.followers.get(row)
        if follower is None:
            follower = self.followers[row] = Follower(row.prediction)
        follower.follow(row.tokens[row.prompt + follower.count :])
        if ahead:
            follower = copy(follower)
            follower.follow(ahead)
        last = [*row.tokens[max(row.prompt, len(row.tokens) - MATCH) :], *ahead][-MATCH:]
        draft = follower.draft(last, budget.depth)
        return DraftTree.chain(draft, [CONFIDENCE] * len(draft)) if draft else EMPTY_TREE

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            if step.tree.size and (follower := self.followers.get(step.row)):
                follower.learn(step.tree.size, len(step.accepted))

    def forget(self, row: Row, reason: str) -> None:
        self.followers.pop(row, None)
