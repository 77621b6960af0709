"""Draft trees that a head grows level by level.

    DynamicTree   the likeliest nodes of all levels (EAGLE-2, arXiv 2406.16858)
    RankTree      a shape fixed in advance, as paths of ranks (Medusa, arXiv 2401.10774; EAGLE-1, Hydra)
    BlockTree     the same, if one forward gave the logits of all levels (heads without a recurrence)
    SampledTree   children sampled from q, for verification rules that compare p with q

The K/V of node i is in slot table[base + i], a slot of this step's draft tokens.  For heads over (state,
token) pairs the table begins one slot later than the target's (recurrent.py).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from outrider.backends.candidates import Candidates
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.drafting.trees.builder import SAMPLE_CONFIDENCE, LevelBuilder
from outrider.drafting.trees.sampled import Tree
from outrider.drafting.view import NO_VIEW, View
from outrider.heads.choose import Chooser
from outrider.heads.ranks import Path


class LevelTree(Protocol):
    """A tree that grows level by level.

    sources: for every row of this tree in the next forward, the row of its parent in the last one.  Empty
    once the tree is complete.  base, table: of nodes with K/V in a head's pool.
    """

    sources: Sequence[int]
    base: int

    def add_level(self, choose: Chooser, logits: Tensor) -> None:
        """Add the next level, from float32 [rows of the last forward, Vd]."""

    def add_to(self, step_input: StepInput) -> None: ...
    @property
    def table(self) -> array[int]: ...
    @property
    def frontier_tokens(self) -> list[int]: ...
    @property
    def frontier_paths(self) -> list[tuple[list[int], list[int]]]:
        """Tokens and slots from the root to every node of the next forward."""

    @property
    def draft_tree(self) -> DraftTree: ...


def frontier_tokens(trees: Sequence[LevelTree]) -> list[int]:
    """The input tokens of the next forward."""
    return [token for tree in trees for token in tree.frontier_tokens]


T = TypeVar("T", bound=LevelTree)


class Growth(Generic[T]):
    """Trees that grow together, level by level, while `add` returns True.

    trees: the incomplete ones.  sources: for every row of the next forward, the row of its parent in the last
    logits.  level: of the next logits.
    """

    def __init__(self, trees: Sequence[T], choose: Chooser) -> None:
        self.trees, self.choose, self.level = trees, choose, 0
        self.sources = list(range(len(trees)))

    def add(self, logits: Tensor, ending: Collection[T] = ()) -> bool:
        """Add a level to every tree, from float32 [rows of all trees, Vd].  Whether any is incomplete.

        ending: trees that get no further level
        """
        incomplete, sources, first = list[T](), list[int](), 0
        for tree in self.trees:
            count = len(tree.sources)
            tree.add_level(self.choose, logits[first : first + count])
            if tree.sources and tree not in ending:
                sources += [first + source for source in tree.sources]
                incomplete.append(tree)
            first += count
        self.trees, self.sources, self.level = incomplete, sources, self.level + 1
        return bool(incomplete)


class DynamicTree:
    """Tree of the likeliest nodes.

    Each level finds the k best tokens after each of its nodes, and expands the likeliest of them.  At the end
    the likeliest nodes of all levels are kept.  No node is likelier than its parent, so every parent of a
    kept node is kept.

    device_tree: the tree, if it grew on the device (device_trees.py)
    """

    device_tree: DraftTree | None = None

    def __init__(self, row: Row, table: array[int], base: int, budget: Budget, k: int) -> None:
        self.row, self.table, self.base, self.budget, self.k = row, table, base, budget, min(k, budget.nodes)
        # Expanded nodes per level: each needs the slot of a draft token.
        self.width = max(1, min(self.k, budget.nodes // max(1, budget.depth - 1)))
        self.depth, self.used_slots = 0, 0
        self.candidates: Candidates | None = None
        self.tokens: list[list[int]] = [[]]  # from the root to each node of the frontier
        self.slots: list[list[int]] = [[]]
        self.sources: Sequence[int] = [0]

    def add_level(self, choose: Chooser, logits: Tensor) -> None:
        if self.candidates is None:
            self.candidates = choose.backend.candidates(self.k, self.width, self.budget.depth)
        self.sources, tokens = choose.widen(self.candidates, self.row, self.tokens, logits)
        self.depth += 1
        if self.depth == self.budget.depth:
            self.sources = ()
            return
        first = self.base + self.used_slots
        slots = self.table[first : first + len(tokens)]
        self.used_slots += len(tokens)
        self.tokens = [[*self.tokens[parent], token] for parent, token in zip(self.sources, tokens)]
        self.slots = [[*self.slots[parent], slot] for parent, slot in zip(self.sources, slots)]

    @property
    def frontier_tokens(self) -> list[int]:
        return [path[-1] for path in self.tokens]

    @property
    def frontier_paths(self) -> list[tuple[list[int], list[int]]]:
        return list(zip(self.tokens, self.slots))

    def add_to(self, step_input: StepInput) -> None:
        step_input.nodes(self.table, self.base, self.slots, self.frontier_tokens)

    @property
    def draft_tree(self) -> DraftTree:
        if self.device_tree is not None:
            return self.device_tree
        assert self.candidates is not None
        return DraftTree(*self.candidates.keep(self.budget.nodes))


class RankTree(LevelBuilder):
    """Tree of given paths of ranks: (0, 2) is the third child of the first child of the root.

    paths:   closed under parents and smaller siblings
    sampled: children are sampled from q instead of its best tokens; their number depends on no token
    table:   None for a head without K/V
    acceptance: expected acceptance sum(min(p, q)) after every node of the frontier, by a trained predictor;
        None: estimated from the logits
    device_tree: the tree, if it grew on the device (device_trees.py)
    """

    acceptance: Sequence[float] | None = None
    device_tree: DraftTree | None = None

    def __init__(
        self,
        row: Row,
        paths: Collection[Path],
        base: int = 0,
        table: array[int] | None = None,
        sampled: bool = False,
        stream_id: int = 0,
    ) -> None:
        budget = Budget(max(map(len, paths), default=0), len(paths))
        super().__init__(row, base, budget, NO_VIEW if table is None else View(table), stream_id)
        self.sampled = sampled
        self.children = Counter(path[:-1] for path in paths)
        self.ranks: dict[int, Path] = {ROOT: ()}  # of every node
        self.sources: Sequence[int] = [0]

    def add_level(self, choose: Chooser, logits: Tensor) -> None:
        parents = self.frontier
        counts = [self.children[self.ranks[node]] for node in parents]
        add = self._sample if self.sampled else self._choose
        added = add(choose, logits, counts)
        sources: list[int] = []
        self.frontier, self.sources = [], sources
        for i, (parent, nodes) in enumerate(zip(parents, added)):
            for rank, node in enumerate(nodes):
                path = self.ranks[node] = (*self.ranks[parent], rank)
                if path in self.children:
                    self.frontier.append(node)
                    sources.append(i)

    @property
    def draft_tree(self) -> DraftTree:
        return super().draft_tree if self.device_tree is None else self.device_tree

    def _choose(self, choose: Chooser, logits: Tensor, counts: Sequence[int]) -> list[list[int]]:
        """Add the best tokens after every node of the frontier; returns the new nodes of each."""
        ranked = self._rankings(choose, logits, max(counts))
        if self.acceptance is not None:
            has_noise = self.row.distribution.temperature > 0
            ranked = [with_acceptance(best, a, has_noise) for best, a in zip(ranked, self.acceptance)]
        added: list[list[int]] = []
        for parent, count, best in zip(self.frontier, counts, ranked):
            added.append([self.add(parent, token, confidence) for token, confidence in best[:count]])
        return added

    def _sample(self, choose: Chooser, logits: Tensor, counts: Sequence[int]) -> list[list[int]]:
        """Add samples from q after every node of the frontier; returns the new nodes of each.

        Only the first level has predicted confidences.  Deeper ones would depend on the sampled tokens above
        them, and a controller that cuts by them would bias what rejection rules emit.
        """
        predicted = self.acceptance if self.frontier == [ROOT] else None
        added: list[list[int]] = []
        for i, q in enumerate(self._distributions(choose, logits)):
            confidence = SAMPLE_CONFIDENCE
            if predicted is not None:
                confidence = [predicted[i] * (1 - predicted[i]) ** rank for rank in range(counts[i])]
            parent, children = self.frontier[i], choose.sampler.children
            samples = [] if q is None else self.add_samples(parent, q, counts[i], children, confidence)
            added.append(samples)
        return added

    def _rankings(self, choose: Chooser, logits: Tensor, k: int) -> list[list[tuple[int, float]]]:
        """The k best (token, confidence) after every node of the frontier; fewer if fewer exist."""
        return choose.ranked(self.row, [self.path_tokens(node) for node in self.frontier], logits, k)

    def _distributions(self, choose: Chooser, logits: Tensor) -> Sequence[int | None]:
        """Index of q after every node of the frontier; None where q cannot be computed."""
        probs = [
            choose.distribution(self.row, self.path_tokens(node), row)
            for node, row in zip(self.frontier, logits)
        ]
        return [None if q is None else self.add_distribution(q) for q in probs]


def with_acceptance(
    best: Sequence[tuple[int, float]], acceptance: float, has_noise: bool
) -> list[tuple[int, float]]:
    """The best (token, confidence): the first gets the expected acceptance, the others share the rest.

    acceptance: expected sum(min(p, q)).  has_noise: the target shares the noise of the draft.  Then the two
    agree with probability acceptance / (2 - acceptance) at least (arXiv 2408.07978).
    """
    if not best:
        return []
    (first_token, first_confidence), *others = best
    first = acceptance / (2 - acceptance) if has_noise else acceptance
    scale = (1 - first) / max(1e-6, 1 - first_confidence)
    return [(first_token, first), *((token, confidence * scale) for token, confidence in others)]


class BlockTree(RankTree):
    """A RankTree whose logits [levels, Vd] do not depend on the draft tokens before a level.

    Nodes of one level have the same best tokens and the same q.  Logits processors see the best token of
    every earlier level.
    accuracy[level][rank]: confidence of a node; None: estimated from the logits
    """

    accuracy: Sequence[Sequence[float]] | None = None

    def __init__(
        self, row: Row, logits: Tensor, paths: Collection[Path], sampled: bool = False, stream_id: int = 0
    ) -> None:
        super().__init__(row, paths, sampled=sampled, stream_id=stream_id)
        self.logits, self.level = logits[: self.budget.depth], 0
        self.level_rankings: list[list[tuple[int, float]]] = []

    def grow(self, choose: Chooser) -> None:
        """Add all levels."""
        while self.frontier:
            self.add_level(choose, self.logits[self.level].expand(len(self.frontier), -1))
            self.level += 1

    def _rankings(self, choose: Chooser, logits: Tensor, k: int) -> list[list[tuple[int, float]]]:
        if not self.level_rankings:
            self.level_rankings = self._rank_levels(choose)
        best = self.level_rankings[self.level] if self.level < len(self.level_rankings) else []
        if self.accuracy is not None:
            best = [(token, confidence) for (token, _), confidence in zip(best, self.accuracy[self.level])]
        return [best] * len(self.frontier)

    def _rank_levels(self, choose: Chooser) -> list[list[tuple[int, float]]]:
        """The best tokens of every level, in one call unless logits processors need the path."""
        k, levels = max(self.children.values()), len(self.logits)
        if not self.row.processors:
            return choose.ranked(self.row, [[0] * level for level in range(levels)], self.logits, k)
        path, found = list[int](), list[list[tuple[int, float]]]()
        for level in range(levels):
            found += choose.ranked(self.row, [path], self.logits[level : level + 1], k)
            if not found[-1]:
                break
            path = [*path, found[-1][0][0]]
        return found

    def _distributions(self, choose: Chooser, logits: Tensor) -> Sequence[int | None]:
        path = [int(probs.argmax()) for probs in self.distributions]
        probs = choose.distribution(self.row, path, self.logits[self.level])
        return [None if probs is None else self.add_distribution(probs)] * len(self.frontier)


class SampledTree(Tree):
    """Tree of samples without replacement, at most k per level; all samples are kept."""

    def __init__(
        self, row: Row, table: array[int], base: int, budget: Budget, k: int, stream_id: int
    ) -> None:
        super().__init__(row, base, budget, k, view=View(table), stream_id=stream_id)
        self.sources: Sequence[int] = [0]

    def add_level(self, choose: Chooser, logits: Tensor) -> None:
        parents, found = self.frontier, dict[int, Tensor]()
        for node, row in zip(parents, logits):
            if (q := choose.distribution(self.row, self.path_tokens(node), row)) is not None:
                found[node] = q
        self.draw(found, choose.sampler.children)
        self.sources = sources_of(self, parents)


def sources_of(tree: Tree, parents: Sequence[int]) -> list[int]:
    """Index in `parents` of the parent of every frontier node; empty if the tree is complete."""
    return [parents.index(tree.parents[node]) for node in tree.frontier] if tree.growing else []
