"""Base of methods with a head for each depth: trees are shapes of ranks (Medusa, arXiv 2401.10774).

A shape is the paths that were right most often so far, a chain, a published tree, or a list of paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from outrider.core.step import Commit
from outrider.core.tree import Budget
from outrider.core.validate import is_whole, whole
from outrider.drafting.base import DEPTHS
from outrider.drafting.options import refuse_idle
from outrider.errors import ConfigError, refuse_unknown
from outrider.heads.base import HeadOptions, StateDrafter
from outrider.heads.ranks import MEDUSA, Path, RankAccuracy, chain_paths, paths

OWN, CHAIN = "own", "chain"
RANKS = 10  # candidates of every head, as many as the published trees use
MAX_RANKS = 64  # that the kernels find at once
PUBLISHED_NODES = 63


@dataclass(frozen=True)
class RankedOptions(HeadOptions):
    """tree: "own" (the ranks that were right most often so far), "chain" (vLLM: the best token of each head),
    the name of a published tree, or a list of paths of ranks, as Medusa's medusa_choices (one is made by
    `RankAccuracy.best_paths`).  nodes: of a tree at most.
    """

    tree: str | Sequence[Sequence[int]] = OWN
    nodes: Annotated[int, whole(1, 1024)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tree(self.tree)
        refuse_idle(self, self.tree != CHAIN, "a tree", "nodes")


class RankedDrafter(StateDrafter):
    """Base of drafters with a head for each depth.

    paths: the nodes that a tree may have; None for any of `ranks` ranks.  levels: heads of the file.
    """

    tunable: ClassVar = {**DEPTHS, "tree": (CHAIN,)}

    def plan(self, levels: int, outputs: int, learns: bool) -> None:
        """Set the shapes of trees, for heads over `outputs` tokens.  learns: whether accuracy is measured."""
        self.levels, self.paths = levels, allowed_paths(self.options.tree, levels)
        self.depth, ranks = levels, RANKS
        if self.paths is not None:
            self.depth, ranks = max(map(len, self.paths)), 1 + max(path[-1] for path in self.paths)
        self.ranks = min(ranks, outputs)
        self.nodes: int = self.target.nodes(self.options.nodes, PUBLISHED_NODES)
        self.prior = RankAccuracy.prior(levels, self.ranks)
        self.memory = self.prior if learns else None

    def shape(self, budget: Budget) -> list[Path]:
        """The best paths within a budget."""
        accuracy: RankAccuracy = self.memory or self.prior
        return accuracy.best_paths(budget.nodes, budget.depth, self.paths)

    def size(self, depth: int) -> int:
        self.check_depth(depth, self.levels)
        if self.options.tree == CHAIN:
            return depth
        if self.paths is None:
            return min(self.nodes, sum(int(self.ranks**level) for level in range(1, depth + 1)))
        return min(self.nodes, sum(len(path) <= depth for path in self.paths))

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        self.learn(commit)


def check_tree(tree: Any) -> None:
    """Raise ConfigError for an unknown name, and for paths that are not a tree."""
    if isinstance(tree, str):
        refuse_unknown([tree], (OWN, CHAIN, *MEDUSA), "tree")
        return
    if not isinstance(tree, (list, tuple)) or not tree or not all(map(_is_path, tree)):
        raise ConfigError(
            "tree must be a name or a list of paths such as [0], [0, 0], [1], of ranks in 0 … "
            f"{MAX_RANKS - 1}, got {tree!r}."
        )
    listed = {(), *map(tuple, tree)}
    for path in map(tuple, tree):
        sibling_before = (*path[:-1], path[-1] - 1) if path[-1] else ()
        for needed in (path[:-1], sibling_before):
            if needed not in listed:
                raise ConfigError(
                    f"tree has the path {list(path)} and not {list(needed)}, without which it cannot be "
                    "reached."
                )


def _is_path(path: Any) -> bool:
    good = isinstance(path, (list, tuple)) and len(path) > 0
    return good and all(is_whole(rank, 0, MAX_RANKS - 1) for rank in path)


def allowed_paths(tree: str | Sequence[Sequence[int]], heads: int) -> frozenset[Path] | None:
    """The paths that may get a node, as deep as the heads; None for all of RANKS ranks."""
    if tree == OWN:
        return None
    if tree == CHAIN:
        return frozenset(chain_paths(heads))
    if isinstance(tree, str):
        return frozenset(path for path in paths(MEDUSA[tree]) if len(path) <= heads)
    listed = frozenset(map(tuple, tree))
    if (deepest := max(map(len, listed))) > heads:
        raise ConfigError(f"tree has {deepest} levels, and the file has {heads} heads.")
    return listed
