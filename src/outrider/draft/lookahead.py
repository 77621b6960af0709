"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): the target guesses for itself, several tokens ahead at once.

A window of W columns and N - 1 levels rides in every forward.  It is solved as Jacobi iteration solves equations: each step the
target says what follows the last level, and the window moves on by one.  A column read downwards is an n-gram that the target said;
a pool keeps the last G that began with each token, and what followed the last certain token in them is guessed.

    column        0     1     2         parent of level 0, column j:  level 0, column j - 1
    level 0     root ─ 0,1 ─ 0,2        parent of level l, column j:  level l - 1, column j
                 │      │     │
    level 1     1,0    1,1   1,2        so an element sees level 0 up to its column, and its column down to itself: the published
                 │      │     │         mask; and its position is the root's + column + level: the published one
    level 2     2,0    2,1   2,2
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from outrider.core.noise import stream_of
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs, RowStep
from outrider.core.tree import EMPTY_TREE, ROOT, Budget, Draft, DraftTree
from outrider.drafting.base import Drafter, Target
from outrider.drafting.lookup.matches import Belief
from outrider.errors import ConfigError

TOKENS = 1 << 16  # that a pool knows n-grams of; the one that was not heard of for longest goes first


class Pool:
    """The last `most` distinct n-grams that began with each token, without that token; oldest first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.known: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()

    def add(self, token: int, rest: tuple[int, ...]) -> None:
        grams = self.known.setdefault(token, {})
        grams.pop(rest, None)
        grams[rest] = None
        if len(grams) > self.most:
            del grams[next(iter(grams))]
        self.known.move_to_end(token)
        if len(self.known) > TOKENS:
            self.known.popitem(last=False)

    def after(self, token: int) -> Iterable[tuple[int, ...]]:
        """Most recent first."""
        return reversed(self.known.get(token, {}))


@dataclass
class Window:
    """levels[0]: columns 1 …, since column 0 is the root; levels[1:]: columns 0 ….  Complete with `whole` levels."""

    levels: list[list[int]]
    whole: int

    @property
    def size(self) -> int:
        return sum(map(len, self.levels))

    def places(self, first: int) -> list[list[int]]:
        """The nodes of each level, the root as column 0 of the first, if the window begins at node `first`."""
        made, at = [], first
        for level in self.levels:
            made.append(list(range(at, at + len(level))))
            at += len(level)
        made[0].insert(0, ROOT)
        return made

    def parents(self, first: int) -> list[int]:
        places = self.places(first)
        return places[0][:-1] + [node for level in places[:-1] for node in level]

    def ngrams(self, root: int, said: list[int]) -> Iterable[tuple[int, tuple[int, ...]]]:
        """(its first token, the rest) of each column, `said` being what follows the last level; none while the window grows."""
        if len(self.levels) < self.whole:
            return ()
        columns = zip(*([root, *self.levels[0]], *self.levels[1:], said))
        return ((column[0], column[1:]) for column in columns)

    def move(self, said: list[int]) -> None:
        """One position on: a whole window drops its first level, one that grows its last column."""
        if len(self.levels) < self.whole:
            self.levels = [level[1:] for level in (*self.levels, said)]
        else:
            first, *rest = [*self.levels[1:], said]
            self.levels = [first[1:], *rest]


@dataclass
class Known:
    """What is kept for a row.  read: how many of its tokens are in the pool."""

    window: Window
    read: int = 0


@dataclass
class Memory:
    pool: Pool
    belief: Belief  # how often a level of guesses was right


class Lookahead(Drafter):
    demo: ClassVar = {"lookahead decoding": {}}
    needs = Needs(topk=1)

    @dataclass(frozen=True)
    class Options:
        """window_size, level, guess_set_size: the W, N and G of the paper (None: its 15, 5 and 15, but 2, 3 and 1 on a CPU, where every
        node costs time).  pool_from_prompt: the n-grams of the text are in the pool, too (the published code's names).
        """

        window_size: int | None = None
        level: int | None = None
        guess_set_size: int | None = None
        pool_from_prompt: bool = True

        def __post_init__(self) -> None:
            for name, least in (("window_size", 1), ("level", 2), ("guess_set_size", 1)):
                value = getattr(self, name)
                if value is not None and (
                    not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 64
                ):
                    raise ConfigError(f"{name} must be a whole number in {least} … 64, got {value!r}.")
            if not isinstance(self.pool_from_prompt, bool):
                raise ConfigError(f"pool_from_prompt must be True or False, got {self.pool_from_prompt!r}.")

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        window, level, draft_tree = (2, 3, 1) if target.decoder.device.type == "cpu" else (15, 5, 15)
        self.window, self.level = options.window_size or window, options.level or level
        self.draft_tree = options.guess_set_size or draft_tree
        self.depth = self.level - 1
        self.reach = (
            self.window + self.level - 3
        )  # levels of the deepest probe, which is as many as a new window has tokens
        self.memory = Memory(Pool(self.draft_tree), Belief(self.level))
        self.rows: dict[Row, Known] = {}

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A wide window, and all that it has found."""
        return cls(cls.Options(window_size=8, level=4, guess_set_size=8), target)

    def size(self, depth: int) -> int:
        """While a window grows it may have more nodes than in the end."""
        window = max(levels * (self.reach + 2 - levels) - 1 for levels in range(1, self.level))
        return self.draft_tree * min(depth, self.level - 1) + window if depth else 0

    def propose(self, batch: Batch) -> Draft:
        return Draft([self._tree(step) if step.budget.nodes else EMPTY_TREE for step in batch])

    def _tree(self, step: RowStep) -> DraftTree:
        row, end, budget = step.row, step.end, step.budget
        tree = self._guess(row.tokens[-1], budget)
        window = self._known(row).window
        if len(tree.tokens) + window.size > budget.nodes or end + self.reach > self.target.max_len:
            return tree
        tree.parents.extend(window.parents(len(tree.tokens)))
        for level in window.levels:
            tree.tokens.extend(level)
        tree.confidence.extend([0.0] * window.size)
        return tree._replace(probes=window.size)

    def _known(self, row: Row) -> Known:
        if row not in self.rows:
            start = random.Random(stream_of(row.seed, row.index)).choices(row.tokens, k=self.reach)
            self.rows[row] = Known(Window([start], self.level - 1))
        return self.rows[row]

    def _guess(self, last: int, budget: Budget) -> DraftTree:
        """The n-grams after `last`, most recent first, with shared beginnings once."""
        tree, node_of = DraftTree([], [], []), {}
        for gram in self.memory.pool.after(last):
            parent = ROOT
            for level, token in enumerate(gram[: budget.depth]):
                if (parent, token) not in node_of:
                    if len(tree.tokens) == budget.nodes:
                        break
                    node_of[parent, token] = len(tree.tokens)
                    tree.tokens.append(token)
                    tree.parents.append(parent)
                    tree.confidence.append(self.memory.belief(level + 1))
                parent = node_of[parent, token]
        return tree

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            row, tree = step.row, step.tree
            if row not in self.rows:
                continue
            known, root = self.rows[row], row.tokens[step.end - 1]
            if tree.size:
                self.memory.belief.observe(1, tree, step.accepted)
            if step.topk and tree.probes == known.window.size:
                self._learn(row, root, tree, step.topk)
            if self.options.pool_from_prompt:
                self._read(row, known)

    def _learn(self, row: Row, root: int, tree: DraftTree, best: list[list[int]]) -> None:
        """What the target said after the last level; a window in which it could say nothing begins anew."""
        window = self.rows[row].window
        said = [best[1 + node] for node in window.places(tree.size)[-1]]
        if not all(said):
            del self.rows[row]
            return
        tokens = [ids[0] for ids in said]
        for token, rest in window.ngrams(root, tokens):
            self.memory.pool.add(token, rest)
        window.move(tokens)

    def _read(self, row: Row, known: Known) -> None:
        """Puts the n-grams of the text into the pool."""
        n, tokens = self.level, row.tokens
        for at in range(known.read, len(tokens) - n + 1):
            self.memory.pool.add(tokens[at], tuple(tokens[at + 1 : at + n]))
        known.read = max(known.read, len(tokens) - n + 1)

    def forget(self, row: Row, reason: str) -> None:
        self.rows.pop(row, None)
