"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): the target itself produces n-grams several tokens
ahead.

A window of W columns and N - 1 levels is part of every forward, as probes.  It is solved by Jacobi iteration:
each step the target predicts the token after the last level of each column, and the window advances by one
position.  A column read downwards is an n-gram that the target produced.  A pool keeps the last G n-grams
that begin with each token.  Draft tokens are those that follow the last committed token in its n-grams.

    column        0     1     2         parent of level 0, column j:  level 0, column j - 1
    level 0     root ─ 0,1 ─ 0,2        parent of level l, column j:  level l - 1, column j
                 │      │     │
    level 1     1,0    1,1   1,2
                 │      │     │
    level 2     2,0    2,1   2,2

An element sees level 0 up to its column, and its column down to itself: the published mask.  Its position is
that of the root + column + level: the published position.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs, RowStep
from outrider.core.tree import EMPTY_TREE, ROOT, Budget, Draft, DraftTree
from outrider.core.validate import Checked, Flag, whole
from outrider.drafting.base import Drafter, Target
from outrider.drafting.matches import MatchAcceptance
from outrider.drafting.salts import SaltedMemory, share
from outrider.drafting.trees.builder import TreeBuilder

PUBLISHED_SIZES, CPU_SIZES = (15, 5, 15), (2, 3, 1)  # window, levels and n-grams of a token
MAX_TOKENS = 1 << 16  # first tokens whose n-grams are kept; the least recently used one is evicted


class NgramPool:
    """The last `max_grams` distinct n-grams that begin with each token, without that token; oldest first."""

    def __init__(self, max_grams: int, max_tokens: int = MAX_TOKENS) -> None:
        self.max_grams, self.max_tokens = max_grams, max_tokens
        self.grams: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()

    def add(self, token: int, rest: tuple[int, ...]) -> None:
        grams = self.grams.setdefault(token, {})
        grams.pop(rest, None)
        grams[rest] = None
        if len(grams) > self.max_grams:
            del grams[next(iter(grams))]
        self.grams.move_to_end(token)
        if len(self.grams) > self.max_tokens:
            self.grams.popitem(last=False)

    def after(self, token: int) -> Iterable[tuple[int, ...]]:
        """The n-grams that begin with `token`, most recent first."""
        return reversed(self.grams.get(token, {}))


@dataclass
class Window:
    """The tokens of the window, by level.

    levels[0] holds columns 1, 2, … because column 0 is the root.  The other levels hold columns 0, 1, ….
    The window starts with one level and grows to `full_depth` levels.
    """

    levels: list[list[int]]
    full_depth: int

    @property
    def size(self) -> int:
        return sum(map(len, self.levels))

    @property
    def full(self) -> bool:
        return len(self.levels) == self.full_depth

    def nodes(self, first: int) -> list[list[int]]:
        """Node numbers by level, if the window begins at node `first`; the root is column 0 of level 0."""
        numbered, at = [], first
        for level in self.levels:
            numbered.append(list(range(at, at + len(level))))
            at += len(level)
        numbered[0].insert(0, ROOT)
        return numbered

    def parents(self, first: int) -> list[int]:
        nodes = self.nodes(first)
        return nodes[0][:-1] + [node for level in nodes[:-1] for node in level]

    def ngrams(self, root: int, predicted: list[int]) -> Iterable[tuple[int, tuple[int, ...]]]:
        """(first token, the rest) of each column, with `predicted` below; () while the window grows."""
        if not self.full:
            return ()
        columns = zip(*([root, *self.levels[0]], *self.levels[1:], predicted))
        return ((column[0], column[1:]) for column in columns)

    def advance(self, predicted: list[int]) -> None:
        """Move by one position: a full window drops its first level, a growing one loses a column."""
        levels = [*self.levels, predicted]
        self.levels = [levels[1][1:], *levels[2:]] if self.full else [level[1:] for level in levels]


@dataclass
class RowState:
    """pooled: number of the row's tokens whose n-grams are in the pool."""

    window: Window
    pooled: int = 0


@dataclass
class Memory:
    """acceptance: of draft tokens, by depth."""

    pool: NgramPool
    acceptance: MatchAcceptance


class Lookahead(Drafter):
    demo: ClassVar = {"lookahead decoding": {}}
    tunable: ClassVar = {"window_size": (1, 4, 8), "level": (4, 5), "guess_set_size": (2, 4)}
    needs = Needs(topk=1)

    @dataclass(frozen=True)
    class Options(Checked):
        """window_size, level, guess_set_size: W, N and G of the paper.  pool_from_prompt: also pool n-grams
        of the text.

        The names are those of the published code.  None means the published 15, 5 and 15, but 2, 3 and 1 on a
        CPU, where every node costs time.
        """

        window_size: Annotated[int, whole(1, 64)] | None = None
        level: Annotated[int, whole(2, 64)] | None = None
        guess_set_size: Annotated[int, whole(1, 64)] | None = None
        pool_from_prompt: Flag = True

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        window, level, grams = CPU_SIZES if target.on_cpu else PUBLISHED_SIZES
        self.window, self.level = options.window_size or window, options.level or level
        self.max_grams = options.guess_set_size or grams
        self.depth = self.level - 1
        # Depth of the deepest probe, which is also the number of tokens in a new window.
        self.reach = self.window + self.level - 3
        self.memory = self._empty(MAX_TOKENS)
        self.salted = SaltedMemory(lambda: self._empty(share(MAX_TOKENS)))
        self.rows: dict[Row, RowState] = {}

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A wide window, with all the n-grams that it finds."""
        return cls(cls.Options(window_size=8, level=4, guess_set_size=8), target)

    def _empty(self, max_tokens: int) -> Memory:
        return Memory(NgramPool(self.max_grams, max_tokens), MatchAcceptance(self.level))

    def _known(self, row: Row) -> Memory:
        """The memory that a row is drafted from, and contributes to."""
        memory: Memory = self.memory if row.cache_salt is None else self.salted.of(row)
        return memory

    def size(self, depth: int) -> int:
        """Maximum number of nodes, probes included.  A growing window may have more nodes than a full one."""
        window = max(levels * (self.reach + 2 - levels) - 1 for levels in range(1, self.level))
        return self.max_grams * min(depth, self.level - 1) + window if depth else 0

    def propose(self, batch: Batch) -> Draft:
        return Draft([self._tree(step) if step.budget.nodes else EMPTY_TREE for step in batch])

    def _tree(self, step: RowStep) -> DraftTree:
        """The draft tokens, then the window as probes if budget and model length have room for it."""
        row, end, budget = step.row, step.end, step.budget
        tree = self._draft_tokens(self._known(row), row.tokens[-1], budget)
        window = self._state(row).window
        if window.size <= tree.room and end + self.reach <= self.target.max_len:
            probes = [token for level in window.levels for token in level]
            tree.add_probes(window.parents(len(tree.tokens)), probes)
        return tree.draft_tree

    def _state(self, row: Row) -> RowState:
        if row not in self.rows:
            start = random.Random(row.stream).choices(row.tokens, k=self.reach)
            self.rows[row] = RowState(Window([start], self.level - 1))
        return self.rows[row]

    def _draft_tokens(self, memory: Memory, last: int, budget: Budget) -> TreeBuilder:
        """The n-grams after `last`, most recent first, as a tree with shared prefixes."""
        tree, node_of = TreeBuilder(budget), dict[tuple[int, int], int]()
        for gram in memory.pool.after(last):
            parent = ROOT
            for depth, token in enumerate(gram[: budget.depth], start=1):
                if (parent, token) not in node_of:
                    if not tree.room:
                        break
                    node_of[parent, token] = tree.add(parent, token, memory.acceptance(depth))
                parent = node_of[parent, token]
        return tree

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            row, tree = step.row, step.tree
            if row not in self.rows:
                continue
            state, root = self.rows[row], row.tokens[step.end - 1]
            if tree.size and row.finish_reason is None:  # the end of a text cuts a path that was right
                self._known(row).acceptance.observe(1, tree, step.accepted)
            if step.topk and tree.probes == state.window.size:
                self._advance(row, root, tree, step.topk)
            if self.options.pool_from_prompt:
                self._pool_text(row, state)

    def _advance(self, row: Row, root: int, tree: DraftTree, topk: Sequence[list[int]]) -> None:
        """Pool the window's n-grams and advance it; restart it after a column without a finite logit."""
        window = self.rows[row].window
        best = [topk[1 + node] for node in window.nodes(tree.size)[-1]]
        if not all(best):
            del self.rows[row]
            return
        predicted = [ids[0] for ids in best]
        pool = self._known(row).pool
        for token, rest in window.ngrams(root, predicted):
            pool.add(token, rest)
        window.advance(predicted)

    def _pool_text(self, row: Row, state: RowState) -> None:
        """Pool the n-grams of the text that are not pooled yet."""
        n, tokens, pool = self.level, row.tokens, self._known(row).pool
        for at in range(state.pooled, len(tokens) - n + 1):
            pool.add(tokens[at], tuple(tokens[at + 1 : at + n]))
        state.pooled = max(state.pooled, len(tokens) - n + 1)

    def forget(self, row: Row, reason: str) -> None:
        self.rows.pop(row, None)
        self.salted.forget(row)
